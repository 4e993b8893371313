"""What `batch-assets show NAME` prints: rows with their prompts and outputs, of open batches and dead letters, too."""

from __future__ import annotations

import dataclasses
import math
import random
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from batch_assets.catalog.catalog_reader import current_reports
from batch_assets.cli.dataset_commands.row_text import Say, indented, on_one_line, output_text, plain, say_prompt
from batch_assets.cli.output import print_json
from batch_assets.cli.user_errors import CommandError
from batch_assets.filtering.passed_table import FilteredRow, filtered_row
from batch_assets.publishing.current_rows import (
    CurrentRow,
    FoundRows,
    RowState,
    TableCondition,
    batch_of_row,
    column_names,
    find_rows,
    original_of,
    output_columns,
    row_values,
)
from batch_assets.publishing.output_columns import OutputColumns
from batch_assets.publishing.published_table import published_table
from batch_assets.request_status.dataset_status import Observer, observing, trouble_text
from batch_assets.snapshot.left_out import left_out, rejects_path
from gpu_runner.money import format_usd
from resources.objects.opening import CorruptObject, StoreError
from resources.objects.store_health import is_store_trouble
from resources.store.dataset_store import BatchEntry, DatasetStore, SnapshotManifest
from resources.store.row_condition import BadCondition

TRIAL_ROWS, TRIAL_LETTERS = 3, 400
_LINE_LETTERS = 80  # of a value that stands beside its name
_WITHOUT_ANSWER = (RowState.DEAD, RowState.FAILED)
_STYLES = {RowState.DEAD: "red", RowState.FAILED: "red", RowState.WAITING: "dim"}


