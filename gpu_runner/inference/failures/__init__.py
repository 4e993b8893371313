"""What a failed request means.

`retry` says whether one costs its row a try, and how long the row waits; `overload` and `denials` are two causes that
only several show. `failing_requests` says what all of them meet. The retry itself is in `inference.failed_requests`.
"""

__all__ = ["denials", "failing_requests", "overload", "retry"]
