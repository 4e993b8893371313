"""The command line: `batch-assets new | check | preview | run | show | view | export | status | plan | verify | ui …`.

Exit status: 0 done, 1 the work or a comparison failed, 2 the request itself is wrong, 3 paused by the budget, 130
interrupted. Heavy packages are imported by the commands that need them, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from batch_assets.cli.arguments import (
    AcceptedGates,
    Concurrency,
    DeclaredExport,
    ExportColumns,
    ExportFormat,
    ExportMap,
    ExportTo,
    GroupBy,
    Json,
    Name,
    Push,
    RankBy,
    RequestsPerMinute,
    SplitBy,
    Timeout,
    TokenPrices,
    TokensPerMinute,
    chain_to,
    check_endpoint,
    check_model,
    declared_dataset,
    engine_address,
    known_dataset,
    round_from,
    token_price,
    usable_endpoint,
    wished_options,
)
from batch_assets.cli.command_groups import dead_letters_app, fleet_app, keys_app, kubernetes_app
from batch_assets.cli.user_errors import CommandError, error_console, user_errors
from gpu_runner.request_limits import RequestLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batch_assets.cli.dataset_commands.run import Request

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Datasets that a model writes: generate, watch, check.",
)
app.add_typer(fleet_app, name="fleet")
app.add_typer(kubernetes_app, name="kubernetes")
app.add_typer(keys_app, name="keys")
app.add_typer(dead_letters_app, name="dead-letters")


def main() -> NoReturn:
    """Entry point of `batch-assets`.

    Leaves without Python's own shutdown: when Arrow's threads still let go of a Python file then, the process aborts
    after all its work is done (8 of 50 `verify`, measured).
    """
    from batch_assets import file_permissions
    from batch_assets.cli.interrupts import EXIT_STATUS, Interrupted

    os.umask(file_permissions.umask())
    try:
        app()
        status: object = 0
    except (KeyboardInterrupt, Interrupted):
        error_console().print("Interrupted")
        status = EXIT_STATUS
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError, ValueError):  # a closed pipe, as after `| head`
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


@app.command()
def new(
    name: Name,
    chain: Annotated[
        bool, typer.Option("--chain", help="Three datasets in one file, each of which reads the one before.")
    ] = False,
) -> None:
    """Write the file of a new dataset, which can be run as it is, into the folder of the datasets."""
    with user_errors():
        from batch_assets.cli.dataset_commands.declare import write_new

        write_new(name, chain=chain)


@app.command()
def check(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|PATH]...",
            help="Datasets, files or folders; all of BATCH_ASSETS_DEFS without.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Whether the files of datasets can be used, with every wrong place; exit status 2 when one cannot."""
    with user_errors():
        from batch_assets.cli.dataset_commands.declare import show_check

        raise typer.Exit(show_check(paths or ()))


