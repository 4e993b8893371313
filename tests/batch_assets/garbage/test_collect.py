"""Whatever happened to a dataset: what gc deletes is missed by nobody, and what is left has a reason."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from support.examples import property_test
from support.snapshots import ORIGIN, commit, outcome, questions, write_snapshot
from typer.testing import CliRunner

from batch_assets.cli.main import app
from batch_assets.garbage.collect import Found, delete_all, find_all, pinned_versions
from batch_assets.garbage.unreferenced import Garbage, Grace, Kind
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish, whole_table
from gpu_runner.batch_api.submitted_batches import SubmittedBatch
from resources.objects.object_interface import ObjectInfo
from resources.objects.opening import Objects, StoreError, open_objects
from resources.store.dataset_store import BatchObject, DatasetStore
from resources.store.stored_batches import RANGE, StoredBatches

ROWS, BATCH_ROWS = 12, 3
KEYS = [f"{number:05d}" for number in range(ROWS // BATCH_ROWS)]
ALL = Grace(time.time() + 3600)


def look(stores: list[DatasetStore], keep: int = 1, grace: Grace = ALL, delete: bool = True, **more: Any) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        spool = Path(folder) / "spool"
        busy = more.get("busy", lambda name: "")
        found = find_all(stores, pinned_versions(stores), keep, grace, busy, more.get("more", ()), spool)
        if delete:
            assert delete_all(stores[0].objects, spool) == found.objects.total()
    return found


class History:
    """A dataset to which something happens, as refreshes and runs do it."""

    def __init__(self, store: DatasetStore, folder: Path) -> None:
        self.store, self.folder, self.published = store, folder, list[str]()
        self.now = 1_750_000_000.0
        self.sent = dict[tuple[str, str], set[str]]()
        self.made_anew = defaultdict[tuple[str, str], set[str]](set)

    def refresh(self, changed: set[int]) -> None:
        """A snapshot in which some rows have another question than ever before."""
        self.now += 1
        rows = [
            replace(row, question=f"{row.question} {self.now}") if number in changed else row
            for number, row in enumerate(questions(ROWS))
        ]
        write_snapshot(self.store, rows, batch_rows=BATCH_ROWS)

    def commit(self, keys: set[int], generation: int) -> None:
        if snapshot := self.store.current_snapshot():
            wanted = [KEYS[one] for one in keys]
            before = {batch for batch, _ in self.store.batch_infos()}
            commit(self.store, self.store.manifest(snapshot), keys=wanted, generation=generation)
            new = {batch.key for batch, _ in self.store.batch_infos() if batch not in before}
            for one in self.sent:
                self.made_anew[one] |= new

    def journal(self, first: int, last: int, purpose: str = "") -> None:
        if snapshot := self.store.current_snapshot():
            manifest = self.store.manifest(snapshot)
            found = {
                entry.key: [outcome(rows[0])]
                for entry, rows in self.store.rows(manifest, self.store.entries(snapshot))
                if KEYS[first] <= entry.key <= KEYS[last]
            }
            if found:
                keys = (KEYS[first], KEYS[last])
                self.store.journal.append(keys, purpose, ORIGIN.run_id, int(self.now), found, "chat")
                self.now += 1

    def send(self, first: int, last: int, purpose: str = "") -> None:
        """Rows of these batches went to a Batch API, and the run was killed."""
        key, labels = f"{len(self.sent):032x}", {RANGE: f"{KEYS[first]}-{KEYS[last]}"}
        record = SubmittedBatch(
            key=key, place="p", created_at=self.now, digests=("d",), input_file_id="f", labels=labels
        )
        StoredBatches(self.store.objects, self.store.dataset, purpose).keep(record)
        self.sent[purpose, key] = set(KEYS[first : last + 1])

    def awaited(self) -> set[tuple[str, str]]:
        """What was sent and is looked for by a run that goes on: all of ordinary work while a batch is open; of a
        regenerate, while one of its own batches is open or was not made anew."""
        if (snapshot := self.store.current_snapshot()) is None:
            return set()
        open_keys = {entry.key for entry in self.store.entries(snapshot)} - self.current().keys()
        kept = {
            (purpose, record.key)
            for purpose in {purpose for purpose, _ in self.sent}
            for record in StoredBatches(self.store.objects, self.store.dataset, purpose).all()
        }
        return {
            one
            for one in kept
            if (self.sent[one] & open_keys | self.sent[one] - self.made_anew[one] if one[0] else open_keys)
        }

    def publish(self) -> None:
        snapshot = self.store.current_snapshot()
        if snapshot and len(self.current()) == len(KEYS):
            self.now += 1
            manifest = self.store.manifest(snapshot)
            card = Card("Sums.", [], [])
            table = publish(self.store, manifest, card=card, now=self.now, workdir=self.folder, keep_versions=99)
            self.published = [*(one for one in self.published if one != table.version), table.version]

    def current(self) -> dict[str, BatchObject]:
        snapshot = self.store.current_snapshot()
        return self.store.current_objects(self.store.entries(snapshot)) if snapshot else {}

    def answers(self) -> set[tuple[str, str, str]]:
        """Rows whose answer a run finds: of objects of their batch, or in the journal, for open batches; all others
        are in the batch's own object."""
        snapshot = self.store.current_snapshot()
        if snapshot is None:
            return set()
        current, objects = self.current(), self.store.objects_by_batch()
        found = set()
        for entry, rows in self.store.rows(self.store.manifest(snapshot), self.store.entries(snapshot)):
            wanted = {(row.row_id, row.row_key) for row in rows}
            known = [current[entry.key]] if entry.key in current else objects.get(entry.key, [])
            outcomes = [one for batch in known for one in self.store.outcomes(batch)]
            if entry.key not in current:
                segments = self.store.journal.segments((entry.key, entry.key))
                outcomes += [one for path in segments for one in self.store.journal.read(path).get(entry.key, ())]
            found |= {(entry.key, *key) for key in {(one.row_id, one.row_key) for one in outcomes} & wanted}
        return found


