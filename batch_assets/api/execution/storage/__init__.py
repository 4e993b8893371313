"""What of a batch is kept: its rows in the store, and on this computer until they are there.

`kept_rows` has the journal and the objects of one batch; `local_journal` keeps rows on this computer that the store
does not have yet, and takes over those of workers that are gone, which `holders` says; `read_ahead` reads many small
objects at once.
"""

__all__ = ["holders", "kept_rows", "local_journal", "read_ahead"]
