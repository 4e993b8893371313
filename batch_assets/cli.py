"""The command line: `batch-assets run | status | offers | plan | adjust | fleet | verify | rebuild-ledger | demo | ui`.

Exit status: 0 done, 1 the work or a comparison failed, 2 the request itself is wrong, 130 interrupted. Heavy packages
are imported by the commands that need them, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import sys
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from batch_assets.settings import SettingError

if TYPE_CHECKING:
    from rich.console import Console

    from batch_assets.spec import GeneratedDatasetSpec
    from batch_assets.wishes import Wishes

ENDPOINT_SECONDS = 2.0
# Errors of modules that are not imported for this: they are heavy.
ANSWERS = ("FleetConfigError", "EndpointsError", "PricingError", "LaunchError", "DagsterInvalidConfigError")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Datasets that a model writes: generate, watch, check.",
)

Name = Annotated[str, typer.Argument(help="Name of the dataset.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


class UserError(Exception):
    """The request cannot be carried out as it is: shown without a traceback, exit status 2."""


def main() -> NoReturn:
    """Entry point of `batch-assets`.

    Leaves without Python's own shutdown: when Arrow's threads still let go of a Python file then, the process aborts
    after all its work is done (8 of 50 `verify`, measured).
    """
    from batch_assets import access
    from batch_assets.signals import EXIT_STATUS, Interrupted

    os.umask(access.umask())
    try:
        app()
        status: object = 0
    except (KeyboardInterrupt, Interrupted):
        _errors().print("Interrupted")
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


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Errors that are an answer to the user end the command with their words and status 2."""
    from batch_assets.spec_errors import SpecError
    from batch_assets.stack import StackError
    from resources.objects import StoreError

    try:
        yield
    except (UserError, SpecError, StackError, StoreError) as error:
        _fail(str(error), 2)
    except Exception as error:
        if type(error).__name__ in ANSWERS:
            _fail(str(error), 2)
        if (said := _of_the_machine(error)) is not None:
            _fail(said, 2)
        raise


def _of_the_machine(error: BaseException | None) -> str | None:
    """What is wrong with this machine or its settings: a full disk, a folder that may not be written, no database."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
            return f"{where}{error.strerror or type(error).__name__}. {_ADVICE.get(error.errno, '')}".rstrip()
        if isinstance(error, SettingError):
            return str(error)
        module = type(error).__module__.partition(".")[0]
        if module == "sqlalchemy" or isinstance(error, sqlite3.Error):
            # The message of SQLAlchemy holds the statement; the driver's own says what is wrong.
            cause = str(getattr(error, "orig", None) or error).strip().splitlines()
            said = cause[0] if cause else type(error).__name__
            return f"a database cannot be used: {said}. Look at DAGSTER_HOME and BATCH_ASSETS_FLEET_DB"
        error = error.__cause__ or error.__context__
    return None


_ADVICE = {
    errno.ENOSPC: "Make room there, then give the same command again: it goes on where it was.",
    errno.EDQUOT: "Make room there, then give the same command again: it goes on where it was.",
    errno.EFBIG: "A limit on the size of files (ulimit -f) is too low.",
    errno.EACCES: "Name another folder, or give this user access to it.",
    errno.EROFS: "Name another folder: DAGSTER_HOME, BATCH_ASSETS_STORE.",
}


def _errors() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _say(text: str) -> None:
    """A result, unwrapped and unstyled."""
    sys.stdout.write(f"{text}\n")


def _fail(text: str, status: int) -> NoReturn:
    _errors().print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def _known(name: str) -> GeneratedDatasetSpec:
    """The declared dataset of this name."""
    from batch_assets.declared import declared_specs
    from batch_assets.spec_errors import nearest

    specs = declared_specs()
    if name not in specs:
        hint = nearest(name, sorted(specs)) if specs else "No dataset is declared: add batch_assets/defs/NAME/defs.yaml"
        known = f" Known: {', '.join(sorted(specs))}." if "Did you mean" in hint else ""
        raise UserError(f"no dataset is called {name!r}. {hint}{known}")
    return specs[name]


def _check_endpoint(endpoint: str) -> None:
    """Somebody must answer there now: a run would wait ten minutes for it."""
    from gpu_runner.addresses import AddressRefused
    from gpu_runner.providers.local import EngineStartError, wait_reachable

    try:
        wait_reachable(endpoint, ENDPOINT_SECONDS)
    except (EngineStartError, AddressRefused) as error:
        raise UserError(f"--endpoint: {error}") from None


def _check_model(model: str | None) -> None:
    from gpu_runner.model_names import name_problem

    if model is not None and (problem := name_problem(model)):
        raise UserError(f"--model: expected a model as the engine knows it, found {model[:100]!r}: {problem}")


def _address(name: str, given: str | None) -> str | None:
    """An engine's address in our spelling. Raises UserError without the address, which may hold a secret."""
    from gpu_runner.addresses import engine_url

    try:
        return engine_url(given) if given else None
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def _allow(endpoint: str, of_environment: str | None) -> None:
    """Runs of this home may send to it from now on, and the key with it unless that is for another address."""
    from batch_assets.stack import prepare_home
    from resources.endpoints import allow

    given = of_environment is None or of_environment == endpoint
    allow(prepare_home(), endpoint, (os.environ.get("BATCH_ASSETS_API_KEY") or None) if given else None)