class Order(StrEnum):
    """Which rows come first. `first`: in the order of the source. `newest`: of the batch that was reported last, in it
    those that were asked last; rows of open batches before all others. `sample`: drawn at random, the same ones as
    long as the same batches are there.
    """

    FIRST = "first"
    NEWEST = "newest"
    SAMPLE = "sample"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows: at most `rows` of those that pass `where`; `errors`: without an answer; `row_id`: this one.

    `first`: key of the batch to begin with. `columns`: only these, all that people look at without any.
    """

    rows: int
    where: str | None = None
    errors: bool = False
    row_id: str | None = None
    first: str | None = None
    order: Order = Order.FIRST
    columns: Sequence[str] = ()


def show_rows(name: str, wanted: Wanted, *, as_json: bool) -> int:
    """Print rows; returns the exit status: 1 when batches could not be read.

    Raises CommandError for a condition that cannot be evaluated or a row that is not there, StoreError without a
    snapshot.
    """
    with observing([name]) as (seen,):
        snapshot = seen.store.current_snapshot()
        if snapshot is None:
            raise StoreError(f"{name}: no snapshot in the store; run `batch-assets run {name}`")
        manifest = seen.store.manifest(snapshot)
        _check(wanted, manifest)
        entries = _entries(seen, manifest, wanted)
        try:
            found = find_rows(
                seen.store,
                manifest,
                entries,
                _passes(wanted, manifest),
                wanted.rows,
                waiting=wanted.row_id is not None or wanted.where is not None,
                spread=wanted.order is Order.SAMPLE,
            )
        except BadCondition as error:
            raise CommandError(f"--where: {error}") from None
        filtered = None if wanted.row_id is None else _filtered(seen, wanted.row_id)
    own = output_columns(manifest)
    if as_json:
        _print_as_json(name, snapshot, found, wanted.columns, own, filtered)
    else:
        say = printer()
        for row in found.rows:
            say_columns(say, row, wanted.columns, own) if wanted.columns else say_row(say, row, filtered=filtered)
        _say_end(say, name, manifest, found, wanted.order)
    for reason in found.damaged:
        sys.stderr.write(f"{plain(reason)}\n")
    return int(bool(found.damaged))


def trial_sample(name: str, batches: int) -> FoundRows:
    """A few rows of the first batches of a dataset, which a trial has made; none where the store cannot be read."""
    try:
        with observing([name]) as (seen,):
            snapshot = seen.store.current_snapshot()
            if snapshot is None:
                return FoundRows((), 0)
            entries = seen.store.entries(snapshot)[:batches]
            return find_rows(seen.store, seen.store.manifest(snapshot), entries, lambda rows: rows, TRIAL_ROWS)
    except Exception as error:
        if not isinstance(error, StoreError) and not is_store_trouble(error):
            raise
        return FoundRows((), 0, None, [trouble_text(seen.store, error)])


def printer() -> Say:
    """Prints lines on standard output."""
    console = Console()

    def say(text: str = "", style: str = "") -> None:
        console.print(Text(plain(text), style=style), soft_wrap=True)

    return say


def _filtered(seen: Observer, row_id: str) -> FilteredRow | None:
    """What the filter made of the row of the published table, which may have another answer than the one that is there
    since (a redrive, rows asked again); None where that cannot be told."""
    try:
        table, found = published_table(seen.store), filtered_row(seen.store, row_id)
    except (CorruptObject, FileNotFoundError):  # `verify` says it
        return None
    return found if table is not None and found is not None and found.table == table.version else None


def say_row(say: Say, row: CurrentRow, letters: int | None = None, filtered: FilteredRow | None = None) -> None:
    """One row; `letters`: of each text, a few thousand without. `filtered`: what the filter made of it."""
    cut = {} if letters is None else {"letters": letters}
    say(f"row {row.row_id}  batch {row.batch}, {row.state.value}", "bold")
    if row.kept:
        say(f"  {', '.join(f'{column}: {on_one_line(value)}' for column, value in row.kept.items())}", "dim")
    say_prompt(say, row.prompt, **cut)
    one = row.outcome
    if one is not None and one.output is not None:
        say("  answer", "green")
        say(indented(output_text(one.output), **cut))
    if one is not None and one.error is not None:
        say(f"  {one.error}: {one.error_message or ''}"[:1000], _STYLES[RowState.DEAD])
    if one is not None:
        reason = f", {one.finish_reason}" if one.finish_reason else ""
        tokens = f"{one.prompt_tokens:,} prompt and {one.completion_tokens:,} completion tokens"
        engine = f" on {one.origin.engine}" if one.origin.engine else ""
        cost = f", {format_usd(one.usd, fine=True)} $" if one.usd is not None else ""
        say(f"  {tokens}{reason}, {one.seconds:.2f} s{cost}, {one.origin.model}{engine}", "dim")
    if filtered is not None:
        style = _STYLES[RowState.DEAD] if filtered.fell_out else "dim"
        say(f"  filter, in the published table: {filtered.describe()}", style)
    say()


def say_columns(say: Say, row: CurrentRow, columns: Sequence[str], own: OutputColumns | None = None) -> None:
    """Only these columns of a row, each below its name; long texts are cut as elsewhere. `own`: those of its output."""
    values = _values(row, own)
    for name in columns:
        value = values.get(name)
        if name == "prompt" and not isinstance(row.prompt, str):
            say("prompt", "cyan")
            say_prompt(say, row.prompt)
        elif isinstance(value, str) and ("\n" in value or len(value) > _LINE_LETTERS):
            say(name, "cyan")
            say(indented(value))
        else:
            say(f"{name}: {'' if value is None else indented(_on_line(value)).strip()}")
    say()


def _values(row: CurrentRow, own: OutputColumns | None) -> dict[str, Any]:
    values = row_values(row) | dict(row.kept)
    return values | (dict(own.values(values.get("output"))) if own is not None else {})


def _on_line(value: object) -> str:
    """Lists, objects and truth values as in JSON."""
    return orjson.dumps(value, default=str).decode() if isinstance(value, list | dict | bool) else str(value)


def _check(wanted: Wanted, manifest: SnapshotManifest) -> None:
    """Raises CommandError for columns that are not there, and for a place to begin with in another order."""
    known = column_names(manifest)
    if unknown := [name for name in wanted.columns if name not in known]:
        raise CommandError(f"--columns: no column is called {unknown[0][:80]!r}. Columns: {', '.join(known)}")
    if wanted.first is not None and wanted.order is not Order.FIRST:
        raise CommandError(f"--from: expected with --order first, found --order {wanted.order.value}")


def _entries(seen: Observer, manifest: SnapshotManifest, wanted: Wanted) -> Sequence[BatchEntry]:
    """The batches to look into. For rows without an answer the catalog says which have some."""
    entries = seen.store.entries(manifest.snapshot)
    if wanted.row_id is not None:
        key = batch_of_row(seen.store, manifest, wanted.row_id)
        if key is None:
            raise CommandError(_no_such_row(seen.store, manifest, wanted.row_id))
        return [entry for entry in entries if entry.key == key]
    if wanted.first is not None:
        entries = [entry for entry in entries if entry.key >= wanted.first]
    if wanted.errors:
        reports = current_reports(entries, seen.reports())
        entries = [entry for entry in entries if entry.key not in reports or reports[entry.key].dead]
    if wanted.order is Order.NEWEST:
        found = current_reports(entries, seen.reports())
        at = {key: report.reported_at for key, report in found.items()}
        return sorted(entries, key=lambda entry: (at.get(entry.key, math.inf), entry.key), reverse=True)
    if wanted.order is Order.SAMPLE:
        return random.Random(manifest.snapshot).sample(entries, len(entries))
    return entries


def _no_such_row(store: DatasetStore, manifest: SnapshotManifest, row_id: str) -> str:
    """Why no row has this id, as far as the snapshot knows."""
    said = f"--key: no row of the current snapshot has the id {row_id[:80]!r}"
    try:
        if (original := original_of(store, manifest, row_id)) is not None:
            key = f"`batch-assets show {store.dataset} --key {shlex.quote(original)}`"
            return f"{said}: it asks the same as row {original!r} and has its answer (dedupe): {key}"
    except (CorruptObject, FileNotFoundError):  # `verify` says it
        pass
    if not manifest.rejected:
        return said
    listed = store.objects.uri(rejects_path(store, manifest.snapshot))
    return f"{said}. {left_out(manifest.rejected, manifest.source_rows)}: {listed} says which, and why"


def _passes(wanted: Wanted, manifest: SnapshotManifest) -> Callable[[Sequence[CurrentRow]], Sequence[CurrentRow]]:
    wished = _wished(wanted, manifest)

    def ordered(rows: Sequence[CurrentRow]) -> Sequence[CurrentRow]:
        found = wished(rows)
        if wanted.order is Order.NEWEST:
            return sorted(found, key=_asked_at, reverse=True)
        if wanted.order is Order.SAMPLE and rows:
            return random.Random(rows[0].row_id).sample(found, len(found))
        return found

    return ordered


def _asked_at(row: CurrentRow) -> float:
    return row.outcome.started_at if row.outcome is not None else -math.inf


def _wished(wanted: Wanted, manifest: SnapshotManifest) -> Callable[[Sequence[CurrentRow]], Sequence[CurrentRow]]:
    condition = TableCondition(wanted.where, manifest) if wanted.where is not None else None

    def passes(rows: Sequence[CurrentRow]) -> Sequence[CurrentRow]:
        if wanted.row_id is not None:
            return [row for row in rows if row.row_id == wanted.row_id]
        if wanted.errors:
            rows = [row for row in rows if row.state in _WITHOUT_ANSWER]
        if condition is not None:
            return condition.passes(rows)
        return [row for row in rows if row.outcome is not None]

    return passes


def _say_end(say: Say, name: str, manifest: SnapshotManifest, found: FoundRows, order: Order) -> None:
    if not found.rows and found.next_batch is None:
        say(f"{name}: no such row; what is there: batch-assets status {name}")
    else:
        shown = "1 row" if len(found.rows) == 1 else f"{len(found.rows):,} rows"
        say(f"{name}: {shown} shown, {manifest.rows:,} in the snapshot")
    if found.next_batch is not None:
        on = f"from there on: --from {found.next_batch}" if order is Order.FIRST else "there are more"
        say(f"looked at {found.looked_at:,} rows; {on}")


def _print_as_json(
    name: str,
    snapshot: str,
    found: FoundRows,
    columns: Sequence[str],
    own: OutputColumns | None,
    filtered: FilteredRow | None,
) -> None:
    rows = [_row_json(row) if not columns else _columns_json(row, columns, own) for row in found.rows]
    if filtered is not None and not columns:
        said_of = {"fell_out": filtered.fell_out, "flags": list(filtered.flags), "table": filtered.table}
        rows = [row | {"filter": said_of} for row in rows]
    said = {"dataset": name, "snapshot": snapshot, "rows": rows, "looked_at": found.looked_at}
    whole = said | {"next_batch": found.next_batch, "damaged": list(found.damaged)}
    print_json(orjson.loads(orjson.dumps(whole, default=str)))  # times and decimals of a source as text


def _columns_json(row: CurrentRow, columns: Sequence[str], own: OutputColumns | None) -> dict[str, Any]:
    values = _values(row, own) | {"prompt": row.prompt}
    return {name: values.get(name) for name in columns}


def _row_json(row: CurrentRow) -> dict[str, Any]:
    said = {name: getattr(row, name) for name in ("batch", "row_id", "state", "prompt", "kept")}
    if row.outcome is None:
        return said
    outcome = dataclasses.asdict(row.outcome)
    for turn in outcome["turns"]:
        if turn["user_model"] is None:
            del turn["user_model"]
    left_out = ("row_id", "row_key", *(() if row.outcome.turns else ("turns",)))
    return said | {name: value for name, value in outcome.items() if name not in left_out}
