"""`filter:` of a dataset: the rows of its table that pass, and those that fall out, by which rule; `want`: how many.

`passed_table` is where to begin; `row_marks` makes of each rule what says which rows it flags. `wanted_rows` says how
much of a source is read until enough pass.
"""

__all__ = ["passed_table", "row_marks", "wanted_rows"]
