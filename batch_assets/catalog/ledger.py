"""The ledger: one AssetMaterialization per committed batch, and the few ways in which we read it.

The store decides what is done; the catalog says so to people and to Dagster. Dagster plots numbers by their names,
those of observations too: what these count is called otherwise than what a batch does. Everything that leans on
Dagster internals stands here, and `tests/batch_assets/catalog/test_ledger.py` fails when they change.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import dagster as dg
import sqlalchemy as sa

from batch_assets.capacity_planning.clock_scale import scale_words
from batch_assets.dagster_internals import (
    AssetEventTagsTable,
    AssetKeyTable,
    EventLogStorage,
    SqlEventLogStorage,
    SqlEventLogStorageTable,
)
from batch_assets.gates.quality_gates import GateTrip
from batch_assets.tags import (
    CODE_VERSION_TAG,
    DATA_VERSION_TAG,
    INPUT_DATA_VERSION_TAG,
    INPUT_EVENT_POINTER_TAG,
    RETRY_RUN_TAG,
    USER_PROVIDED_TAG,
    WILL_RETRY_TAG,
)
from resources.fleet.leased_engine import LeasedEngine
from resources.fleet.migration import Migration
from resources.store.dataset_store import BatchEntry, BatchFooter, BatchObject, DatasetStore

CODE_VERSION = "1"
EMPTY_VERSION = "no-rows"
_VOID, _ANEW = "void-", "anew-"
_OURS = re.compile(rf"({_VOID}|{_ANEW})?[0-9a-f]{{16}}(-g\d+)?|{EMPTY_VERSION}")


RETRY_SECONDS = 60.0  # Dagster starts a promised retry within some 5 s
CHUNK = 500  # partitions named in one query
OVERLAP_SECONDS = 15.0  # Postgres hands out ids before the commit


@dataclass(frozen=True, slots=True)
class LedgerVersion:
    """What an entry says of its batch. As a tag: the data version, with `-gN` from the first further generation on.

    Other rows for the same prompts are other data to whoever reads them, so Dagster shows the table as stale after a
    regenerate or re-drive.
    """

    data_version: str
    generation: int

    @property
    def void(self) -> bool:
        """The object of this generation is gone or not as it was written: no snapshot asks for such a version."""
        return self.data_version.startswith(_VOID)

    @property
    def anew(self) -> bool:
        """All rows of the batch are to be asked again, whatever was answered up to this generation."""
        return self.data_version.startswith(_ANEW)

    def voided(self) -> LedgerVersion:
        """What the catalog says once the object is lost."""
        return self if self.void else LedgerVersion(_VOID + self.data_version, self.generation)

    def used_for(self, data_version: str) -> int:
        """Highest generation that was ever written at this data version, as far as this entry tells; -1: none."""
        own = self.data_version.removeprefix(_VOID).removeprefix(_ANEW)
        return self.generation if own == data_version else -1

    @property
    def tag(self) -> str:
        """Value of Dagster's data version tag."""
        return f"{self.data_version}-g{self.generation}" if self.generation else self.data_version

    @classmethod
    def parse(cls, tag: str) -> LedgerVersion:
        """Inverse of `tag`; a foreign value is a version that no snapshot asks for."""
        version, separator, generation = tag.rpartition("-g")
        return cls(version, int(generation)) if separator and generation.isdigit() else cls(tag, 0)


def rows_key(dataset: str) -> dg.AssetKey:
    """Asset key of the dataset's batches."""
    return dg.AssetKey([dataset, "rows"])


def prompts_key(dataset: str) -> dg.AssetKey:
    """Asset key of the dataset's snapshots."""
    return dg.AssetKey([dataset, "prompts"])


def table_key(dataset: str) -> dg.AssetKey:
    """Asset key of the published table."""
    return dg.AssetKey([dataset, "dataset"])


def judged_key(dataset: str) -> dg.AssetKey:
    """Asset of the rows that the dataset judged."""
    return dg.AssetKey([dataset, "judged"])


