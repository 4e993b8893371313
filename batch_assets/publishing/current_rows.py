"""The rows of the current snapshot as they are now: prompt and outcome, of committed batches and of open ones.

A batch is read at a time: its rows in the snapshot, and its object or, while it has none, the journal's segments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batch_assets.publishing.batch_reader import table_name
from batch_assets.publishing.output_columns import OutputColumns
from batch_assets.publishing.prompt_column import last_request
from batch_assets.snapshot.prompts.messages import without_media_bytes
from gpu_runner.rows import Outcome
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import BatchEntry, BatchObject, DatasetStore, SnapshotManifest
from resources.store.journal import note_furthest
from resources.store.outcome_tables import outcomes_from
from resources.store.row_condition import SqlCondition
from resources.store.snapshot_manifest import USER_TURNS

if TYPE_CHECKING:
    import polars as pl


MOST_ROWS = 200_000  # that one call looks at
JOURNAL_BYTES = 64 << 20  # of the segments that one call reads, as they lie in the store
_GROUPS = 64  # row groups whose ids are read at once
_ORIGIN = ("model", "engine", "provider", "instance_type", "run_id")
_TEXTS = ("row_id", "batch", "state", "prompt", "output", "error", "error_message", "finish_reason", *_ORIGIN)
_COUNTS = ("prompt_tokens", "completion_tokens", "tries")
_NUMBERS = ("seconds", "usd")


class RowState(StrEnum):
    """What there is of a row. `finished` and `failed` rows are in the journal of a batch that is still open."""

    COMMITTED = "committed"
    DEAD = "dead"
    FINISHED = "finished"
    FAILED = "failed"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class CurrentRow:
    """One row. `prompt`: messages or a text; of a conversation, its last request so far, and images and sounds by their
    digests. `kept`: the source's columns, by their names in a table.

    `outcome`: None while the row waits.
    """

    batch: str
    row_id: str
    prompt: Any
    kept: Mapping[str, Any]
    outcome: Outcome | None
    committed: bool

    @property
    def state(self) -> RowState:
        """Whether there is an answer, and whether it is committed."""
        if self.outcome is None:
            return RowState.WAITING
        if self.committed:
            return RowState.COMMITTED if self.outcome.ok else RowState.DEAD
        return RowState.FINISHED if self.outcome.ok else RowState.FAILED


@dataclass(frozen=True, slots=True)
class FoundRows:
    """What was found, how many rows were looked at, and the batch to go on from when not all were.

    `damaged`: why batches could not be read.
    """

    rows: Sequence[CurrentRow]
    looked_at: int
    next_batch: str | None = None
    damaged: Sequence[str] = ()


def find_rows(
    store: DatasetStore,
    manifest: SnapshotManifest,
    entries: Sequence[BatchEntry],
    passes: Callable[[Sequence[CurrentRow]], Sequence[CurrentRow]],
    most: int,
    *,
    waiting: bool = False,
    spread: bool = False,
) -> FoundRows:
    """The first `most` rows of these batches, in their order, that pass; at most MOST_ROWS are looked at.

    `waiting`: also in batches of which nothing is finished yet. `spread`: of no batch more than its share of `most`.
    """
    reader = _Reader(store, manifest, sorted(entries, key=lambda entry: entry.key))
    entries = entries if waiting else reader.begun(entries)
    share = math.ceil(most / max(1, len(entries))) if spread else most
    found: list[CurrentRow] = []
    damaged: list[str] = []
    looked = 0
    for entry in entries:
        if looked >= MOST_ROWS:
            return FoundRows(found, looked, entry.key, damaged)
        try:
            rows = reader.rows(entry)
        except (CorruptObject, FileNotFoundError) as error:
            damaged.append(str(error))
            rows = []
        looked += entry.rows
        found += passes(rows)[:share]
        if len(found) >= most:
            break
    return FoundRows(found[:most], looked, None, damaged)


def batch_of_row(store: DatasetStore, manifest: SnapshotManifest, row_id: str) -> str | None:
    """Key of the batch that holds a row; None when the snapshot has no such row. Reads ids only."""
    for number, group in itertools.groupby(store.entries(manifest.snapshot), key=lambda entry: entry.shard):
        entries = list(group)
        path = store.snapshot_path(manifest.snapshot, manifest.shards[number].path)
        with store.objects.open(path) as opened, pq.ParquetFile(opened) as shard:
            for at in range(0, len(entries), _GROUPS):
                part = entries[at : at + _GROUPS]
                table = shard.read_row_groups([one.row_group for one in part], columns=["row_id"], use_threads=False)
                place = pc.index(table.column("row_id").cast(pa.string()), row_id).as_py()
                if place >= 0:
                    ends = itertools.accumulate(one.rows for one in part)
                    return next(one.key for one, end in zip(part, ends, strict=True) if place < end)
    return None


def original_of(store: DatasetStore, manifest: SnapshotManifest, row_id: str) -> str | None:
    """Id of the row whose answer a row of the source takes, as it asks the same (`dedupe`); None of any other row."""
    for shard in manifest.duplicate_shards:
        with store.objects.open(store.snapshot_path(manifest.snapshot, shard.path)) as opened:
            table = pq.read_table(opened, columns=["row_id", "of_row_id"])
        place = pc.index(table.column("row_id").cast(pa.string()), row_id).as_py()
        if place >= 0:
            return str(table.column("of_row_id")[place])
    return None


class TableCondition:
    """An SQL condition over rows, as a source's `where` is: columns of the table, `state`, and `prompt` as text.

    Raises BadCondition.
    """

    def __init__(self, text: str, manifest: SnapshotManifest) -> None:
        self._kept = [table_name(name) for name in manifest.keep_columns]
        self._condition = SqlCondition(text, column_names(manifest))
        self._of_output = output_columns(manifest)

    def passes(self, rows: Sequence[CurrentRow]) -> Sequence[CurrentRow]:
        """The rows of which the condition is true."""
        if not rows:
            return rows
        return [row for row, true in zip(rows, self._condition.mask(self._frame(rows)), strict=True) if true]

    def _frame(self, rows: Sequence[CurrentRow]) -> pl.DataFrame:
        import polars as pl

        columns: dict[str, pl.Series] = {}
        values = [row_values(row) for row in rows]
        for names, kind in ((_TEXTS, pl.String), (_COUNTS, pl.Int64), (_NUMBERS, pl.Float64)):
            columns |= {name: pl.Series(name, [one.get(name) for one in values], kind) for name in names}
        frame = pl.DataFrame(
            columns | {name: pl.Series(name, [row.kept[name] for row in rows], strict=False) for name in self._kept}
        )
        if (own := self._of_output) is None or not set(own.names) & set(self._condition.columns):
            return frame
        outputs = pa.array([one.get("output") for one in values], pa.string())
        typed = own.add(pa.table({"output": outputs}), count=False).drop_columns(["output"])
        return frame.with_columns(pl.DataFrame(pl.from_arrow(typed)).get_columns())


def column_names(manifest: SnapshotManifest) -> list[str]:
    """Columns that conditions are over, and that can be shown by name: those of the table, also of `output.columns`."""
    own = output_columns(manifest)
    return [*_own_names(manifest), *(own.names if own is not None else [])]


def output_columns(manifest: SnapshotManifest) -> OutputColumns | None:
    """The properties of a row's JSON as columns, beside all others."""
    return OutputColumns.of(manifest, _own_names(manifest))


