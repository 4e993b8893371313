"""What instances cost, and for whom: bills, their parts, budgets.

`bill_end` says when an instance's bill ends, `bill_split` divides it into its parts, `charges` says which dataset bears
what of it, and `request_budget` is what a dataset may still spend.
"""

__all__ = ["bill_end", "bill_split", "charges", "request_budget"]
