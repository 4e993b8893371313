"""How many rows are in flight.

`concurrency_window` finds what an engine takes; `first_token_window` says how much of it rows may have where others
wait for first tokens.
"""

__all__ = ["concurrency_window", "first_token_window"]
