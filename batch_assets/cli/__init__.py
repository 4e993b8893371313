"""The command line `batch-assets`: one module per command, started by `main`.

`main` declares the commands, `command_groups` those of `fleet`, `kubernetes` and `keys`, `arguments` what several of
them are given. `run` asks Dagster for a dataset and follows it to its table (`batch_assets.monitoring`); `plan` and
`status_command` print; `fleet_commands` and `demos` are folders of commands. Dagster is imported only by commands that
need it.
"""

__all__ = ["main"]
