"""`filter:` of a dataset: the rows of its table that pass, and those that fall out, by which rule.

`passed_table` is where to begin; `row_marks` makes of each rule what says which rows it flags.
"""

__all__ = ["passed_table", "row_marks"]