@app.command()
def run(
    name: Name,
    endpoint: Annotated[
        str | None, typer.Option(help="URL of a running OpenAI-compatible server; its key: BATCH_ASSETS_API_KEY.")
    ] = None,
    usd_per_million_tokens: TokenPrices = None,
    model: Annotated[str | None, typer.Option(help="Model, instead of the one in the dataset's defs.yaml.")] = None,
    deadline: Annotated[str | None, typer.Option(help="As in defs.yaml (6h), in place of the dataset's.")] = None,
    budget_usd: Annotated[float | None, typer.Option(help="Most US dollars, in place of the dataset's.")] = None,
    objective: Annotated[str | None, typer.Option(help="cheapest, fastest or efficient.")] = None,
    max_instances: Annotated[int | None, typer.Option(help="Most instances at once.")] = None,
    upstream: Annotated[
        bool,
        typer.Option("--upstream", help="First the datasets whose tables it reads; one deadline and budget for all."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="At the end read everything again, or compare names and sizes.")
    ] = True,
    rows: Annotated[
        int | None, typer.Option(min=1, help="A trial: only the first batches, which hold so many rows. They count.")
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Where no engine serves it: made-up texts.")] = False,
    accept_gate: AcceptedGates = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="Ask rows again that have answers; says the cost and asks first.")
    ] = False,
    where: Annotated[
        str | None, typer.Option(help="With --regenerate: only rows like \"finish_reason = 'length'\" (SQL).")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --regenerate: do not ask.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait while it is paused, instead of status 3.")] = False,
    timeout: Timeout = None,
    concurrency: Concurrency = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    as_json: Json = False,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress.")] = True,
) -> None:
    """Generate what is missing of a dataset, follow it to the table, and say where the table is."""
    with user_errors():
        wished_options(known_dataset(name), deadline, budget_usd, objective, max_instances, accept_gate or ())
        price = token_price(usd_per_million_tokens, endpoint)
        limits = RequestLimits(timeout, concurrency, requests_per_minute, tokens_per_minute)
        endpoint, of_environment = usable_endpoint(endpoint, limits, price)
        check_model(model)
        from batch_assets.cli.dataset_commands.run import Request
        from batch_assets.spec.request_options import tags_of

        request_options = tags_of(deadline, budget_usd, objective, max_instances, accept_gate or ())
        asked = Request(name, endpoint, model, request_options, verify, rows, simulate, waits=wait, limits=limits)
        if regenerate:
            asked = _regenerating(asked, where, endpoint or of_environment, yes=yes)
        elif where is not None or yes:
            raise CommandError("--where and --yes: expected with --regenerate")
        raise typer.Exit(_carried_out(asked, upstream=upstream, as_json=as_json, progress=progress))


def _carried_out(asked: Request, *, upstream: bool, as_json: bool, progress: bool) -> int:
    """Run one dataset or, where it is asked for or rows are judged below, several in a row; returns the exit status."""
    steps = chain_to(asked.dataset) if upstream else round_from(asked.dataset)
    if not upstream and (len(steps) < 2 or asked.rows is not None or asked.regenerate is not None):
        from batch_assets.cli.dataset_commands.run_summary import carry_out

        return carry_out(asked, as_json=as_json, progress=progress)
    if asked.rows is not None or asked.regenerate is not None or asked.model is not None:
        raise CommandError("--upstream: expected without --rows, --regenerate and --model: they are of one dataset")
    from batch_assets.cli.dataset_commands.run_chain import carry_out_chain

    return carry_out_chain(steps, asked, as_json=as_json, progress=progress)


def _regenerating(asked: Request, where: str | None, address: str | None, *, yes: bool) -> Request:
    """The request for rows that have answers, once somebody has agreed to what that costs."""
    from dataclasses import replace

    from batch_assets.cli.dataset_commands.regenerate import confirm, regeneration_words
    from batch_assets.orchestration.made_anew import Regeneration

    spec, folder = declared_dataset(asked.dataset)
    wanted = Regeneration.of_tag(where) if where else Regeneration()
    confirm(regeneration_words(spec, folder, wanted, asked.tags(), address), yes=yes)
    return replace(asked, regenerate=wanted.tag())


