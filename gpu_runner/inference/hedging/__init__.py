"""Requests that take much longer than others: when one is late.

`request_durations` learns how long requests take; `late_rows` says which are late. `second_requests`, a floor above,
asks once more for their rows.
"""

__all__ = ["late_rows", "request_durations"]
