"""Brings batches on: from a checked input to output and error files.

`worker` looks for batches and holds them; `batch_lifecycle` carries each through its states; `model_feed` has one feed
of rows per model, shared by all batches of that model, in the order of `batch_queue`; `batch_run` is one batch under
way: the lines that are left of it; `storage/` keeps what is done; `results` writes the output and error files;
`engines/` say who serves a model; `catalog` reports what was made to Dagster; `sweeper` deletes what nobody can read
any more.
"""

__all__ = ["batch_lifecycle", "batch_run", "catalog", "engines", "storage", "worker"]