def passed_key(dataset: str) -> dg.AssetKey:
    """Asset key of the rows of the table that pass the filter."""
    return dg.AssetKey([dataset, "passed"])


def export_key(dataset: str, export: str) -> dg.AssetKey:
    """Asset key of files that are made of the table."""
    return dg.AssetKey([dataset, "exports", export])


def batch_event(store: DatasetStore, footer: BatchFooter, snapshot: str, rows: str = "") -> dg.AssetMaterialization:
    """The ledger entry of a committed batch, made from its footer alone: reporting it again gives the same entry.

    `rows`: some of its rows as Markdown, which stand above all else; whoever reports it again has none.
    """
    batch = BatchObject(footer.key, footer.data_version, footer.generation)
    metadata: dict[str, dg.MetadataValue] = {
        **({"first_rows": dg.MetadataValue.md(rows)} if rows else {}),
        "dagster/partition_row_count": dg.MetadataValue.int(footer.rows),
        "rows": dg.MetadataValue.int(footer.rows),
        "ok": dg.MetadataValue.int(footer.ok),
        "dead": dg.MetadataValue.int(footer.dead),
        "reused": dg.MetadataValue.int(footer.reused),
        **({"reused_from": dg.MetadataValue.json(footer.reused_from)} if footer.reused_from else {}),
        **({"journaled": dg.MetadataValue.json(footer.journaled)} if footer.journaled else {}),
        **_rates(footer),
        **({} if footer.mean_score is None else {"mean_score": dg.MetadataValue.float(round(footer.mean_score, 6))}),
        "prompt_tokens": dg.MetadataValue.int(footer.prompt_tokens),
        "completion_tokens": dg.MetadataValue.int(footer.completion_tokens),
        "seconds": dg.MetadataValue.float(round(footer.seconds, 3)),
        **({} if footer.usd is None else {"usd": dg.MetadataValue.float(round(footer.usd, 8))}),
        "rows_per_second": dg.MetadataValue.float(round(footer.rows / footer.seconds, 3) if footer.seconds else 0.0),
        "model": dg.MetadataValue.text(footer.model),
        "engine": dg.MetadataValue.text(footer.engine),
        "generation": dg.MetadataValue.int(footer.generation),
        "run": dg.MetadataValue.dagster_run(footer.run_id),
        "object": dg.MetadataValue.path(store.objects.uri(store.batch_path(batch))),
        **({} if footer.bytes is None else {"bytes": dg.MetadataValue.int(footer.bytes)}),
        **({} if footer.sha256 is None else {"sha256": dg.MetadataValue.text(footer.sha256)}),
    }
    return dg.AssetMaterialization(
        asset_key=rows_key(store.dataset),
        partition=footer.key,
        metadata=metadata,
        tags=version_tags(store.dataset, LedgerVersion(footer.data_version, footer.generation).tag, snapshot),
    )


def _rates(footer: BatchFooter) -> dict[str, dg.MetadataValue]:
    """Of rows that are bad, for Dagster's plots. Batches of an earlier version have those without an answer only."""
    counts = {"dead": footer.dead, **dict.fromkeys(("empty", "cut", "refused"), 0), **footer.marked}
    rates = {name: count / footer.looked_at.get(name, footer.rows) for name, count in counts.items()}
    return {f"{name}_rate": dg.MetadataValue.float(round(rate, 6)) for name, rate in rates.items()}


def empty_event(dataset: str, key: str, snapshot: str) -> dg.AssetMaterialization:
    """The entry of a batch that has no rows any more: without it a backfill over its key would end as failed."""
    return dg.AssetMaterialization(
        asset_key=rows_key(dataset),
        partition=key,
        metadata={"rows": dg.MetadataValue.int(0), "dagster/partition_row_count": dg.MetadataValue.int(0)},
        tags=version_tags(dataset, EMPTY_VERSION, snapshot),
    )


