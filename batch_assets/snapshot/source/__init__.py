"""Sources of rows: Parquet, JSONL, JSON, CSV and TSV files on disk, in S3 or on the Hugging Face hub, and grids;
blocks know file and line.

`reader` is where to begin. `derived` makes rows of other rows: renamed, or of the elements of a list.
`hub_files` reads those of one commit of the hub. `signatures` names files of another kind than their names say.
"""

__all__ = [
    "block",
    "derived",
    "errors",
    "files",
    "hub_files",
    "parquet",
    "parquet_types",
    "reader",
    "signatures",
    "size",
]