def _own_names(manifest: SnapshotManifest) -> list[str]:
    return [*_TEXTS, *_COUNTS, *_NUMBERS, *(table_name(name) for name in manifest.keep_columns)]


def row_values(row: CurrentRow) -> dict[str, Any]:
    """Values of a row by column, without the kept ones; messages of a prompt as JSON. Less while the row waits."""
    said: dict[str, Any] = {"row_id": row.row_id, "batch": row.batch, "state": row.state.value}
    said["prompt"] = row.prompt if isinstance(row.prompt, str) else orjson.dumps(row.prompt).decode()
    one = row.outcome
    if one is None:
        return said
    said |= {name: getattr(one.origin, name) for name in _ORIGIN}
    plain = ("error", "error_message", "finish_reason", *_COUNTS, *_NUMBERS)
    said |= {name: getattr(one, name) for name in plain}
    return said | {"output": one.output if isinstance(one.output, str) else None}


class _Reader:
    """Reads batches of one snapshot; those of one shard after each other do not open it again."""

    def __init__(self, store: DatasetStore, manifest: SnapshotManifest, entries: Sequence[BatchEntry]) -> None:
        self._store, self._manifest = store, manifest
        self._current: Mapping[str, BatchObject] = store.current_objects(entries)
        self._journal = self._read_journal({entry.key for entry in entries if entry.key not in self._current})
        self._wanted: list[BatchEntry] = []
        self._tables: Iterator[tuple[BatchEntry, pa.Table]] | None = None

    def begun(self, entries: Iterable[BatchEntry]) -> list[BatchEntry]:
        """The batches of which something is finished."""
        return [entry for entry in entries if entry.key in self._current or entry.key in self._journal]

    def rows(self, entry: BatchEntry) -> list[CurrentRow]:
        """Raises CorruptObject, FileNotFoundError."""
        outcomes, committed = self._outcomes(entry), entry.key in self._current
        names = self._manifest.keep_columns
        found = []
        for line in self._table(entry, ["row_id", "row_key", "prompt", USER_TURNS, *names]).to_pylist():
            known = outcomes.get(line["row_id"])
            if known is not None and known.row_key != line["row_key"]:
                known = None  # of an earlier snapshot: the row is asked again
            kept = {table_name(name): line[name] for name in names}
            prompt = orjson.loads(line["prompt"])
            if known is not None and (said := line.get(USER_TURNS)):
                prompt = last_request(prompt, orjson.loads(said), [(turn.user, turn.output) for turn in known.turns])
            prompt = without_media_bytes(prompt) if self._manifest.images else prompt
            known = None if known is None or known.begun else known
            found.append(CurrentRow(entry.key, line["row_id"], prompt, kept, known, committed))
        return found

    def _table(self, entry: BatchEntry, columns: Sequence[str]) -> pa.Table:
        self._wanted[:] = [entry]
        if self._tables is None:
            given = iter(self._wanted.pop, None)  # one at a time
            self._tables = self._store.prompt_tables(self._manifest, given, columns)
        try:
            return next(self._tables)[1]
        except BaseException:  # ends the generator
            self._tables = None
            raise

    def _outcomes(self, entry: BatchEntry) -> Mapping[str, Outcome]:
        batch = self._current.get(entry.key)
        if batch is None:
            return self._journal.get(entry.key, {})
        return {one.row_id: one for one in outcomes_from(self._store.batch_table(batch))}

    def _read_journal(self, keys: Collection[str]) -> dict[str, dict[str, Outcome]]:
        """What the journal has of these batches. A segment that was deleted meanwhile is left out."""
        found: dict[str, dict[tuple[str, str], Outcome]] = {}
        if not keys:
            return {}
        held = 0
        sizes = {info.path: info.size for info in self._store.objects.list(f"{self._store.dataset}/journal/")}
        for path in self._store.journal.segments((min(keys), max(keys))):
            held += sizes.get(path, 0)
            if held > JOURNAL_BYTES:
                break
            try:
                batches = self._store.journal.read(path)
            except FileNotFoundError:
                continue
            for key in batches.keys() & keys:
                note_furthest(found.setdefault(key, {}), batches[key])
        return {key: {one.row_id: one for one in rows.values()} for key, rows in found.items()}
