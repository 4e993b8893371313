"""What `status`, `verify` and `rebuild-ledger` print."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from batch_assets.catalog import ledger
from batch_assets.catalog.catalog_reader import BatchReport
from batch_assets.cli.dataset_commands.declared_changes import DeclaredChanges
from batch_assets.cli.interrupts import Interrupted, Signals
from batch_assets.cli.output import output_console, print_json
from batch_assets.local_dagster.home import dagster_runs
from batch_assets.request_status.dataset_status import Observer, dataset_status, observing
from batch_assets.request_status.display import backup_lines, clock_lines, status_table
from batch_assets.settings import dagster_home
from batch_assets.snapshot.left_out import left_out
from resources.objects.opening import CorruptObject, StoreError
from resources.store.dataset_store import BatchFooter, BatchObject, DatasetStore

if TYPE_CHECKING:
    from pathlib import Path

    import dagster as dg

    from batch_assets.publishing.verify import Verification
    from batch_assets.spec.discovery import BrokenFile
    from batch_assets.spec.models import GeneratedDatasetSpec

WATCH_SECONDS = 2.0
SHOWN_DIFFERENCES = 50
JUMPS_SECONDS = 24 * 3600.0  # for so long it is said that the clock was set


def show_status(
    tree: Mapping[str, int],
    upstream: Mapping[str, str | None],
    broken: Sequence[BrokenFile],
    *,
    declared: tuple[GeneratedDatasetSpec, Path] | None,
    watch: bool,
    as_json: bool,
) -> None:
    """Print the status of these datasets once, or every two seconds until a signal; `broken`: files of others.

    `tree`: how deep each of them is in its chain, in the order to be shown; `upstream`: whose table it reads.
    `declared`: the one dataset that was named; once, its source is held against the snapshot, too.
    """
    alone, names = declared is not None, list(tree)
    console = output_console()
    with Signals(), contextlib.suppress(Interrupted), observing(names) as seen, contextlib.ExitStack() as stack:
        live = None
        if watch and not as_json and console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        while True:
            statuses = [dataset_status(observer, time.time()) for observer in seen]
            changed = DeclaredChanges()
            if declared is not None and not watch and statuses[0].snapshot is not None:
                changed = DeclaredChanges.look(*declared, seen[0])
            if as_json:
                found = [status.as_json() | {"upstream": upstream.get(status.dataset)} for status in statuses]
                if alone:
                    unknown = bool(changed.problem) or watch
                    found[0]["rows_changed"] = None if unknown else changed.rows
                    found[0]["rows_removed"] = None if unknown else changed.removed
                print_json(found[0] if alone else {"datasets": found, "broken": [one.as_json() for one in broken]})
            else:
                table = status_table(statuses, dagster_runs=_dagster_runs(seen), now=time.time(), depths=tree)
                jumps = seen[0].fleet_db.clock_jumps(JUMPS_SECONDS) if seen else ()
                lines = [
                    *changed.lines(names[0] if names else ""),
                    *clock_lines(jumps),
                    *(backup_lines(seen[0].fleet_db.last_backup()) if seen else ()),
                    *(f"{one.name} cannot be used: {one.error}" for one in broken),
                ]
                if live is not None:
                    live.update(Group(table, *map(Text, lines)), refresh=True)
                else:
                    console.print(table)
                    for line in lines:
                        console.print(line, markup=False, highlight=False, soft_wrap=True)
            if not watch:
                return
            time.sleep(WATCH_SECONDS)


def _dagster_runs(seen: Sequence[Observer]) -> bool:
    return bool(seen) and dagster_runs(dagster_home(), seen[0].instance)


def show_verification(spec: GeneratedDatasetSpec, folder: Path, *, as_json: bool = False) -> int:
    """Compare everything of a dataset and print what differs; returns the exit status.

    What the dataset's file and source ask for by now is a note: the table is right for its snapshot.
    """
    from batch_assets.publishing.verify import ledger_of_reports, verify

    name = spec.name
    with observing([name]) as (seen,):
        found = verify(seen.store, ledger_of_reports(seen.reports()))
        if found.snapshot is not None and not any(one.kind == "corrupt_snapshot" for one in found.differences):
            changed = DeclaredChanges.look(spec, folder, seen)
            lines = [line.removeprefix(f"{name}: ") for line in changed.lines(name)]
            found = dataclasses.replace(found, notes=(*found.notes, *lines))
    if as_json:
        print_json(
            dataclasses.asdict(found.totals)
            | {
                "agree": found.ok,
                "snapshot": found.snapshot,
                "notes": list(found.notes),
                "differences": [dataclasses.asdict(difference) for difference in found.differences],
            }
        )
    elif found.ok:
        sys.stdout.write(f"{verified(name, found)}\n")
    else:
        _print_differences(name, found)
    for note in () if as_json else found.notes:
        sys.stdout.write(f"{name}: {note}\n")
    return 0 if found.ok else 1


def verified(name: str, found: Verification) -> str:
    """One sentence on a comparison without differences."""
    totals = found.totals
    without = f"; {left_out(totals.rejected, totals.source_rows)}" if totals.rejected else ""
    made_up = "; simulated: its texts are made up by an engine simulator" if totals.simulated else ""
    objects = f"{totals.batches:,} batch object{'s' * (totals.batches != 1)}"
    return (
        f"{name}: snapshot, {objects}, catalog and table agree: {totals.rows:,} rows, "
        f"{totals.ok:,} ok, {totals.dead:,} dead{without}{made_up}"
    )


def _print_differences(name: str, found: Verification) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("batch", "difference", "expected", "found", "what to do"):
        table.add_column(column, overflow="fold", no_wrap=column == "batch")
    for difference in found.differences[:SHOWN_DIFFERENCES]:
        kind = difference.kind.replace("_", " ")
        table.add_row(difference.batch or "", kind, difference.expected, difference.found, difference.todo)
    console = output_console()
    console.print(table, markup=False)
    more = len(found.differences) - SHOWN_DIFFERENCES
    rest = f", the first {SHOWN_DIFFERENCES} above (all: --json)" if more > 0 else ""
    count = len(found.differences)
    console.print(f"{name}: {count} difference{'s' * (count != 1)}{rest}", highlight=False)


def rebuild(name: str) -> int:
    """Report to the catalog what the store has and the catalog lacks; returns the exit status."""
    from batch_assets.dagster_internals.event_batches import report_together
    from batch_assets.orchestration.assets import register_batches
    from resources.objects.object_read_ahead import read_ahead, threads_for

    with observing([name]) as (seen,):
        snapshot = seen.store.current_snapshot()
        if snapshot is None:
            raise StoreError(f"{name}: no snapshot in the store; run `batch-assets run {name}`")
        register_batches(seen.instance, seen.store, seen.store.manifest(snapshot))
        entries, reports = seen.store.entries(snapshot), seen.reports()
        unreadable = 0

        def unreported() -> Iterator[dg.AssetMaterialization]:
            nonlocal unreadable
            current = seen.store.current_objects(entries).values()
            for found in read_ahead(lambda batch: _footer(seen.store, batch), current, threads_for(seen.store.objects)):
                if isinstance(found, CorruptObject):
                    sys.stderr.write(f"{found}\n")
                    unreadable += 1
                elif _changed(found, reports.get(found.key)):
                    sys.stderr.write(f"{name} batch {found.key}: not as it was written; {seen.store.mended_by_run}\n")
                    unreadable += 1
                elif not _reported(seen.store, found, reports.get(found.key)):
                    yield ledger.batch_event(seen.store, found, snapshot)

        reported = report_together(seen.instance, unreported())
    sys.stdout.write(f"{name}: {reported:,} of {len(entries):,} batches reported again\n")
    return 1 if unreadable else 0


def _footer(store: DatasetStore, batch: BatchObject) -> BatchFooter | CorruptObject:
    try:
        return store.read_batch(batch)[1]
    except CorruptObject as error:
        return error


def _changed(footer: BatchFooter, report: BatchReport | None) -> bool:
    """Whether the catalog knows that this very object had other bytes."""
    return (
        report is not None
        and report.version.used_for(footer.data_version) == footer.generation
        and report.sha256 not in (None, footer.sha256)
    )


def _reported(store: DatasetStore, footer: BatchFooter, report: BatchReport | None) -> bool:
    """Whether the catalog says exactly this of the batch."""
    if report is None:
        return False
    if report.version.anew and report.version.used_for(footer.data_version) >= footer.generation:
        return True  # it is to be replaced, and says so
    batch = BatchObject(footer.key, footer.data_version, footer.generation)
    return (report.version, report.path, report.rows, report.ok, report.dead) == (
        ledger.LedgerVersion(footer.data_version, footer.generation),
        store.objects.uri(store.batch_path(batch)),
        footer.rows,
        footer.ok,
        footer.dead,
    )
