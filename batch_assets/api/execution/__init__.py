"""Brings batches on: from a checked input to output and error files.

`worker` looks for batches and holds them; `batch_lifecycle` carries each through its states; `model_feed` has one feed
of rows per model, shared by all batches of that model, in the order of `batch_queue`; `batch_run` is one batch under
way: what is kept of it, and the lines that are left; `local_journal` keeps rows on this computer that the store does
not have yet; `results` writes the output and error files; `engines/` say who serves a model; `catalog` reports what was
made to Dagster; `sweeper` deletes what nobody can read any more.
"""

__all__ = ["batch_lifecycle", "batch_run", "catalog", "engines", "local_journal", "worker"]
