"""Brings batches on: from a checked input to output and error files.

`worker` looks for batches and holds them; `batch_lifecycle` carries each through its states; `model_feed` has one
feed of rows per model, shared by all batches of that model, in the order of `batch_queue`; `batch_run` is one batch
under way: its rows, journal and batch objects; `open_parts` are those of them that a feed has; `local_journal` keeps
rows on this computer that the store does not have yet; `stops` ends rows of batches that are over; `results` writes
the output and error files; `engines/` say who serves a model; `catalog` reports what was made to Dagster; `sweeper`
deletes what nobody can read any more; `read_ahead` reads many small objects at once; `holders` says whether another
worker is gone.
"""

__all__ = ["batch_lifecycle", "batch_run", "catalog", "engines", "worker"]
