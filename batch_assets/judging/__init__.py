"""`judge:` of a dataset: what the votes of a model say of each row that was judged.

`judged_table` is where to begin; `votes` counts them, on disk.
"""

__all__ = ["judged_table", "votes"]
