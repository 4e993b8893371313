"""What Dagster's UI shows of a dataset: counts, places, a few rows, and how lengths and latencies are distributed.

`materialization` is all that is told of a snapshot and of a table. `sample_rows` writes Markdown tables of its rows,
`batch_rows` those of a batch, `distributions` counts in one pass, `histogram` draws SVG pictures of the counts.
"""

__all__ = ["batch_rows", "distributions", "histogram", "materialization", "sample_rows"]
