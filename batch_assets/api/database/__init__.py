"""What the service knows, in SQLite or Postgres: its tables, and the states of a batch.

`tables` and `usage_tables` have them (`amounts`: money in them), `migrations/` their versions, `service_database` opens
them, Postgres by `gpu_runner.bounded_postgres`. `file_records` and `batch_records` read and write, `states` says what
may follow on what, `database_figures` what Prometheus is told, `home_folders` whose a service's files on this computer
are. Nothing here knows HTTP. All calls block for the time of a short transaction and are safe from several threads and
processes.
"""

__all__ = [
    "amounts",
    "batch_records",
    "database_figures",
    "file_records",
    "home_folders",
    "service_database",
    "states",
    "tables",
    "usage_tables",
]
