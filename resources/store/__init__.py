"""One dataset in the store: snapshots, batch objects, journal and published tables, in `resources.objects`.

`dataset_store` is where to begin, and says what a committed batch is; `snapshot_manifest` says what a snapshot is;
`journal` keeps finished rows of batches that are still open; `integrity`
holds checksums and sealed manifests; `outcome_tables` are outcomes as Arrow tables, `outcome_columns` the names of
their columns, `table_types` the types of a table's other columns, `row_condition` which rows meet a condition;
`reusable_answers` are those of other datasets beside a snapshot; `stored_batches` are those that a provider's Batch API
has.
"""

__all__ = [
    "dataset_store",
    "journal",
    "object_integrity",
    "outcome_columns",
    "outcome_tables",
    "reusable_answers",
    "row_condition",
    "snapshot_manifest",
    "stored_batches",
    "table_types",
]