numbers = st.sets(st.integers(0, ROWS - 1), max_size=4)
batches = st.sets(st.integers(0, len(KEYS) - 1))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("refresh"), numbers),
        st.tuples(st.just("commit"), batches, st.integers(0, 2)),
        st.tuples(st.just("commit"), st.just(set(range(len(KEYS)))), st.integers(0, 2)),
        st.tuples(st.just("journal"), st.integers(0, 1), st.integers(1, 3)),
        st.tuples(st.just("send"), st.integers(0, 1), st.integers(1, 3), st.sampled_from(["", "", "a-run"])),
        st.tuples(st.just("publish")),
        st.tuples(st.just("gc"), st.integers(1, 3)),
    ),
    min_size=4,
    max_size=10,
)


@pytest.mark.slow
@property_test(5, 300, done=steps, keep=st.integers(1, 3))
def test_everything_that_is_referenced_can_be_read_and_nothing_is_asked_again(
    done: list[tuple[Any, ...]], keep: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = DatasetStore(open_objects(f"{folder}/store"), "sums")
        history = History(store, Path(folder))
        history.refresh(set())
        for name, *arguments in done:
            if name == "gc":
                awaited = history.awaited()
                look([store], arguments[0])
                assert history.awaited() == awaited
            else:
                getattr(history, name)(*arguments)
        before, answers, published = history.current(), history.answers(), store.current_published()
        awaited = history.awaited()
        look([store], keep)
        assert history.awaited() == awaited
        assert history.current() == before
        assert history.answers() == answers
        for batch in before.values():
            store.read_batch(batch)
        assert store.current_published() == published
        for version in [*history.published[-keep:], *([published] if published else [])]:
            assert whole_table(store, version) is not None or version not in left(store, "published")
        if published:
            assert whole_table(store, published) is not None
        assert not look([store], keep).objects  # nothing more is garbage
        for key, objects in store.objects_by_batch().items():
            if key in before:
                assert objects == [before[key]]


def left(store: DatasetStore, folder: str) -> set[str]:
    prefix = f"{store.dataset}/{folder}/"
    return {info.path[len(prefix) :].partition("/")[0] for info in store.objects.list(prefix)} - {"CURRENT"}


@pytest.fixture
def history(local_objects: Objects, tmp_path: Path) -> History:
    """Three snapshots, each with all batches and a table; of the last one a second generation, and a journal."""
    history = History(DatasetStore(local_objects, "sums"), tmp_path)
    for changed in (set[int](), {1}, {1, 7}):
        history.refresh(changed)
        history.commit(set(range(len(KEYS))), 0)
        history.publish()
    history.journal(0, 3)
    history.commit({2}, 1)
    history.publish()
    return history


def test_what_goes_and_what_stays(history: History) -> None:
    found = look([history.store], keep=2)
    # of the first snapshot's batches two were changed later, one of those twice; batch 2 has a second generation
    assert found.objects[Kind.SUPERSEDED_BATCH] == 4
    assert found.objects[Kind.JOURNAL] == 1
    assert left(history.store, "published") == set(history.published[-2:])
    assert history.store.current_snapshot() in left(history.store, "snapshots")


def test_what_a_regenerate_has_paid_for_stays_until_its_batches_are_made_anew(history: History) -> None:
    history.journal(0, 1, purpose="a-run-of-a-regenerate-that-is-paused")
    found = look([history.store])
    assert found.objects[Kind.JOURNAL] == 1  # of the ordinary work
    history.commit({0}, 1)
    assert not look([history.store]).objects[Kind.JOURNAL]
    history.commit({1}, 1)
    assert look([history.store]).objects[Kind.JOURNAL] == 1


def records(history: History) -> set[str]:
    return left(history.store, "submitted_batches")


def test_records_of_what_was_sent_go_when_no_run_looks_for_them_any_more(history: History) -> None:
    history.send(0, 1)
    history.send(0, 1, "a-run")
    history.refresh({1, 7, 11})
    look([history.store])
    history.commit({0, 2}, 0)
    look([history.store])
    assert records(history) == {"ordinary", "a-run"}  # batch 3 is open: rows may have moved to it
    history.commit({3}, 0)
    assert not look([history.store], grace=Grace(1_600_000_000.0)).objects
    assert look([history.store]).objects[Kind.SUBMITTED] == 1
    assert records(history) == {"a-run"}
    history.commit({1}, 1)
    assert look([history.store]).objects[Kind.SUBMITTED] == 1
    assert not records(history)


def test_a_record_that_does_not_say_its_batches_waits_for_all_of_them(history: History) -> None:
    store, path = history.store, "submitted_batches/a-run/"
    store.objects.put(f"{store.dataset}/{path}{'0' * 32}.json", b"no record")
    old = SubmittedBatch(key="1" * 32, place="p", created_at=1.0, digests=("d",), input_file_id="f")
    StoredBatches(store.objects, store.dataset, "a-run").keep(old)
    history.commit({0, 1, 3}, 1)
    assert not look([store]).objects[Kind.SUBMITTED]
    history.commit({2}, 2)
    assert look([store]).objects[Kind.SUBMITTED] == 2


def test_a_version_that_another_dataset_was_made_of_stays(history: History) -> None:
    other = DatasetStore(history.store.objects, "other")
    manifest = write_snapshot(other, questions(3))
    other.put_manifest(manifest.model_copy(update={"upstream_version": history.published[0]}))
    look([history.store, other], keep=1)
    assert left(history.store, "published") == {history.published[0], history.published[-1]}


def test_what_is_young_stays(history: History) -> None:
    found = look([history.store], grace=Grace(1_600_000_000.0))
    assert not found.objects


def test_a_dataset_at_work_is_left_alone(history: History) -> None:
    found = look([history.store], busy=lambda name: "1 of its runs is under way")
    assert not found.objects
    assert found.skipped == {"sums": "1 of its runs is under way"}


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["batches", "journal", "submitted_batches", "snapshots", "published"])
def test_a_listing_that_fails_in_the_middle_deletes_nothing(
    history: History, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    history.send(0, 1)
    objects = history.store.objects
    there, listing = [*objects.list("")], type(objects).list

    def breaks_off(self: Objects, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        for number, info in enumerate(listing(self, prefix, start_after)):
            few = folder in ("journal", "submitted_batches")
            if f"/{folder}/" in prefix and (few or number == 1):
                raise StoreError("503")
            yield info

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="503"):
        patch.setattr(type(objects), "list", breaks_off)
        look([history.store])
    assert [*objects.list("")] == there


def test_a_damaged_snapshot_leaves_the_dataset_alone(history: History) -> None:
    snapshot = history.store.current_snapshot()
    history.store.objects.put(history.store.snapshot_path(snapshot or "", "batches.parquet"), b"no")
    found = look([history.store])
    assert not found.objects
    assert "sums" in found.skipped


def test_many_objects_go_in_few_requests(any_objects: Objects, tmp_path: Path) -> None:
    for number in range(7):
        any_objects.put(f"x/{number}", b"x")
    spool, found = tmp_path / "spool", [Garbage(Kind.UPLOAD, f"x/{number}", 1) for number in (*range(5), 99)]
    find_all([], frozenset(), 1, ALL, lambda name: "", found, spool)
    assert delete_all(any_objects, spool) == 6
    assert [info.path for info in any_objects.list("x/")] == ["x/5", "x/6"]
    assert all(abs(info.modified_at - time.time()) < 600 for info in any_objects.list("x/"))


def test_what_a_killed_upload_left_is_found(local_objects: Objects, tmp_path: Path) -> None:
    local_objects.put("d/one", b"1")
    (tmp_path / "store" / "d" / ".writing-abc").write_bytes(b"half")
    assert [*local_objects.abandoned(time.time() - 60)] == []
    (found,) = local_objects.abandoned(time.time() + 60)
    local_objects.delete_many([found.path])
    assert [info.path for info in local_objects.list("")] == ["d/one"]
    assert not (tmp_path / "store" / "d" / ".writing-abc").exists()


@pytest.mark.slow
def test_the_command_counts_first_and_deletes_when_told(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCH_ASSETS_STORE", str(tmp_path / "store"))
    defs = tmp_path / "defs" / "sums"
    defs.mkdir(parents=True)
    monkeypatch.setenv("BATCH_ASSETS_DEFS", str(defs.parent))
    spec = "{name: sums, model: m, source: {grid: {a: [b]}}, prompt: {user: '{{ a }}'}}"
    (defs / "defs.yaml").write_text(f"type: batch_assets.GeneratedDataset\nattributes: {spec}\n")
    later = time.time() + 2 * 3600
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(monkeypatch.context())
        patch.setattr("batch_assets.cli.backup_commands.gc_command.time.time", lambda: later)
        counted = CliRunner().invoke(app, ["gc", "sums", "--older-than", "1h"])
        assert "--delete" in counted.stdout, counted.output
        assert len(left(history.store, "published")) == 4
        deleted = CliRunner().invoke(app, ["gc", "sums", "--older-than", "1h", "--delete"])
        assert "objects deleted" in deleted.stdout, deleted.output
    assert len(left(history.store, "published")) == 2
    refused = CliRunner().invoke(app, ["gc", "--older-than", "5m"])
    assert refused.exit_code == 2
    assert "at least 1h" in refused.stderr
