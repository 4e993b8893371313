"""From a source to a snapshot: every row read once, its prompt rendered, and cut into batches of 250 rows.

`builder` runs it: `grouping` reads, `prompts` renders, `row_index` compares with the previous snapshot, `placement`
chooses the batch of each row, `files` writes. `left_out` says which rows cannot be used, `condition_check` which
conditions on rows that are made. `reuse` finds answers of other
datasets. `source` reads Parquet, JSONL, JSON, CSV, TSV and grids.
"""

__all__ = [
    "builder",
    "cache",
    "condition_check",
    "grouping",
    "ingest",
    "integrity",
    "left_out",
    "placement",
    "prompts",
    "reuse",
    "row_filter",
]
