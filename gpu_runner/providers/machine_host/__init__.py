"""Machines as host processes of this computer: what the providers `simulated` and `local` share.

`daemon` is one machine's process, `manager` starts and ends them, `registry` remembers them in SQLite.
"""

__all__ = ["manager", "registry"]
