"""What `batch-assets show NAME` prints: rows with their prompts and outputs, of open batches and dead letters, too."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from batch_assets.catalog.reader import current_reports
from batch_assets.cli.dataset_commands.row_text import Say, indented, output_text, plain, say_prompt
from batch_assets.cli.output import print_json
from batch_assets.cli.user_errors import CommandError
from batch_assets.publishing.current_rows import (
    CurrentRow,
    FoundRows,
    RowCondition,
    RowConditionError,
    RowState,
    batch_of_row,
    find_rows,
)
from batch_assets.request_status.dataset_status import Observer, observing, trouble_text
from resources.objects.health import is_store_trouble
from resources.objects.opening import StoreError
from resources.store.dataset_store import BatchEntry, SnapshotManifest

TRIAL_ROWS, TRIAL_LETTERS = 3, 400
_WITHOUT_ANSWER = (RowState.DEAD, RowState.FAILED)
_STYLES = {RowState.DEAD: "red", RowState.FAILED: "red", RowState.WAITING: "dim"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows: at most `rows` of those that pass `where`; `errors`: without an answer; `row_id`: this one.

    `first`: key of the batch to begin with.
    """

    rows: int
    where: str | None = None
    errors: bool = False
    row_id: str | None = None
    first: str | None = None


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
        entries = _entries(seen, manifest, wanted)
        try:
            found = find_rows(
                seen.store,
                manifest,
                entries,
                _passes(wanted, manifest),
                wanted.rows,
                waiting=wanted.row_id is not None or wanted.where is not None,
            )
        except RowConditionError as error:
            raise CommandError(f"--where: {error}") from None
    if as_json:
        _print_as_json(name, snapshot, found)
    else:
        say = printer()
        for row in found.rows:
            say_row(say, row)
        _say_end(say, name, manifest, found)
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


def say_row(say: Say, row: CurrentRow, letters: int | None = None) -> None:
    """One row; `letters`: of each text, a few thousand without."""
    cut = {} if letters is None else {"letters": letters}
    say(f"row {row.row_id}  batch {row.batch}, {row.state.value}", "bold")
    if row.kept:
        kept = (f"{column}: {' '.join(str(value).split())[:80]}" for column, value in row.kept.items())
        say(f"  {', '.join(kept)}", "dim")
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
        say(f"  {tokens}{reason}, {one.seconds:.2f} s, {one.origin.model}{engine}", "dim")
    say()


def _entries(seen: Observer, manifest: SnapshotManifest, wanted: Wanted) -> Sequence[BatchEntry]:
    """The batches to look into. For rows without an answer the catalog says which have some."""
    entries = seen.store.entries(manifest.snapshot)
    if wanted.row_id is not None:
        key = batch_of_row(seen.store, manifest, wanted.row_id)
        if key is None:
            raise CommandError(f"--key: no row of the current snapshot has the id {wanted.row_id[:80]!r}")
        return [entry for entry in entries if entry.key == key]
    if wanted.first is not None:
        entries = [entry for entry in entries if entry.key >= wanted.first]
    if wanted.errors:
        reports = current_reports(entries, seen.reports())
        entries = [entry for entry in entries if entry.key not in reports or reports[entry.key].dead]
    return entries


def _passes(wanted: Wanted, manifest: SnapshotManifest) -> Callable[[Sequence[CurrentRow]], Sequence[CurrentRow]]:
    condition = RowCondition(wanted.where, manifest) if wanted.where is not None else None

    def passes(rows: Sequence[CurrentRow]) -> Sequence[CurrentRow]:
        if wanted.row_id is not None:
            return [row for row in rows if row.row_id == wanted.row_id]
        if wanted.errors:
            rows = [row for row in rows if row.state in _WITHOUT_ANSWER]
        if condition is not None:
            return condition.passes(rows)
        return [row for row in rows if row.outcome is not None]

    return passes


def _say_end(say: Say, name: str, manifest: SnapshotManifest, found: FoundRows) -> None:
    if not found.rows and found.next_batch is None:
        say(f"{name}: no such row; what is there: batch-assets status {name}")
    else:
        say(f"{name}: {len(found.rows):,} rows shown, {manifest.rows:,} in the snapshot")
    if found.next_batch is not None:
        say(f"looked at {found.looked_at:,} rows; from there on: --from {found.next_batch}")


def _print_as_json(name: str, snapshot: str, found: FoundRows) -> None:
    rows = [_row_json(row) for row in found.rows]
    said = {"dataset": name, "snapshot": snapshot, "rows": rows, "looked_at": found.looked_at}
    whole = said | {"next_batch": found.next_batch, "damaged": list(found.damaged)}
    print_json(orjson.loads(orjson.dumps(whole, default=str)))  # times and decimals of a source as text


def _row_json(row: CurrentRow) -> dict[str, Any]:
    said = {name: getattr(row, name) for name in ("batch", "row_id", "state", "prompt", "kept")}
    if row.outcome is None:
        return said
    outcome = dataclasses.asdict(row.outcome)
    return said | {name: value for name, value in outcome.items() if name not in ("row_id", "row_key")}
