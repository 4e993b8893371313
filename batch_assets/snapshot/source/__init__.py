"""Sources of rows: Parquet, JSONL, JSON, CSV and TSV files on disk or in S3, and grids; blocks know file and line.

`reader` is where to begin. `derived` makes rows of other rows: renamed, or of the elements of a list.
"""

__all__ = ["block", "derived", "errors", "files", "parquet", "reader", "size"]