def void_event(
    dataset: str, key: str, version: LedgerVersion, snapshot: str, reason: str, sha256: str | None
) -> dg.AssetMaterialization:
    """The entry of a batch whose object is gone or was changed.

    Dagster cannot take back the history of one partition (`wipe_asset_partitions` is not implemented in its SQL event
    log), and an observation changes no staleness. So this is a materialization without rows, whose data version no
    snapshot asks for: the batch counts as missing, the table as stale, and what was there stays in the history.
    """
    return dg.AssetMaterialization(
        asset_key=rows_key(dataset),
        partition=key,
        description=f"Void: {reason}",
        metadata={
            "reason": dg.MetadataValue.text(
                f"Void: {reason}. Dagster shows the batch as materialized; it counts as missing until it is made again."
            ),
            "rows": dg.MetadataValue.int(0),
            "dagster/partition_row_count": dg.MetadataValue.int(0),
            "generation": dg.MetadataValue.int(version.generation),
            **({} if sha256 is None else {"sha256": dg.MetadataValue.text(sha256)}),
        },
        tags=version_tags(dataset, version.voided().tag, snapshot),
    )


def anew_event(
    dataset: str, entry: BatchEntry, used: int, snapshot: str, reason: str, *, where: str = "", former: str = ""
) -> dg.AssetMaterialization:
    """The entry of a batch of which rows are to be asked again. `used`: the highest generation that was written.

    As for a lost batch, no snapshot asks for its data version. Its object stays. `where`: the condition for rows that
    are asked again, the others keep their answers; "": all. `former`: the model that wrote the batch.
    """
    version = LedgerVersion(f"{_ANEW}{entry.data_version}", max(0, used))
    return dg.AssetMaterialization(
        asset_key=rows_key(dataset),
        partition=entry.key,
        description=f"To be made anew: {reason}",
        metadata={
            "reason": dg.MetadataValue.text(f"To be made anew: {reason}"),
            "rows": dg.MetadataValue.int(0),
            "dagster/partition_row_count": dg.MetadataValue.int(0),
            "generation": dg.MetadataValue.int(version.generation),
            **({"where": dg.MetadataValue.text(where)} if where else {}),
            **({"model": dg.MetadataValue.text(former)} if former else {}),
        },
        tags=version_tags(dataset, version.tag, snapshot),
    )


def move_event(dataset: str, decision: Migration) -> dg.AssetObservation:
    """Why a run moved to another instance, and what that saves; an observation, because no batch changed."""
    old, new = decision.old, decision.new
    return dg.AssetObservation(
        asset_key=rows_key(dataset),
        description=decision.sentence,
        metadata={
            "reason": dg.MetadataValue.text(decision.sentence),
            "decision": dg.MetadataValue.text("move"),
            "instance": dg.MetadataValue.text(decision.instance),
            "from": dg.MetadataValue.text(old.name),
            "to": dg.MetadataValue.text(new.name),
            "from_usd_per_hour": dg.MetadataValue.float(old.price_per_hour),
            "to_usd_per_hour": dg.MetadataValue.float(new.price_per_hour),
            "from_tokens_per_second": dg.MetadataValue.float(round(decision.old_tokens_per_second, 1)),
            "to_tokens_per_second": dg.MetadataValue.float(round(decision.new_tokens_per_second, 1)),
            "boot_seconds": dg.MetadataValue.float(new.boot_seconds),
            "tokens_left": dg.MetadataValue.int(round(decision.tokens_left)),
            "saved_usd": dg.MetadataValue.float(round(decision.saved_usd, 6)),
        },
    )


def gate_event(dataset: str, trip: GateTrip) -> dg.AssetObservation:
    """Why a request is paused: too many of the rows that came are bad. Rows by their ids, without their texts."""
    sentence = trip.describe()
    return dg.AssetObservation(
        asset_key=rows_key(dataset),
        description=sentence,
        metadata={
            "reason": dg.MetadataValue.text(sentence),
            "decision": dg.MetadataValue.text("gate"),
            "gate": dg.MetadataValue.text(trip.gate),
            "rate": dg.MetadataValue.float(round(trip.rate_and_bound[0], 6)),
            "bound": dg.MetadataValue.float(round(trip.rate_and_bound[1], 6)),
            "gate_rows": dg.MetadataValue.int(trip.stretch.rows),
            **({} if trip.scale else {"marked": dg.MetadataValue.int(int(trip.stretch.marked))}),
            "row_ids": dg.MetadataValue.json(list(trip.row_ids)),
            "go_on": dg.MetadataValue.text(f"batch-assets adjust {dataset} --accept {trip.gate}"),
        },
    )


