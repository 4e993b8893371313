"""From batch objects to one table with a dataset card, and whether everything agrees.

`publish` writes the table, `dead_letters` the rows without a completion, `dataset_card` its README; `quality` measures
it; `verify` compares snapshot, batch objects, catalog, table and dead letters, byte by byte. `derived_table` has what
tables that are made of a published one share; `output_columns` what the properties of an output become.
`current_rows` reads rows as they are now, also those of open batches; `committed_part` writes the first ones for a step
of a chain.
"""

__all__ = [
    "batch_reader",
    "committed_part",
    "current_rows",
    "dataset_card",
    "dead_letters",
    "derived_table",
    "differences",
    "output_columns",
    "prompt_column",
    "publish",
    "published_table",
    "quality",
    "table_files",
    "verify",
]
