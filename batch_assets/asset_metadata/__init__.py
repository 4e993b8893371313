"""What Dagster's UI shows of a dataset: counts, places, a few rows, and how lengths and latencies are distributed.

`materialization` is all that is told of a snapshot and of a table. `sample_rows` writes Markdown tables,
`distributions` counts in one pass, `histogram` draws SVG pictures of the counts.
"""

__all__ = ["distributions", "histogram", "materialization", "sample_rows"]
