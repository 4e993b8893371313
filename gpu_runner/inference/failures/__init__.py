"""What a failed request means.

`retry` has the classes of failures and the waits; `overload` and `denials` are two causes that only several show.
`failing_requests` says what all of them meet.
"""

__all__ = ["denials", "failing_requests", "overload", "retry"]