def _wished(
    spec: GeneratedDatasetSpec,
    deadline: str | None,
    budget_usd: float | None,
    objective: str | None,
    max_instances: int | None,
) -> Wishes:
    """The dataset's wishes with those of the command line. Raises UserError naming the option."""
    from batch_assets.wishes import WishError, tags_of, wishes

    try:
        return wishes(spec, tags_of(deadline, budget_usd, objective, max_instances))
    except WishError as error:
        raise UserError(str(error).replace("tag batch/", "--").replace("_", "-", 1)) from None


@app.command()
def run(
    name: Name,
    endpoint: Annotated[
        str | None, typer.Option(help="URL of a running OpenAI-compatible server; its key: BATCH_ASSETS_API_KEY.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model, instead of the one in the dataset's defs.yaml.")] = None,
    deadline: Annotated[str | None, typer.Option(help="As in defs.yaml (6h), in place of the dataset's.")] = None,
    budget_usd: Annotated[float | None, typer.Option(help="Most US dollars, in place of the dataset's.")] = None,
    objective: Annotated[str | None, typer.Option(help="cheapest, fastest or efficient.")] = None,
    max_instances: Annotated[int | None, typer.Option(help="Most instances at once.")] = None,
    as_json: Json = False,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress.")] = True,
) -> None:
    """Generate what is missing of a dataset, follow it to the table, and say where the table is."""
    with user_errors():
        _wished(_known(name), deadline, budget_usd, objective, max_instances)
        of_environment = _address("BATCH_ASSETS_ENDPOINT", os.environ.get("BATCH_ASSETS_ENDPOINT"))
        endpoint = _address("--endpoint", endpoint)
        if endpoint is not None:
            _check_endpoint(endpoint)
            _allow(endpoint, of_environment)
        _check_model(model)
        from batch_assets.request import Request
        from batch_assets.summary import carry_out
        from batch_assets.wishes import tags_of

        wishes = tags_of(deadline, budget_usd, objective, max_instances)
        raise typer.Exit(carry_out(Request(name, endpoint, model, wishes), as_json=as_json, progress=progress))


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="Name of the dataset; all when left out.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Where the datasets stand: rows, batches, speed, runs and what they wait for. Needs no running Dagster."""
    with user_errors():
        from batch_assets.declared import declared_specs

        names = [_known(name).name] if name else sorted(declared_specs())
        from batch_assets.report import show_status

        show_status(names, alone=name is not None, watch=watch, as_json=as_json)


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
        spec = _known(name)
        from batch_assets.declared import declared
        from batch_assets.offers_command import show_offers

        show_offers(spec, declared()[name][1], gpus=gpu or (), limit=limit, as_json=as_json)


