"""The groups of commands: `batch-assets fleet …`, `kubernetes …`, `keys …` and `dead-letters …`.

What a command does is in its own module, imported when it is called.
"""

from __future__ import annotations

from typing import Annotated

import typer

from batch_assets.cli.arguments import Json
from batch_assets.cli.user_errors import user_errors

fleet_app = typer.Typer(invoke_without_command=True, help="What is rented now, who leases it, and what it cost.")


@fleet_app.callback()
def fleet(context: typer.Context, as_json: Json = False) -> None:
    """What is rented now, who leases it, and what everything cost so far."""
    if context.invoked_subcommand is None:
        with user_errors():
            from batch_assets.cli.fleet_commands.fleet import show_fleet

            show_fleet(as_json=as_json)


@fleet_app.command()
def check(as_json: Json = False) -> None:
    """Whether every configured provider can be rented from: credentials, rights, quota, prices. Rents nothing."""
    with user_errors():
        from batch_assets.cli.fleet_commands.fleet_check import show_checks

        raise typer.Exit(show_checks(as_json=as_json))


@fleet_app.command()
def down(
    force: Annotated[bool, typer.Option("--force", help="Also while runs are under way; they may rent anew.")] = False,
) -> None:
    """End every instance."""
    with user_errors():
        from batch_assets.cli.fleet_commands.fleet import end_fleet

        raise typer.Exit(end_fleet(force=force))


kubernetes_app = typer.Typer(no_args_is_help=True, help="Dagster on Kubernetes.")


@kubernetes_app.command(name="check")
def kubernetes_check(
    account: Annotated[str, typer.Argument(help="Account to check: daemon, webserver or worker.", show_default=False)],
    namespace: Annotated[str, typer.Option(help="Where run workers are; for worker: where engine pods are.")],
    as_json: Json = False,
) -> None:
    """Whether the service account of this process has the rights that it needs there. Changes nothing."""
    with user_errors():
        from batch_assets.cli.fleet_commands.fleet_check import show_rights

        raise typer.Exit(show_rights(account, namespace, as_json=as_json))


keys_app = typer.Typer(no_args_is_help=True, help="API keys of the front door (`batch-assets serve`).")


@keys_app.command(name="create")
def create_key(
    tenant: Annotated[str, typer.Argument(help="Tenant that the key is for.", show_default=False)],
    scope: Annotated[
        list[str] | None, typer.Option(help="What it allows, several times; without: all but metrics.read.")
    ] = None,
    name: Annotated[str, typer.Option(help="What it is for, in your words.")] = "",
    expires: Annotated[str | None, typer.Option(help="When it ends, as 90d; without: never.")] = None,
    as_json: Json = False,
) -> None:
    """Make an API key and print it, this once."""
    with user_errors():
        from batch_assets.cli import keys

        keys.create_key(tenant, scope or [], name, expires, as_json=as_json)


@keys_app.command(name="list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Keys of this tenant only.")] = None, as_json: Json = False
) -> None:
    """Show API keys: whose, for what, until when."""
    with user_errors():
        from batch_assets.cli import keys

        keys.list_keys(tenant, as_json=as_json)


@keys_app.command(name="revoke")
def revoke_key(key_id: Annotated[str, typer.Argument(help="As `keys list` shows it.", show_default=False)]) -> None:
    """End an API key."""
    with user_errors():
        from batch_assets.cli import keys

        keys.revoke_key(key_id)


dead_letters_app = typer.Typer(
    no_args_is_help=True,
    help="Online requests that were given up, at the service of BATCH_ASSETS_FRONT_DOOR_URL (else the one on this "
    "machine), with the key BATCH_ASSETS_FRONT_DOOR_KEY.",
)


@dead_letters_app.command(name="list")
def list_dead_letters(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most so many, the newest first.")] = 100,
    as_json: Json = False,
) -> None:
    """Show what was given up, of all tenants: never what was asked."""
    with user_errors():
        from batch_assets.cli import dead_letters

        dead_letters.list_dead_letters(limit, as_json=as_json)


@dead_letters_app.command(name="redrive")
def redrive_dead_letters(
    task_ids: Annotated[
        list[str] | None, typer.Argument(help="As `dead-letters list` shows them.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="The newest 1,000.")] = False,
    as_json: Json = False,
) -> None:
    """Put them back into the queue; exit status 1 when one of them is no dead letter."""
    with user_errors():
        from batch_assets.cli import dead_letters

        done = dead_letters.redrive_dead_letters(task_ids or [], every=every, as_json=as_json)
        raise typer.Exit(0 if done else 1)