def progress_event(
    dataset: str,
    rows_done: int,
    rows: int,
    rows_per_second: float,
    sentence: str,
    seconds_left: float | None = None,
    usd_spent: float | None = None,
) -> dg.AssetObservation:
    """How far a run is, for its page; an observation, because a batch that is not committed is no data yet.

    `usd_spent`: US dollars of its whole request.
    """
    return dg.AssetObservation(
        asset_key=rows_key(dataset),
        description=sentence,
        metadata={
            "reason": dg.MetadataValue.text(sentence),
            "decision": dg.MetadataValue.text("progress"),
            "rows_done": dg.MetadataValue.int(rows_done),
            "run_rows": dg.MetadataValue.int(rows),
            "run_rows_per_second": dg.MetadataValue.float(round(rows_per_second, 2)),
            **({} if seconds_left is None else {"seconds_left": dg.MetadataValue.float(round(seconds_left, 1))}),
            **({} if usd_spent is None else {"usd_spent": dg.MetadataValue.float(round(usd_spent, 6))}),
        },
    )


def lease_event(dataset: str, leased: LeasedEngine) -> dg.AssetObservation:
    """Which instance a run leased, at which price, and why this one."""
    return dg.AssetObservation(
        asset_key=rows_key(dataset),
        description=f"{leased.name}: {leased.why}",
        metadata={
            "reason": dg.MetadataValue.text(leased.why),
            "decision": dg.MetadataValue.text("lease"),
            **_instance(leased),
        },
    )


def bill_event(dataset: str, leased: LeasedEngine, reason: str) -> dg.AssetObservation:
    """What a lease did and cost until it was given back: the speed is that of the provider's clock."""
    spent = leased.spending.spent()
    price = leased.spending.usd_per_second or 0.0
    tokens = spent.prompt_tokens + spent.completion_tokens
    seconds = spent.useful_seconds * leased.clock
    return dg.AssetObservation(
        asset_key=rows_key(dataset),
        description=f"{leased.name} given back: {reason}",
        metadata={
            "reason": dg.MetadataValue.text(reason),
            "decision": dg.MetadataValue.text("give back"),
            **_instance(leased),
            "lease_rows": dg.MetadataValue.int(spent.rows),
            "lease_prompt_tokens": dg.MetadataValue.int(spent.prompt_tokens),
            "lease_completion_tokens": dg.MetadataValue.int(spent.completion_tokens),
            "tokens_per_second": dg.MetadataValue.float(round(tokens / seconds, 1) if seconds else 0.0),
            "useful_usd": dg.MetadataValue.float(round(spent.useful_seconds * price, 8)),
            "wasted_usd": dg.MetadataValue.float(round(spent.wasted_seconds * price, 8)),
        },
    )


def _instance(leased: LeasedEngine) -> dict[str, dg.MetadataValue]:
    assert leased.offer is not None
    scale = scale_words({leased.offer.provider: leased.clock})
    return {
        "instance": dg.MetadataValue.text(leased.name),
        "epoch": dg.MetadataValue.int(leased.epoch),
        "offer": dg.MetadataValue.text(leased.offer.name),
        "gpu": dg.MetadataValue.text(f"{leased.offer.gpus}x {leased.offer.gpu}"),
        "usd_per_hour": dg.MetadataValue.float(leased.offer.price_per_hour),
        **({"clock": dg.MetadataValue.text(scale)} if scale else {}),
    }