@app.command()
def plan(
    name: Name,
    deadline: Annotated[
        str | None, typer.Option(help="As in defs.yaml: 6h, a cron schedule, or a moment; in place of the dataset's.")
    ] = None,
    budget_usd: Annotated[float | None, typer.Option(help="Most US dollars, in place of the dataset's.")] = None,
    objective: Annotated[str | None, typer.Option(help="cheapest, fastest or efficient.")] = None,
    max_instances: Annotated[int | None, typer.Option(help="Most instances at once.")] = None,
    as_json: Json = False,
) -> None:
    """What to rent for the work that is left, when it is done, for how much. Rents nothing; status 1: infeasible."""
    with user_errors():
        spec = _known(name)
        _wished(spec, deadline, budget_usd, objective, max_instances)
        from batch_assets.declared import declared
        from batch_assets.plan_command import show_plan
        from batch_assets.wishes import tags_of

        tags = tags_of(deadline, budget_usd, objective, max_instances)
        raise typer.Exit(show_plan(spec, declared()[name][1], tags, json=as_json))


@app.command()
def adjust(
    name: Name,
    deadline: Annotated[str | None, typer.Option(help="The new one; a time like 6h counts from now.")] = None,
    budget_usd: Annotated[float | None, typer.Option(help="The new one, for the whole request.")] = None,
) -> None:
    """Change deadline or budget of what is being made now. A paused dataset goes on within half a minute."""
    with user_errors():
        spec = _known(name)
        if deadline is None and budget_usd is None:
            raise UserError("name what is to change: --deadline or --budget-usd")
        wished = _wished(spec, deadline, budget_usd, None, None)
        from batch_assets.plan_command import adjust_request

        said = adjust_request(name, wished.deadline if deadline is not None else None, budget_usd)
        if said is None:
            raise UserError(f"{name}: nothing is being made. Give them to `batch-assets run {name}` instead.")
        _say(said)


@app.command()
def verify(name: Name, as_json: Json = False) -> None:
    """Compare snapshot, batch objects, catalog and published table; exit status 1 when anything differs."""
    with user_errors():
        _known(name)
        from batch_assets.report import show_verification

        raise typer.Exit(show_verification(name, as_json=as_json))


@app.command(name="rebuild-ledger")
def rebuild_ledger(name: Name) -> None:
    """Report every committed batch that the catalog does not have, from the store alone. Costs no GPU time."""
    with user_errors():
        _known(name)
        from batch_assets.report import rebuild

        raise typer.Exit(rebuild(name))


fleet_app = typer.Typer(invoke_without_command=True, help="What is rented now, who leases it, and what it cost.")
app.add_typer(fleet_app, name="fleet")


@fleet_app.callback()
def fleet(context: typer.Context, as_json: Json = False) -> None:
    """What is rented now, who leases it, and what everything cost so far."""
    if context.invoked_subcommand is None:
        with user_errors():
            from batch_assets.fleet_command import show_fleet

            show_fleet(as_json=as_json)


@fleet_app.command()
def down(
    force: Annotated[bool, typer.Option("--force", help="Also while runs are under way; they may rent anew.")] = False,
) -> None:
    """End every instance."""
    with user_errors():
        from batch_assets.fleet_command import end_fleet

        raise typer.Exit(end_fleet(force=force))


@app.command()
def demo() -> None:
    """Generate the example dataset, verify it, and show three rows of its table."""
    with user_errors():
        _known("example")
        _address("BATCH_ASSETS_ENDPOINT", os.environ.get("BATCH_ASSETS_ENDPOINT"))
        from batch_assets.demo import run_demo

        raise typer.Exit(run_demo())


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 3000,
) -> None:
    """Serve Dagster's UI on this machine until Ctrl-C."""
    with user_errors():
        from batch_assets.declared import declared_specs
        from batch_assets.signals import EXIT_STATUS, Interrupted, Signals
        from batch_assets.stack import Stack, port_taken, prepare_home, running_stack

        declared_specs()
        home = prepare_home()
        if found := running_stack(home):
            raise UserError(f"Dagster already runs on {home}: {found.url} (process {found.pid})")
        if port_taken(port):
            raise UserError(f"port {port} on 127.0.0.1 is taken: name another with --port")
        with Signals() as signals:
            try:
                with Stack(home, port=port) as own:
                    _say(f"Starting Dagster on {home}")
                    own.wait_ready()
                    _say(f"Dagster's UI: {own.url}   (Ctrl-C ends it)")
                    sys.stdout.flush()
                    with signals.deferred():
                        while not signals.asked:
                            time.sleep(0.2)
                    _say("Ending …")
            except Interrupted:
                raise typer.Exit(EXIT_STATUS) from None


if __name__ == "__main__":
    main()
