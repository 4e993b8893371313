"""`batch-assets status api/MODEL`: open batches of a model of the front door, its engines, and why so many."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table

from batch_assets.api.billing.margin import FLEET_PREFIX
from batch_assets.api.capacity.backlog import lines_left
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords
from batch_assets.api.database.service_database import Records
from batch_assets.api.settings import records_database
from batch_assets.cli.dataset_commands.status_command import WATCH_SECONDS
from batch_assets.cli.interrupts import Interrupted, Signals
from batch_assets.cli.output import output_console, print_json
from batch_assets.durations import duration
from batch_assets.local_dagster.home import prepare_home
from batch_assets.settings import fleet_database
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.money import format_usd

MOST_SHOWN = 50  # batches; `--json` has all


@dataclass(frozen=True, slots=True)
class OpenBatchStatus:
    """One open batch. `window_seconds`: until its window ends, negative when it is over."""

    id: str
    tenant: str
    status: str
    completion_window: str
    window_seconds: float
    lines: int
    lines_left: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The status of one model. `engines_wanted`: by the last plan, 1 without one; `engines_held`: leased for it,
    rented ones that answer and those of fleet.yaml, which the plan counts, too.

    `usd_spent`: of the request under way, else None. `reason`: of the last decision on capacity.
    """

    model: str
    batches: Sequence[OpenBatchStatus]
    lines_left: int
    engines_wanted: int
    engines_held: int
    engines_booting: int
    usd_spent: float | None
    reason: str | None


def model_status(name: str, records: Sequence[BatchRecord], fleet_db: FleetDatabase, now: float) -> ModelStatus:
    """Where a model (`api/MODEL`) stands. `records`: all open batches. `now`: Unix seconds."""
    model = name.removeprefix(FLEET_PREFIX)
    batches = [
        OpenBatchStatus(
            one.id, one.tenant, one.status, one.completion_window, one.expires_at - now, one.total, lines_left(one)
        )
        for one in records
        if one.model == model
    ]
    mine = [one for one in fleet_db.fleet() if one.works_for == name and not one.retiring]
    target = fleet_db.target(name)
    planned = target is not None and bool(target.request)
    return ModelStatus(
        model,
        batches,
        sum(one.lines_left for one in batches),
        1 if target is None else target.instances,
        fleet_db.engines_held()[name],
        sum(one.state in ("intent", "booting") for one in mine),
        fleet_db.spend(name).usd if planned else None,
        target.plan.reason if target is not None and planned and target.plan is not None else None,
    )


def show_model_status(name: str, *, watch: bool, as_json: bool) -> None:
    """Print it once, or every two seconds until a signal. Raises RecordsError, FleetDatabaseError."""
    prepare_home()
    console = output_console()
    with Signals(), contextlib.suppress(Interrupted), contextlib.ExitStack() as stack:
        records = stack.enter_context(contextlib.closing(Records(records_database())))
        fleet_db = stack.enter_context(contextlib.closing(FleetDatabase(fleet_database())))
        live = None
        if watch and not as_json and console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        while True:
            found = model_status(name, BatchRecords(records).open_records(), fleet_db, time.time())
            if as_json:
                print_json(asdict(found))
            elif live is not None:
                live.update(status_page(found), refresh=True)
            else:
                console.print(status_page(found))
            if not watch:
                return
            time.sleep(WATCH_SECONDS)


def status_page(found: ModelStatus) -> Table:
    """The page for people."""
    whole = Table.grid()
    batches = Table("batch", "tenant", "status", "window", "ends in", "lines", "left", box=SIMPLE_HEAD)
    for one in found.batches[:MOST_SHOWN]:
        ends = duration(one.window_seconds) if one.window_seconds > 0 else "over"
        lines = (f"{one.lines:,}", f"{one.lines_left:,}")
        batches.add_row(one.id, one.tenant, one.status, one.completion_window, ends, *lines)
    whole.add_row(batches if found.batches else "no batch is open")
    if len(found.batches) > MOST_SHOWN:
        whole.add_row(f"and {len(found.batches) - MOST_SHOWN:,} more batches, whose windows end later")
    whole.add_row(f"{found.lines_left:,} lines are left")
    booting = f", {found.engines_booting} more boot" if found.engines_booting else ""
    whole.add_row(f"engines: {found.engines_wanted} wanted, {found.engines_held} held{booting}")
    if found.usd_spent is not None:
        whole.add_row(f"{format_usd(found.usd_spent)} $ spent since the first of these batches")
    if found.reason is not None:
        whole.add_row(f"last decision: {found.reason}")
    return whole
