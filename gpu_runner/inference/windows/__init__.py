"""How many rows are in flight.

`concurrency_window` finds what an engine takes; `first_token_window` says how much of it rows may have where others
wait for first tokens. `rate_limit` spreads requests over the minute where an engine takes only so many.
"""

__all__ = ["concurrency_window", "first_token_window", "rate_limit"]