@app.command()
def redrive(
    name: Name,
    error: Annotated[
        str, typer.Option(help="Only dead letters of this error code, as rejected_402; all without.")
    ] = "",
    endpoint: Annotated[
        str | None, typer.Option(help="URL of a running OpenAI-compatible server; its key: BATCH_ASSETS_API_KEY.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="At the end read everything again, or compare names and sizes.")
    ] = True,
    simulate: Annotated[bool, typer.Option("--simulate", help="As of `run`: for rows that were made up.")] = False,
    timeout: Timeout = None,
    concurrency: Concurrency = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    as_json: Json = False,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress.")] = True,
) -> None:
    """Try the dead letters of a dataset again, and nothing else; then publish the table anew."""
    with user_errors():
        known_dataset(name)
        limits = RequestLimits(timeout, concurrency, requests_per_minute, tokens_per_minute)
        endpoint, _ = usable_endpoint(endpoint, limits)
        from batch_assets.cli.dataset_commands.run import Request
        from batch_assets.cli.dataset_commands.run_summary import carry_out

        asked = Request(name, endpoint, verifies=verify, simulate=simulate, redrive_error=error, limits=limits)
        raise typer.Exit(carry_out(asked, as_json=as_json, progress=progress))


@app.command()
def status(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of the dataset, or api/MODEL for batches of the front door; all datasets without."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Where the datasets stand: rows, batches, speed, runs and what they wait for. Needs no running Dagster."""
    with user_errors():
        if name is not None and name.startswith("api/"):
            from batch_assets.cli.model_status import show_model_status

            show_model_status(name, watch=watch, as_json=as_json)
            return
        from batch_assets.spec.chain import in_tree, upstream_of
        from batch_assets.spec.discovery import declarations, known_datasets

        declared = declared_dataset(name) if name is not None else None
        known = {one: spec for one, (spec, _) in known_datasets().items()}
        tree = dict(in_tree(known)) if declared is None else {declared[0].name: 0}
        broken = declarations().broken if name is None else ()
        from batch_assets.cli.dataset_commands.status_command import show_status

        upstream = {one: upstream_of(known[one], known) for one in tree if one in known}
        show_status(tree, upstream, broken, declared=declared, watch=watch, as_json=as_json)


@app.command()
def offers(
    name: Name,
    as_json: Json = False,
    gpu: Annotated[
        list[str] | None, typer.Option(help="Only this GPU, in place of the dataset's choice; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Lines of each table; 0: all.")] = 20,
) -> None:
    """What can be rented for the work that is left, best first, and the reason against every other offer."""
    with user_errors():
        spec, folder = declared_dataset(name)
        from batch_assets.cli.fleet_commands.offers import show_offers

        show_offers(spec, folder, gpus=gpu or (), limit=limit, as_json=as_json)


@app.command()
def plan(
    name: Name,
    deadline: Annotated[
        str | None, typer.Option(help="As in defs.yaml: 6h, a cron schedule, or a moment; in place of the dataset's.")
    ] = None,
    budget_usd: Annotated[float | None, typer.Option(help="Most US dollars, in place of the dataset's.")] = None,
    objective: Annotated[str | None, typer.Option(help="cheapest, fastest or efficient.")] = None,
    max_instances: Annotated[int | None, typer.Option(help="Most instances at once.")] = None,
    upstream: Annotated[
        bool, typer.Option("--upstream", help="Rows that `run --upstream` would ask, of each step, and why.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What to rent for the work left, when it is done, for how much. Rents nothing; status 1: it cannot be done."""
    with user_errors():
        spec, folder = declared_dataset(name)
        wished_options(spec, deadline, budget_usd, objective, max_instances)
        if upstream:
            raise typer.Exit(_plan_upstream(name, [deadline, budget_usd, objective, max_instances], as_json=as_json))
        from batch_assets.cli.dataset_commands.plan import show_plan
        from batch_assets.spec.request_options import tags_of

        tags = tags_of(deadline, budget_usd, objective, max_instances)
        raise typer.Exit(show_plan(spec, folder, tags, json=as_json))


def _plan_upstream(name: str, options: Sequence[object], *, as_json: bool) -> int:
    """Show what each step of a chain would ask; returns the exit status."""
    if any(one is not None for one in options):
        raise CommandError("--upstream: expected without other options: it counts rows, `plan NAME` plans one dataset")
    from batch_assets.cli.dataset_commands.plan_chain import show_chain_plan
    from batch_assets.spec.discovery import declared

    return show_chain_plan(declared(), chain_to(name), json=as_json)


@app.command()
def preview(
    name: Name,
    rows: Annotated[int, typer.Option(min=1, max=100, help="How many rows, from the beginning of the source.")] = 5,
    endpoint: Annotated[
        str | None, typer.Option(help="URL of a running OpenAI-compatible server; its key: BATCH_ASSETS_API_KEY.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="An engine of fleet.yaml, in place of --endpoint; one that does not run is started."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model, instead of the one in the dataset's defs.yaml.")] = None,
    as_json: Json = False,
) -> None:
    """Show the first prompts and, with an engine, its answers, and what the whole will cost. Writes nothing."""
    with user_errors():
        spec, folder = declared_dataset(name)
        of_environment = engine_address("BATCH_ASSETS_ENDPOINT", os.environ.get("BATCH_ASSETS_ENDPOINT"))
        url = engine_address("--endpoint", endpoint)
        if engine is not None and url is not None:
            raise CommandError("name --endpoint or --engine, not both")
        if engine is None:
            url = url or of_environment
        if url is not None:
            check_endpoint(url)
        check_model(model)
        from batch_assets.cli.dataset_commands.preview import engine_at, engine_named, show_preview

        found = (
            engine_named(engine, model or spec.model)
            if engine is not None
            else engine_at(url, of_environment)
            if url
            else None
        )
        wanted = spec.model_copy(update={"model": model}) if model else spec
        raise typer.Exit(show_preview(wanted, folder, rows, found, json=as_json))


@app.command()
def show(
    name: Name,
    rows: Annotated[int, typer.Option(min=1, max=1000, help="Most rows.")] = 10,
    where: Annotated[
        str | None,
        typer.Option(
            help="SQL over state, prompt, the source's kept columns and the table's, fields of a JSON output too: "
            "\"output LIKE '%sorry%'\"."
        ),
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Only rows without an answer: dead letters.")] = False,
    key: Annotated[str | None, typer.Option(help="Only the row with this id.")] = None,
    first: Annotated[str | None, typer.Option("--from", help="Key of the batch to begin with.")] = None,
    order: Annotated[
        str, typer.Option(help="first: as in the source; newest: finished last; sample: at random, the same each time.")
    ] = "first",
    columns: Annotated[str | None, typer.Option(help="Only these columns: output,usd,finish_reason.")] = None,
    as_json: Json = False,
) -> None:
    """Show rows with prompt and output, as they are now: also those of open batches, and dead letters."""
    with user_errors():
        known_dataset(name)
        from batch_assets.cli.dataset_commands.show import Order, Wanted, show_rows

        if order not in [*Order]:
            raise CommandError(f"--order: expected {', '.join(Order)}, found {order[:80]!r}")
        names = tuple(name.strip() for name in columns.split(",")) if columns is not None else ()
        wanted = Wanted(rows, where, errors, key, first, Order(order), names)
        raise typer.Exit(show_rows(name, wanted, as_json=as_json))


@app.command()
def view(
    name: Annotated[str | None, typer.Argument(help="Name of the dataset; all can be chosen on the page.")] = None,
    version: Annotated[str | None, typer.Option(help="Version of the table, in place of the newest.")] = None,
    passed: Annotated[bool, typer.Option("--passed", help="Only rows that pass the dataset's filter.")] = False,
    judged: Annotated[
        bool, typer.Option("--judged", help="The rows that the dataset judged, with their scores.")
    ] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="What is committed by now of a table that is being made.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any that is free.")] = 3002,
) -> None:
    """Look at rows in a browser: search, filter, histograms, whole conversations, two versions compared."""
    with user_errors():
        if name is None and (version is not None or passed or judged or unfinished):
            raise CommandError("--version, --passed, --judged and --unfinished: expected with the NAME of a dataset")
        if unfinished and (version is not None or passed or judged):
            raise CommandError("--unfinished: expected alone: a table that is being made has no version and no parts")
        from batch_assets.cli.dataset_commands.view import serve_view
        from batch_assets.table_access.opened_table import part_of
        from batch_assets.viewer.unfinished_table import UNFINISHED

        serve_view(name, version, port, UNFINISHED if unfinished else part_of(passed=passed, judged=judged))


@app.command()
def export(
    name: Name,
    to: ExportTo = None,
    form: ExportFormat = None,
    declared: DeclaredExport = None,
    version: Annotated[str | None, typer.Option(help="Version of the table, in place of the newest.")] = None,
    mapping: ExportMap = None,
    columns: ExportColumns = None,
    where: Annotated[str | None, typer.Option(help="Only rows like \"finish_reason = 'stop'\" (SQL).")] = None,
    system: Annotated[bool, typer.Option("--system/--no-system", help="With system messages.")] = True,
    reasoning: Annotated[
        bool,
        typer.Option("--reasoning/--no-reasoning", help="With the reasoning, as <think> before the answer."),
    ] = False,
    validation: Annotated[float, typer.Option(help="Share for validation, such as 0.05.")] = 0.0,
    split_by: SplitBy = None,
    group_by: GroupBy = None,
    rank_by: RankBy = None,
    part_rows: Annotated[int, typer.Option(min=1, help="Lines of the table of which a file is made.")] = 100_000,
    passed: Annotated[bool, typer.Option("--passed", help="Only rows that pass the dataset's filter.")] = False,
    judged: Annotated[bool, typer.Option("--judged", help="The rows that the dataset judged, not its votes.")] = False,
    push: Push = None,
    private: Annotated[bool, typer.Option("--private/--public", help="A repository that --push makes.")] = True,
    branch: Annotated[str, typer.Option(help="Of --push.")] = "main",
    as_json: Json = False,
) -> None:
    """Write the published table as training files; after a kill the same command goes on."""
    with user_errors():
        from functools import partial

        from batch_assets.cli.dataset_commands.export_command import export_declared_table, export_table
        from batch_assets.spec.export_options import checked_options
        from batch_assets.table_access.opened_table import part_of

        if declared is not None:
            given = (to, form, version, mapping, columns, where, split_by, group_by, rank_by, push)
            if any(one is not None for one in given) or passed or judged:
                raise CommandError("--declared: expected no other option beside it: the defs.yaml has them")
            export_declared_table(*declared_dataset(name), declared, as_json=as_json)
            return
        if to is None or form is None:
            raise CommandError("expected --to and --format, or --declared EXPORT")
        kept = [one.strip() for one in columns.split(",")] if columns is not None else []
        options_of = partial(
            checked_options,
            form=form,
            mapping=mapping or (),
            kept=kept,
            system=system,
            reasoning=reasoning,
            where=where,
            validation=validation,
            split_by=split_by,
            part_rows=part_rows,
            group_by=group_by,
            rank_by=rank_by,
        )
        part, target = part_of(passed=passed, judged=judged), (push, private, branch) if push is not None else None
        export_table(name, to, version, options_of, part=part, push=target, as_json=as_json)


@app.command()
def adjust(
    name: Name,
    deadline: Annotated[str | None, typer.Option(help="The new one; a time like 6h counts from now.")] = None,
    budget_usd: Annotated[float | None, typer.Option(help="The new one, for the whole request.")] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(metavar="GATE", help="A gate that has paused it and shall not do so again; may be repeated."),
    ] = None,
) -> None:
    """Change deadline or budget of what is being made now, or accept its rows. A paused dataset goes on within half a
    minute."""
    with user_errors():
        spec, folder = declared_dataset(name)
        if deadline is None and budget_usd is None and not accept:
            raise CommandError("name what is to change: --deadline, --budget-usd or --accept")
        wished = wished_options(spec, deadline, budget_usd, None, None, accept or ())
        from batch_assets.cli.dataset_commands.plan import adjust_request

        said = adjust_request(
            spec, folder, wished.deadline if deadline is not None else None, budget_usd, wished.accepted_gates
        )
        if said is None:
            said = f"{name}: no request is under way, so there is nothing to change."
            raise CommandError(f"{said} Give the options to `batch-assets run {name}` instead.")
        sys.stdout.write(f"{said}\n")


@app.command()
def verify(name: Name, as_json: Json = False) -> None:
    """Compare snapshot, batch objects, catalog and published table; exit status 1 when anything differs."""
    with user_errors():
        spec, folder = declared_dataset(name)
        from batch_assets.cli.dataset_commands.status_command import show_verification

        raise typer.Exit(show_verification(spec, folder, as_json=as_json))


@app.command(name="rebuild-ledger")
def rebuild_ledger(name: Name) -> None:
    """Report every committed batch that the catalog does not have, from the store alone. Costs no GPU time."""
    with user_errors():
        known_dataset(name)
        from batch_assets.cli.dataset_commands.status_command import rebuild

        raise typer.Exit(rebuild(name))


@app.command()
def backup(
    listed: Annotated[bool, typer.Option("--list", help="Show the backups that there are, and make none.")] = False,
    as_json: Json = False,
) -> None:
    """Copy Dagster's state, the fleet's database and the front door's records into the store. Stops nothing."""
    with user_errors():
        from batch_assets.cli.backup_commands.backup_command import back_up, show_backups

        (show_backups if listed else back_up)(as_json=as_json)


@app.command()
def restore(
    backup_id: Annotated[str | None, typer.Option("--backup", help="Its id; the newest one without.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show the backups that there are.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and compare all of it, and change nothing.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also where the databases hold something: that is lost then.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring the databases back from a backup, and add what the store and the providers know since. Asks no engine."""
    with user_errors():
        if listed:
            from batch_assets.cli.backup_commands.backup_command import show_backups

            show_backups(as_json=as_json)
            return
        from batch_assets.cli.backup_commands.restore_command import restore_databases

        raise typer.Exit(restore_databases(backup_id, dry_run=dry_run, overwrite=overwrite, as_json=as_json))


@app.command()
def gc(
    name: Annotated[str | None, typer.Argument(help="Name of the dataset; all of them without.")] = None,
    keep_versions: Annotated[int, typer.Option(min=1, help="Published versions of each table that stay.")] = 2,
    older_than: Annotated[str, typer.Option(help="Only what was superseded so long ago: 7d, 36h; at least 1h.")] = "7d",
    delete: Annotated[bool, typer.Option("--delete", help="Delete it; without, it is only counted.")] = False,
    as_json: Json = False,
) -> None:
    """What nobody needs any more in the store: old versions, snapshots, generations, journals and backups."""
    with user_errors():
        if name is not None:
            known_dataset(name)
        from batch_assets.cli.backup_commands.gc_command import collect_garbage

        collect_garbage(name, keep_versions, older_than, delete=delete, as_json=as_json)


@app.command()
def demo() -> None:
    """Have a real model on this machine generate a small dataset, verify it, and show some rows of its table."""
    with user_errors():
        engine_address("BATCH_ASSETS_ENDPOINT", os.environ.get("BATCH_ASSETS_ENDPOINT"))
        from batch_assets.cli.demos.demo import run_demo

        raise typer.Exit(run_demo())


@app.command(name="demo-fleet")
def demo_fleet() -> None:
    """Generate `example` on a simulated market by a deadline, lose a spot machine, and show the bill."""
    with user_errors():
        known_dataset("example")
        from batch_assets.cli.demos.demo_fleet import run_fleet_demo

        raise typer.Exit(run_fleet_demo())


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 3000,
    with_api: Annotated[bool, typer.Option("--serve", help="Serve OpenAI's Batch API, too, as `serve` does.")] = False,
    api_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of that API on 127.0.0.1.")] = 8080,
) -> None:
    """Serve Dagster's UI on this machine until Ctrl-C."""
    with user_errors():
        from batch_assets.cli.ui import serve_ui

        serve_ui(port, api_port if with_api else None)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8080,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a running OpenAI-compatible server, or REGION=URL; may come several times. Their key: "
            "BATCH_ASSETS_API_KEY."
        ),
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Slots of each; measured when left out.")] = None,
) -> None:
    """Serve OpenAI's Batch API (files, batches, models) until Ctrl-C."""
    with user_errors():
        from batch_assets.api.settings import api_settings, split_endpoint
        from batch_assets.local_dagster.home import prepare_home, prepare_store

        named = [split_endpoint(one) for one in endpoint or []]
        found = {engine_address("--endpoint", url): region for region, url in named}
        if not found:
            of_environment = os.environ.get("BATCH_ASSETS_ENDPOINT")
            found = {engine_address("BATCH_ASSETS_ENDPOINT", of_environment): ""}
        regions = {url: region for url, region in found.items() if url is not None}
        prepare_home()
        prepare_store()
        from batch_assets.api import server

        server.serve(api_settings(host, port, list(regions), max_num_seqs, regions))


@app.command()
def usage(
    tenant: Annotated[str | None, typer.Option(help="Show this tenant only.")] = None,
    days: Annotated[int, typer.Option(min=1, max=3660, help="Days back, today (UTC) included.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show what tenants of the front door used: tokens and US dollars by day, class and model."""
    with user_errors():
        from datetime import UTC, datetime

        from batch_assets.cli.usage import show_usage

        show_usage(tenant, days, as_json=as_json, today=datetime.now(UTC).date())


if __name__ == "__main__":
    main()
