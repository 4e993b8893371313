"""What a failed request means.

`retry` has the classes of failures and the waits; `overload` and `denials` are two causes that only several show.
"""

__all__ = ["denials", "overload", "retry"]