def version_tags(dataset: str, data_version: str, snapshot: str) -> dict[str, str]:
    """The tags from which Dagster computes staleness of a hand-logged event."""
    upstream = prompts_key(dataset).to_user_string()
    return {
        DATA_VERSION_TAG: data_version,
        CODE_VERSION_TAG: CODE_VERSION,
        f"{INPUT_DATA_VERSION_TAG}/{upstream}": snapshot,
        f"{INPUT_EVENT_POINTER_TAG}/{upstream}": "NULL",
        USER_PROVIDED_TAG: "true",
    }


def is_current(version: LedgerVersion | None, entry: BatchEntry) -> bool:
    """Whether the catalog has the batch at the snapshot's data version."""
    return version is not None and version.data_version == entry.data_version


def missing(entries: Iterable[BatchEntry], versions: Mapping[str, LedgerVersion]) -> list[BatchEntry]:
    """Batches of a snapshot that the catalog has not as the snapshot asks for them: those to be made."""
    return [entry for entry in entries if not is_current(versions.get(entry.key), entry)]


def ledger_versions(instance: dg.DagsterInstance, dataset: str) -> dict[str, LedgerVersion]:
    """Newest entry of ours of every batch in the catalog: 0.08 s at 10,000 keys, as only one indexed tag is read."""
    return {key: version for key, (_, version) in ledger_entries(instance, dataset).items()}


def ledger_entries(instance: dg.DagsterInstance, dataset: str) -> dict[str, tuple[int, LedgerVersion]]:
    """Storage id and version of the newest entry of ours of every batch.

    Anybody may report a materialization of a batch, in the UI or by HTTP. It says nothing of the store, so it is
    passed over: the entry before it counts.
    """
    remembered = remembered_entries(instance, dataset)
    return _all_entries(instance, dataset) if remembered is None else remembered.read(instance)


def remembered_entries(instance: dg.DagsterInstance, dataset: str) -> RememberedEntries | None:
    """What this instance remembers of a dataset; None where it does not remember."""
    with _LOCK:
        kept = _REMEMBERED.get(instance)
        return None if kept is None else kept.setdefault(dataset, RememberedEntries(dataset))


def remember_entries(instance: dg.DagsterInstance) -> None:
    """Have `ledger_entries` of this instance read only what is new: for a process that asks again and again.

    To read all of 80,000 batches takes a second of CPU here and two in Postgres.
    """
    with _LOCK:
        _REMEMBERED.setdefault(instance, {})


@dataclass(frozen=True, slots=True)
class Past:
    """The events up to the mark, as a file keeps them: their number, the sum of their ids, when the mark was written,
    and when the asset was wiped."""

    mark: int
    events: int
    ids: int
    last: str
    wiped: str


