"""Requests that take much longer than others: when one is late, and the second request for its rows.

`request_durations` learns how long requests take; `late_rows` sends the second request, whose answer counts if it is
the first one.
"""

__all__ = ["late_rows", "request_durations"]
