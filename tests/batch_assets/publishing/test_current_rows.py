"""Rows as they are now: of committed batches, of the journal, dead letters, on a folder and on S3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.snapshots import commit, current_path, outcome, overwrite, questions, write_snapshot

from batch_assets.publishing import current_rows
from batch_assets.publishing.current_rows import (
    CurrentRow,
    RowState,
    TableCondition,
    batch_of_row,
    find_rows,
)
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest
from resources.store.row_condition import BadCondition


@pytest.fixture
def store(local_objects: Objects) -> DatasetStore:
    return DatasetStore(local_objects, "sums")


def journal(store: DatasetStore, manifest: SnapshotManifest, key: str, *, dead: Sequence[str] = ()) -> None:
    """Two of the batch's rows are finished, as a run that is under way has them."""
    (entry,) = [one for one in store.entries(manifest.snapshot) if one.key == key]
    (_, rows), *_ = store.rows(manifest, [entry])
    finished = [outcome(row, number, dead=row.row_id in dead) for number, row in enumerate(rows[:2])]
    store.journal.append((key, key), "", "run-2", 1, {key: finished}, "chat")


def shown(store: DatasetStore, manifest: SnapshotManifest, where: str = "state <> 'waiting'") -> list[CurrentRow]:
    condition = TableCondition(where, manifest)
    return list(find_rows(store, manifest, store.entries(manifest.snapshot), condition.passes, 1000).rows)


def test_committed_unfinished_and_dead_rows_have_prompt_and_output(any_objects: Objects) -> None:
    store = DatasetStore(any_objects, "sums")
    manifest = write_snapshot(store, questions(30))
    commit(store, manifest, keys=["00000"], dead=["id-000003"])
    journal(store, manifest, "00001", dead=["id-000011"])
    rows = shown(store, manifest)
    assert [row.row_id for row in rows] == [f"id-{i:06d}" for i in range(12)]
    states = {row.row_id: row.state for row in rows}
    assert states["id-000002"] is RowState.COMMITTED and states["id-000003"] is RowState.DEAD
    assert states["id-000010"] is RowState.FINISHED and states["id-000011"] is RowState.FAILED
    tenth = rows[10]
    assert tenth.prompt == [{"role": "user", "content": "What is 10 plus 10?"}]
    assert tenth.outcome is not None and tenth.outcome.output == "answer 0 to id-000010"
    assert tenth.kept == {"topic": "topic 1", "level": 0}
    assert rows[3].outcome is not None and rows[3].outcome.error == "prompt_too_long"


def test_only_as_much_is_read_as_is_shown(store: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_snapshot(store, questions(100))
    commit(store, manifest)
    entries = store.entries(manifest.snapshot)
    assert find_rows(store, manifest, entries, lambda rows: rows, 12).looked_at == 20
    monkeypatch.setattr(current_rows, "MOST_ROWS", 30)
    found = find_rows(store, manifest, entries, lambda rows: (), 12)
    assert (found.looked_at, found.next_batch) == (30, "00003")


def test_journal_rows_of_another_question_do_not_count(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(10))
    (_, rows), *_ = store.rows(manifest, store.entries(manifest.snapshot))
    earlier = replace(outcome(rows[0]), row_key="0" * 64)
    store.journal.append(("00000", "00000"), "", "run-2", 1, {"00000": [earlier, outcome(rows[1], 1)]}, "chat")
    assert [row.row_id for row in shown(store, manifest)] == ["id-000001"]


def test_a_torn_segment_and_a_damaged_object_take_nothing_from_the_others(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(40))
    commit(store, manifest, keys=["00000", "00001"])
    overwrite(store, current_path(store, manifest, "00000"), b"PAR1 torn")
    journal(store, manifest, "00002")
    (segment,) = store.journal.segments(("00000", "00009"))
    store.objects.put(f"{segment}.torn.arrow", store.objects.get(segment)[:-20])
    found = find_rows(store, manifest, store.entries(manifest.snapshot), lambda rows: rows, 1000)
    assert {row.batch for row in found.rows} == {"00001", "00002"}
    assert len(found.damaged) == 1 and "00000" in found.damaged[0]


def test_a_row_is_found_by_its_id(any_objects: Objects) -> None:
    store = DatasetStore(any_objects, "sums")
    manifest = write_snapshot(store, questions(95))
    assert [batch_of_row(store, manifest, f"id-{i:06d}") for i in (0, 39, 94)] == ["00000", "00003", "00009"]
    assert batch_of_row(store, manifest, "id-000095") is None


def test_conditions_are_over_source_and_outcome(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(20))
    commit(store, manifest, dead=["id-000007"])
    where = "topic = 'topic 1' AND level >= 2 AND output LIKE '%id-00001%'"
    assert [row.row_id for row in shown(store, manifest, where)] == ["id-000013", "id-000019"]
    assert [row.row_id for row in shown(store, manifest, "error IS NOT NULL")] == ["id-000007"]
    assert [row.row_id for row in shown(store, manifest, "prompt LIKE '%What is 4 plus%'")] == ["id-000004"]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("topc = 'a'", "no column is called 'topc'. Columns: row_id, batch, state, prompt"),
        ("((", "expected an SQL condition, found '(('"),
        ("level + 1", "expected a condition"),
        ("CAST(output AS DOUBLE) > 1", "does not fit the columns"),
    ],
)
def test_a_wrong_condition_says_what_is_wrong(store: DatasetStore, where: str, said: str) -> None:
    manifest = write_snapshot(store, questions(10))
    commit(store, manifest)
    with pytest.raises(BadCondition, match=said.replace("(", r"\(").replace("+", r"\+")) as found:
        shown(store, manifest, where)
    assert "answer" not in str(found.value)


def test_vectors_are_shown(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(3), task="embedding")
    commit(store, manifest)
    rows = shown(store, manifest)
    assert rows[2].prompt == "What is 2 plus 2?"
    assert rows[2].outcome is not None and rows[2].outcome.output == (2.0, 1.0, 0.5)
