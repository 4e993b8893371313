"""A page on which people look at the rows of tables, published and being made: `batch-assets view`.

`row_query` is what may be asked, as SQL of our own with all of the user's text as parameters; `table_reader` asks
DuckDB for it; `unfinished_table` has the committed rows of a table that is being made; `app` answers the page over
HTTP; `server` serves it behind the guard of Dagster's webserver; `page/` is the page itself, without a build step.
Everything is read only and bounded: rows of a page, bytes of a cell, seconds of a query.
"""

__all__ = ["app", "row_query", "server", "table_reader", "unfinished_table"]
