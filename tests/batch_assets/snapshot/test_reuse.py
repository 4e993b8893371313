"""Answers of other datasets of the store: which are found, for which rows, and what damage costs."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.snapshots import SourceRow, commit, current_path, overwrite, questions, write_snapshot

from batch_assets.generation.range_plan import vector_length
from batch_assets.snapshot import reuse as reuse_module
from batch_assets.snapshot.reuse import ReusableRows, dataset_names, find_reusable, refuse_unknown
from batch_assets.snapshot.source.errors import SourceError
from gpu_runner.rows import Outcome, Row
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import FOOTER_KEY, BatchObject, DatasetStore, SnapshotManifest
from resources.store.reusable_answers import ReusableAnswers


def paid(objects: Objects, name: str, rows: list[SourceRow], *, dead: tuple[str, ...] = ()) -> SnapshotManifest:
    """Another dataset, all of it answered."""
    store = DatasetStore(objects, name)
    manifest = write_snapshot(store, rows, batch_rows=7)
    commit(store, manifest, dead=dead, answer=lambda row, number: f"{name} to {row.row_key[:8]}")
    return manifest


def new_dataset(objects: Objects, rows: list[SourceRow]) -> tuple[DatasetStore, SnapshotManifest]:
    store = DatasetStore(objects, "d")
    return store, write_snapshot(store, rows)


def found(store: DatasetStore, manifest: SnapshotManifest, reuse: bool | Sequence[str] = True) -> dict[str, Outcome]:
    """Every reusable answer by the id of the new dataset's row."""
    answers, outcomes = ReusableAnswers(store.objects, store.dataset, reuse), dict[str, Outcome]()
    batches = answers.of_snapshot(manifest.snapshot)
    for entry, rows in store.rows(manifest, store.entries(manifest.snapshot)):
        if entry.key in batches:
            outcomes |= answers.read(batches[entry.key], rows)
    return outcomes


def renamed(rows: list[SourceRow]) -> list[SourceRow]:
    """The same questions under other ids, in another order."""
    other = [SourceRow(f"other-{number}", row.question, row.keep) for number, row in enumerate(rows)]
    random.Random(1).shuffle(other)
    return other


@pytest.mark.slow
def test_each_row_that_asks_the_same_takes_the_answer_that_is_paid(tmp_path: Path, any_objects: Objects) -> None:
    paid(any_objects, "first", questions(60))
    store, manifest = new_dataset(any_objects, renamed(questions(45)) + questions(30, start=500))
    reusable = find_reusable(store, manifest, ["first"], workdir=tmp_path)
    assert reusable == ReusableRows(45, {"first": 45})
    outcomes = found(store, manifest, ["first"])
    keys = {
        row.row_id: row.row_key for _, rows in store.rows(manifest, store.entries(manifest.snapshot)) for row in rows
    }
    assert outcomes.keys() == {row.row_id for row in renamed(questions(45))}
    for row_id, outcome in outcomes.items():
        assert (outcome.row_id, outcome.row_key) == (row_id, keys[row_id])
        assert outcome.output == f"first to {keys[row_id][:8]}"
        assert (outcome.usd, outcome.tries, outcome.reused_from) == (0.0, 0, "first")
        assert outcome.origin.run_id == "run-1"


@pytest.mark.slow
def test_parts_that_are_scattered_over_many_files_are_put_together(
    tmp_path: Path, local_objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse_module, "ROW_BYTES", 1 << 22)
    monkeypatch.setattr(reuse_module, "PART_ROWS", 5)
    paid(local_objects, "first", questions(200))
    store, manifest = new_dataset(local_objects, renamed(questions(200)))
    assert find_reusable(store, manifest, True, workdir=tmp_path) == ReusableRows(200, {"first": 200})
    assert len(found(store, manifest)) == 200


