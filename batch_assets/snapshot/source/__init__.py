"""Sources of rows: Parquet, JSONL, JSON, CSV and TSV files on disk or in S3, and grids; blocks know file and line.

`reader` is where to begin.
"""

__all__ = ["block", "errors", "files", "parquet", "reader", "size"]
