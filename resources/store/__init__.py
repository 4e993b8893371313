"""One dataset in the store: snapshots, batch objects, journal and published tables, on disk or in S3.

`dataset_store` is where to begin; `snapshot_manifest` says what a snapshot is, `batch_objects` what a committed batch
is; `journal` keeps finished rows of batches that are still open; `objects` opens a folder (`local_objects`) or a bucket
(`s3_objects`) behind one small interface (`object_interface`); `integrity` holds checksums and sealed manifests;
`outcome_tables` are outcomes as Arrow tables, `outcome_columns` the names of their columns; `reusable_answers` are
those of other datasets beside a snapshot; `read_ahead` reads many objects at once.
"""

__all__ = [
    "dataset_store",
    "health",
    "integrity",
    "journal",
    "objects",
    "outcome_columns",
    "outcome_tables",
    "read_ahead",
    "reusable_answers",
]