@pytest.mark.slow
def test_of_several_datasets_the_first_named_counts_and_who_paid_stays_known(
    tmp_path: Path, local_objects: Objects
) -> None:
    paid(local_objects, "a", questions(10))
    paid(local_objects, "b", questions(20))
    between = DatasetStore(local_objects, "between")
    copied = write_snapshot(between, questions(20))
    find_reusable(between, copied, ["b"], workdir=tmp_path / "between")
    rows = between.rows(copied, between.entries(copied.snapshot))
    answers = found(between, copied, ["b"])
    commit_outcomes(between, copied, [[answers[row.row_id] for row in part] for _, part in rows])
    store, manifest = new_dataset(local_objects, questions(20))
    assert find_reusable(store, manifest, ["b", "a"], workdir=tmp_path / "1").datasets == {"b": 20}
    store, manifest = new_dataset(local_objects, questions(25))
    assert find_reusable(store, manifest, ["a", "between"], workdir=tmp_path / "2").datasets == {"a": 10, "b": 10}
    store, manifest = new_dataset(local_objects, questions(26))
    assert find_reusable(store, manifest, True, workdir=tmp_path / "3").rows == 20


def commit_outcomes(store: DatasetStore, manifest: SnapshotManifest, batches: list[list[Outcome]]) -> None:
    from resources.store.dataset_store import BatchFooter

    for entry, outcomes in zip(store.entries(manifest.snapshot), batches, strict=True):
        footer = BatchFooter.of(
            store.dataset,
            entry,
            outcomes,
            snapshot=manifest.snapshot,
            generation=0,
            epoch=1,
            run_id="run-2",
            root_run_id="run-2",
        )
        assert footer.reused_from == {"b": len(outcomes)}
        store.commit(footer, outcomes, "chat")


def test_dead_letters_are_no_answers_and_a_later_dataset_may_have_one(tmp_path: Path, local_objects: Objects) -> None:
    paid(local_objects, "a", questions(10), dead=("id-000003", "id-000007"))
    paid(local_objects, "b", questions(5))
    store, manifest = new_dataset(local_objects, questions(10))
    assert find_reusable(store, manifest, ["a", "b"], workdir=tmp_path).datasets == {"a": 8, "b": 1}
    assert len(answers := found(store, manifest, ["a", "b"])) == 9 and "id-000007" not in answers


def test_of_equal_rows_one_that_has_an_answer_is_taken(tmp_path: Path, local_objects: Objects) -> None:
    twice = [SourceRow(f"{name}-{row.row_id}", row.question, row.keep) for name in "xyz" for row in questions(20)]
    dead = ("x-id-000003", "x-id-000007", "y-id-000007", "x-id-000009", "y-id-000009", "z-id-000009")
    paid(local_objects, "a", twice, dead=dead)
    store, manifest = new_dataset(local_objects, questions(20) + renamed(questions(20)))
    assert find_reusable(store, manifest, True, workdir=tmp_path).datasets == {"a": 38}
    answers = found(store, manifest)
    assert len(answers) == 38 and "id-000009" not in answers, "of this one all are dead letters"
    assert all(answers[name].error is None and answers[name].output for name in ("id-000003", "id-000007"))


