"""Sources of rows: Parquet, JSONL and CSV files on disk or in S3, and grids; in blocks that know file and line.

`reader` is where to begin.
"""

__all__ = ["block", "errors", "parquet", "reader", "size"]