class RememberedEntries:
    """The entries of one dataset up to an event, the mark, and how to see that only events after it can differ.

    As long as there are as many events up to the mark, with the same sum of ids, and the last is the one it was, none
    was deleted, none appeared late (Postgres hands out ids before the commit), and no id was used again (SQLite).
    Events after the mark are read each time, until it is moved on to the newest event of some seconds ago.
    """

    def __init__(self, dataset: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock, self._dataset = clock, threading.Lock(), dataset
        self._entries: dict[str, tuple[int, LedgerVersion]] = {}
        self._mark, self._state = 0, _Marked(0, -1)
        self._looks: deque[tuple[float, int]] = deque()

    def read(self, instance: dg.DagsterInstance) -> dict[str, tuple[int, LedgerVersion]]:
        """As `ledger_entries` of an instance that remembers nothing."""
        storage = instance.event_log_storage
        if not isinstance(storage, SqlEventLogStorage):
            return _all_entries(instance, self._dataset)
        with self._lock:
            found = self._look(storage, self._mark)
            if found != self._state:  # all of them, up to one that is the mark from now on
                self._looks.clear()
                self._mark, self._state = found.newest, self._look(storage, found.newest)
                self._entries = _newest_of(self._events(storage, 0, self._mark))
                return dict(self._entries)
            new = self._events(storage, self._mark, found.newest) if found.newest > self._mark else []
            entries = self._entries | _newest_of(new)
            self._move_mark(found.newest, new)
            return entries

    def take_up(
        self, instance: dg.DagsterInstance, past: Past, entries: Mapping[str, tuple[int, LedgerVersion]]
    ) -> bool:
        """Remember what another process had read, if these are the events up to its mark; False otherwise."""
        storage = instance.event_log_storage
        if not isinstance(storage, SqlEventLogStorage):
            return False
        with self._lock:
            found = self._look(storage, past.mark)
            if found.past(past.mark) != past:
                return False
            self._mark, self._state, self._entries = past.mark, found, dict(entries)
            self._looks.clear()
            return True

    def settled(self, instance: dg.DagsterInstance) -> tuple[Past | None, dict[str, tuple[int, LedgerVersion]]]:
        """The past up to the newest event, for `take_up`, and its entries. None: it changed while it was read."""
        storage = instance.event_log_storage
        if not isinstance(storage, SqlEventLogStorage):
            return None, {}
        with self._lock:
            newest = self._look(storage, self._mark).newest
            past = self._look(storage, newest).past(newest)  # before the events: one that appears late is none of them
            entries = self._entries | _newest_of(self._events(storage, self._mark, newest))
            same = self._look(storage, self._mark) == self._state
            return past if same else None, entries

    def _move_mark(self, newest: int, new: Sequence[_Event]) -> None:
        now, mark = self._clock(), self._mark
        while self._looks and now - self._looks[0][0] > OVERLAP_SECONDS:
            mark = self._looks.popleft()[1]
        if not self._looks or self._looks[-1][1] != newest:
            self._looks.append((now, newest))
        settled = [event for event in new if event.number <= mark]
        if settled and settled[-1].number == mark:
            self._entries |= _newest_of(settled)
            self._mark = mark
            events = self._state.events + len(settled)
            ids = self._state.ids + sum(event.number for event in settled)
            self._state = replace(self._state, events=events, ids=ids, last=settled[-1].written_at)

    def _of_batches(self) -> sa.ColumnElement[bool]:
        events = SqlEventLogStorageTable.c
        return sa.and_(
            events.asset_key == rows_key(self._dataset).to_string(),
            events.dagster_event_type == dg.DagsterEventType.ASSET_MATERIALIZATION.value,
        )

    def _look(self, storage: SqlEventLogStorage, mark: int) -> _Marked:
        events, keys = SqlEventLogStorageTable.c, AssetKeyTable.c
        upto = sa.case((events.id <= mark, events.id))
        state = sa.select(sa.func.max(events.id), sa.func.count(upto), sa.func.sum(upto)).where(self._of_batches())
        last = sa.select(events.timestamp).where(self._of_batches(), events.id == mark)
        wiped = sa.select(keys.wipe_timestamp).where(keys.asset_key == rows_key(self._dataset).to_string())
        with storage.index_connection() as connection:
            newest, counted, ids = connection.execute(state).one()
            return _Marked(newest or 0, counted, int(ids or 0), connection.scalar(last), connection.scalar(wiped))

    def _events(self, storage: SqlEventLogStorage, after: int, upto: int) -> list[_Event]:
        """In order. On SQLite an event may have the id, and so the tags, of one that was deleted: its own are last."""
        events, tags = SqlEventLogStorageTable.c, AssetEventTagsTable.c
        version = sa.and_(tags.event_id == events.id, tags.key == DATA_VERSION_TAG)
        query = (
            sa.select(events.id, events.partition, tags.value, events.timestamp)
            .join_from(SqlEventLogStorageTable, AssetEventTagsTable, version, isouter=True)
            .where(self._of_batches(), events.id > after, events.id <= upto)
            .order_by(events.id, tags.id)
        )
        query = _not_wiped(storage, rows_key(self._dataset), query)
        with storage.index_connection() as connection:
            lines = {line[0]: _Event(*line) for line in connection.execute(query)}
        return list(lines.values())


@dataclass(frozen=True, slots=True)
class _Marked:
    """Id of the newest event; how many there are up to the mark, and the sum of their ids; when the mark was written,
    and when the asset was wiped."""

    newest: int = field(compare=False)
    events: int
    ids: int = 0
    last: object = None
    wiped: object = None

    def past(self, mark: int) -> Past:
        """The same for a file."""
        return Past(mark, self.events, self.ids, str(self.last), str(self.wiped))


@dataclass(frozen=True, slots=True)
class _Event:
    number: int
    partition: str | None
    tag: str | None
    written_at: object


def _newest_of(events: Iterable[_Event]) -> dict[str, tuple[int, LedgerVersion]]:
    return {
        event.partition: (event.number, LedgerVersion.parse(event.tag))
        for event in events
        if event.partition and event.tag and _OURS.fullmatch(event.tag)
    }


_LOCK = threading.Lock()
_REMEMBERED: WeakKeyDictionary[dg.DagsterInstance, dict[str, RememberedEntries]] = WeakKeyDictionary()


def _all_entries(instance: dg.DagsterInstance, dataset: str) -> dict[str, tuple[int, LedgerVersion]]:
    storage, key = instance.event_log_storage, rows_key(dataset)
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION
    newest = storage.get_latest_storage_id_by_partition(key, kind)
    tags = storage.get_latest_tags_by_partition(key, kind, tag_keys=[DATA_VERSION_TAG])
    found, foreign = {}, []
    for partition, number in newest.items():
        tag = tags.get(partition, {}).get(DATA_VERSION_TAG, "")
        if _OURS.fullmatch(tag):
            found[partition] = (number, LedgerVersion.parse(tag))
        else:
            foreign.append(partition)
    return found | _earlier_entries(storage, key, foreign)


def _not_wiped(storage: SqlEventLogStorage, key: dg.AssetKey, query: sa.Select[Any]) -> sa.Select[Any]:
    """Without events from before the asset was wiped, as Dagster leaves them out."""
    found: sa.Select[Any] = storage._add_assets_wipe_filter_to_query(query, storage._get_assets_details([key]), [key])
    return found


def _earlier_entries(
    storage: EventLogStorage, key: dg.AssetKey, partitions: Sequence[str]
) -> dict[str, tuple[int, LedgerVersion]]:
    """The newest entry of ours of batches whose newest event is somebody else's."""
    found: dict[str, tuple[int, LedgerVersion]] = {}
    if not isinstance(storage, SqlEventLogStorage):
        return found
    events, tags = SqlEventLogStorageTable.c, AssetEventTagsTable.c
    for start in range(0, len(partitions), CHUNK):
        query = (
            sa.select(events.partition, events.id, tags.value)
            .join_from(SqlEventLogStorageTable, AssetEventTagsTable, tags.event_id == events.id)
            .where(
                events.asset_key == key.to_string(),
                events.dagster_event_type == dg.DagsterEventType.ASSET_MATERIALIZATION.value,
                events.partition.in_(partitions[start : start + CHUNK]),
                tags.key == DATA_VERSION_TAG,
            )
            .order_by(events.id)
        )
        query = _not_wiped(storage, key, query)
        with storage.index_connection() as connection:
            lines = connection.execute(query).all()
        found |= {line[0]: (line[1], LedgerVersion.parse(line[2])) for line in lines if _OURS.fullmatch(line[2])}
    return found


def will_be_retried(record: dg.RunRecord, now: float) -> bool:
    """True for a failed run whose automatic retry Dagster has promised but not yet started. `now`: Unix seconds.

    Not longer than RETRY_SECONDS after the failure: Dagster's consumer of failures reads a run's status once, just
    after the event of its failure (dagster/_daemon/auto_run_reexecution). The status is written after that event, so a
    retry that was promised may never come. One that comes late does no harm: runs of one range ask for each row once.
    """
    run = record.dagster_run
    promised = run.tags.get(WILL_RETRY_TAG) == "true" and RETRY_RUN_TAG not in run.tags
    failed_at = record.end_time or record.update_timestamp.timestamp()
    return promised and abs(now - failed_at) < RETRY_SECONDS
