"""The command line `batch-assets`: one module per command, started by `main`.

`main` declares the commands, `command_groups` those of `fleet`, `kubernetes`, `keys` and `dead-letters`, `arguments`
what several of them are given. `dataset_commands`, `fleet_commands` and `demos` are folders of commands: `run` asks
Dagster for a dataset and follows it to its table (`batch_assets.request_status`), `plan` and `status_command` print.
`model_status` is the status of open batches of the Batch API; `output` prints JSON. Dagster is imported only by
commands that need it.
"""

__all__ = ["main"]