def test_rows_of_committed_batches_and_of_other_requests_are_left_alone(
    tmp_path: Path, local_objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    paid(local_objects, "a", questions(30))
    store, manifest = new_dataset(local_objects, questions(30))
    commit(store, manifest, keys=["00000", "00002"])
    assert find_reusable(store, manifest, True, workdir=tmp_path / "1").rows == 10
    assert list(ReusableAnswers(local_objects, "d", True).of_snapshot(manifest.snapshot)) == ["00001"]
    for other in ({"model": "another"}, {"sampling": {"temperature": 0, "max_tokens": 5}}, {"task": "completion"}):
        asked = manifest.model_copy(update={"generation": manifest.generation | other})
        assert find_reusable(store, asked, True, workdir=tmp_path / "2") == ReusableRows()
    repaired = manifest.model_copy(update={"generation": manifest.generation | {"repair_tries": 4}})
    assert find_reusable(store, repaired, True, workdir=tmp_path / "3").rows == 10


@pytest.mark.parametrize("own", [{"on_truncated": "dead"}, {"on_truncated": "retry_longer", "retry_max_tokens": 9}])
def test_answers_that_were_cut_are_not_taken_by_a_dataset_that_does_not_keep_them(
    own: dict[str, Any], tmp_path: Path, local_objects: Objects
) -> None:
    store = DatasetStore(local_objects, "first")
    commit(store, write_snapshot(store, questions(20)), cut=("id-000003",))
    store, manifest = new_dataset(local_objects, questions(20))
    assert find_reusable(store, manifest, True, workdir=tmp_path / "keeps").rows == 20
    asked = manifest.model_copy(update={"generation": manifest.generation | own})
    assert find_reusable(store, asked, True, workdir=tmp_path / "asks").rows == 19


def test_answers_that_were_cut_are_not_taken_where_the_limit_may_have_been_another_one(
    tmp_path: Path, local_objects: Objects
) -> None:
    growing: SnapshotManifest | None = None
    for name in ("first", "d"):
        store = DatasetStore(local_objects, name)
        manifest = write_snapshot(store, questions(20))
        growing = manifest.model_copy(update={"generation": manifest.generation | {"max_tokens_may_grow": True}})
        store.put_manifest(growing)
        if name == "first":
            commit(store, growing, cut=("id-000003",))
    assert growing is not None
    assert find_reusable(store, growing, True, workdir=tmp_path / "asks").rows == 19


def test_what_is_not_committed_yet_or_not_there_is_not_reused(tmp_path: Path, local_objects: Objects) -> None:
    other = DatasetStore(local_objects, "half")
    commit(other, write_snapshot(other, questions(30)), keys=["00001"])
    store, manifest = new_dataset(local_objects, questions(30))
    assert find_reusable(store, manifest, ["half", "nobody"], workdir=tmp_path).datasets == {"half": 10}
    assert {row_id[-6:] for row_id in found(store, manifest, ["half", "nobody"])} == {f"{i:06d}" for i in range(10, 20)}


def test_damage_of_another_dataset_costs_only_what_is_damaged(tmp_path: Path, local_objects: Objects) -> None:
    manifest = paid(local_objects, "a", questions(30))
    a = DatasetStore(local_objects, "a")
    path = current_path(a, manifest, "00001")
    whole = local_objects.get(path)
    overwrite(a, path, whole[: len(whole) // 2])
    local_objects.delete([current_path(a, manifest, "00002")])
    store, new = new_dataset(local_objects, questions(30))
    assert find_reusable(store, new, ["a"], workdir=tmp_path / "1").rows == 30 - 2 * 7
    overwrite(a, a.snapshot_path(manifest.snapshot, "prompts-00000.parquet"), b"PAR1 nothing of it PAR1")
    paid(local_objects, "b", questions(3))
    store, new = new_dataset(local_objects, questions(31))
    assert find_reusable(store, new, True, workdir=tmp_path / "2").datasets == {"b": 3}
    overwrite(a, "a/snapshots/CURRENT", b"\0\0")
    assert find_reusable(store, new, ["a"], workdir=tmp_path / "3") == ReusableRows()


def test_a_dataset_whose_files_are_none_of_ours_stops_no_other_one(tmp_path: Path, local_objects: Objects) -> None:
    """Whole as Parquet, and without checksums, as a snapshot of an early version or of another program."""
    odd, mixed = DatasetStore(local_objects, "a"), DatasetStore(local_objects, "b")
    manifest = paid(local_objects, "a", questions(30))
    odd.put_manifest(manifest.model_copy(update={"files": []}))
    sink = io.BytesIO()
    pq.write_table(pa.table({"row_id": ["x"] * 30}), sink, row_group_size=7)
    overwrite(odd, odd.snapshot_path(manifest.snapshot, "prompts-00000.parquet"), sink.getvalue())
    manifest = write_snapshot(mixed, questions(30), batch_rows=7)
    commit(mixed, manifest, keys=["00000"])
    vectors = commit(mixed, write_snapshot(mixed, questions(30), batch_rows=7, task="embedding"), keys=["00001"])
    mixed.set_current_snapshot(manifest.snapshot)
    names = {entry.key: entry for entry in mixed.entries(manifest.snapshot)}
    found_at = BatchObject("00001", vectors["00001"].data_version, 0)
    table = mixed.batch_table(found_at)
    said = vectors["00001"].model_copy(update={"data_version": names["00001"].data_version})
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({FOOTER_KEY: said.model_dump_json()}), sink)
    local_objects.put(mixed.batch_path(BatchObject("00001", said.data_version, 0)), sink.getvalue())
    store, new = new_dataset(local_objects, questions(30))
    assert find_reusable(store, new, True, workdir=tmp_path / "1").datasets == {"b": 7}


def test_what_was_read_of_a_dataset_is_not_kept_and_none_is_read_when_nothing_is_wanted(
    tmp_path: Path, local_objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rows in (("a", 4), ("b", 10), ("c", 10)):
        paid(local_objects, name, questions(rows))
    store, manifest = new_dataset(local_objects, questions(10))
    looked_at: list[str] = []
    read: list[str] = []
    real, look = reuse_module.snapshot_rows, reuse_module._source

    def noted(of: DatasetStore, *more: Any) -> Iterator[Any]:
        read.append(of.dataset)
        assert of.dataset != "b" or not (tmp_path / "work" / "0").exists()
        return real(of, *more)

    def noted_look(store: DatasetStore, manifest: SnapshotManifest, name: str) -> Any:
        looked_at.append(name)
        assert name != "b" or read == ["d", "a"]
        return look(store, manifest, name)

    monkeypatch.setattr(reuse_module, "snapshot_rows", noted)
    monkeypatch.setattr(reuse_module, "_source", noted_look)
    assert find_reusable(store, manifest, True, workdir=tmp_path / "work").datasets == {"a": 4, "b": 6}
    assert read == ["d", "a", "b"]
    assert looked_at == ["a", "b"]


@pytest.mark.parametrize(("length", "row_bytes"), [(3, 2048), (4096, 4 * 4096)])
def test_large_batches_are_not_read_ahead_together(
    tmp_path: Path, local_objects: Objects, monkeypatch: pytest.MonkeyPatch, length: int, row_bytes: int
) -> None:
    a = DatasetStore(local_objects, "a")
    commit(a, write_snapshot(a, questions(12), batch_rows=7, task="embedding"), answer=lambda *_: (0.5,) * length)
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(12), task="embedding")
    sizes: list[int] = []
    real = reuse_module.read_ahead

    def noted(read: Any, jobs: Any, threads: int, size: Any = None) -> Iterator[Any]:
        if size is None:
            return real(read, jobs, threads)
        jobs = list(jobs)
        sizes.extend(size(job) for job in jobs)
        return real(read, jobs, threads, size)

    monkeypatch.setattr(reuse_module, "read_ahead", noted)
    assert find_reusable(store, manifest, True, workdir=tmp_path, vector_length=length).rows == 12
    assert sizes == [7 * row_bytes, 5 * row_bytes]


def test_a_store_that_is_away_is_no_damage(
    tmp_path: Path, local_objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    paid(local_objects, "a", questions(30))
    store, manifest = new_dataset(local_objects, questions(30))

    def away(*_: object) -> object:
        raise OSError(5, "Input/output error")

    real = reuse_module.snapshot_rows
    calls = iter([real, away])
    monkeypatch.setattr(reuse_module, "snapshot_rows", lambda *given: next(calls)(*given))
    with pytest.raises(OSError, match="Input/output"):
        find_reusable(store, manifest, ["a"], workdir=tmp_path)


def test_a_second_look_writes_nothing_twice_and_finds_what_came_since(tmp_path: Path, local_objects: Objects) -> None:
    other = DatasetStore(local_objects, "a")
    paid_later = write_snapshot(other, questions(20))
    commit(other, paid_later, keys=["00000"])
    store, manifest = new_dataset(local_objects, questions(20, start=5))
    answers = ReusableAnswers(local_objects, "d", True)
    assert find_reusable(store, manifest, True, workdir=tmp_path / "1").rows == 5
    first = set(answers.paths())
    assert find_reusable(store, manifest, True, workdir=tmp_path / "2").rows == 5
    assert set(answers.paths()) == first
    commit(other, paid_later, keys=["00001"])
    assert find_reusable(store, manifest, True, workdir=tmp_path / "3").rows == 15
    assert {key: batch.rows for key, batch in answers.of_snapshot(manifest.snapshot).items()} == {
        "00000": 10,
        "00001": 5,
    }
    assert answers.of_snapshot(manifest.snapshot, "00001", "00001").keys() == {"00001"}


def test_answers_of_a_dataset_that_is_not_named_any_more_are_not_taken(tmp_path: Path, local_objects: Objects) -> None:
    paid(local_objects, "bad", questions(20))
    paid(local_objects, "good", questions(15))
    store, manifest = new_dataset(local_objects, questions(20))
    assert find_reusable(store, manifest, True, workdir=tmp_path / "1").datasets == {"bad": 20}
    assert find_reusable(store, manifest, ["good"], workdir=tmp_path / "2").datasets == {"good": 15}
    assert {outcome.reused_from for outcome in found(store, manifest, ["good"]).values()} == {"good"}
    assert len(found(store, manifest)) == 20
    assert len(ReusableAnswers(local_objects, "d", ["good"]).paths()) == 4


def test_vectors_of_another_length_are_left_out(tmp_path: Path, local_objects: Objects) -> None:
    for name, rows, length in (("a", questions(10), 3), ("b", questions(20), 2), ("c", questions(30), 3)):
        store = DatasetStore(local_objects, name)
        vector = (0.5,) * length
        commit(store, write_snapshot(store, rows, task="embedding"), answer=lambda row, number, vector=vector: vector)
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(40), task="embedding")
    assert find_reusable(store, manifest, True, workdir=tmp_path / "1").datasets == {"a": 10, "c": 20}
    assert {outcome.output for outcome in found(store, manifest).values()} == {(0.5, 0.5, 0.5)}
    assert vector_length(store, manifest, True) == 3
    assert vector_length(store, manifest) is None
    two = find_reusable(store, manifest, ["a", "b"], workdir=tmp_path / "2", vector_length=2)
    assert two.datasets == {"b": 20}
    none = find_reusable(store, manifest, ["a"], workdir=tmp_path / "3", vector_length=4)
    assert none == ReusableRows()


def test_garbage_in_place_of_answers_is_named(tmp_path: Path, local_objects: Objects) -> None:
    paid(local_objects, "a", questions(10))
    store, manifest = new_dataset(local_objects, questions(10))
    find_reusable(store, manifest, True, workdir=tmp_path)
    answers = ReusableAnswers(local_objects, "d", True)
    (batch,) = answers.of_snapshot(manifest.snapshot).values()
    local_objects.put(batch.path, b"garbage")
    with pytest.raises(CorruptObject, match="not a whole object"):
        answers.read(batch, [Row("00000", "id-000000", "0" * 64, b"")])
    local_objects.put(
        batch.path, local_objects.get(current_path(DatasetStore(local_objects, "a"), *first_of(local_objects)))
    )
    with pytest.raises(CorruptObject, match="number of rows"):
        answers.read(batch, [])


def first_of(objects: Objects) -> tuple[SnapshotManifest, str]:
    store = DatasetStore(objects, "a")
    return store.manifest(store.current_snapshot() or ""), "00000"


def test_the_folders_of_a_store_are_listed_each_once(any_objects: Objects) -> None:
    for path in ("a/x", "a/y/z", "a0/x", "a_b/x", "b/snapshots/CURRENT", "b/z", "top"):
        any_objects.put(path, b"1")
    assert dataset_names(any_objects) == ["a", "a0", "a_b", "b"]


def test_a_folder_that_may_not_be_read_is_no_dataset(local_objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("a/x", "lost+found/x", "z/x"):
        local_objects.put(path, b"1")
    real, closed = os.scandir, [Path(local_objects.root) / "lost+found"]

    def scandir(path: Any) -> Any:
        if Path(path) in closed:
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert dataset_names(local_objects) == ["a", "z"]
    closed.append(Path(local_objects.root))
    with pytest.raises(PermissionError):
        dataset_names(local_objects)


def test_a_file_beside_the_datasets_is_none(tmp_path: Path, any_objects: Objects) -> None:
    paid(any_objects, "a", questions(10))
    for name in (".hidden", "README.md", "zz"):
        any_objects.put(name, b"text")
    store, manifest = new_dataset(any_objects, questions(10))
    assert find_reusable(store, manifest, True, workdir=tmp_path).datasets == {"a": 10}


def test_a_misspelt_name_is_refused_and_does_not_pay_all_again(local_objects: Objects) -> None:
    paid(local_objects, "glossary", questions(3))
    for known in (True, False, ["glossary"], ["terms"], []):  # of the store, or declared and not made yet
        refuse_unknown(known, {"d", "terms"}, local_objects)
    with pytest.raises(
        SourceError, match=r"^reuse\.1: expected a dataset that .* found 'glosary'\. Did you mean 'glossary'\?"
    ):
        refuse_unknown(["terms", "glosary"], {"d", "terms"}, local_objects)
