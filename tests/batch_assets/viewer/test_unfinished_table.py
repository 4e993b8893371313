"""What the viewer shows of a table that is being made: rows of committed batches, more at each look, within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.snapshots import commit, questions, write_snapshot
from support.viewer_page import ViewerPage

from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.viewer import unfinished_table
from batch_assets.viewer.tables import Tables
from batch_assets.viewer.unfinished_table import UNFINISHED, UnfinishedTable
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

ROWS = 100  # batches of ten


@pytest.fixture
def page(any_objects: Objects, tmp_path: Path) -> Iterator[ViewerPage]:
    tables = Tables(any_objects.root, ["sums"], tmp_path)
    page = ViewerPage(tables, tmp_path)
    page.table["part"] = UNFINISHED
    yield page
    tables.close()


def begun(objects: Objects, rows: int = ROWS) -> tuple[DatasetStore, SnapshotManifest]:
    store = DatasetStore(objects, "sums")
    return store, write_snapshot(store, questions(rows))


def ids(*batches: int) -> list[str]:
    return [f"id-{10 * batch + row:06d}" for batch in batches for row in range(10)]


@pytest.mark.slow
def test_each_look_has_the_rows_that_were_committed_since_and_lines_stay(
    page: ViewerPage, any_objects: Objects
) -> None:
    store, manifest = begun(any_objects)
    empty = page.ask("table", table=page.table)
    assert (empty.status_code, "none of its 100 rows can be shown yet" in empty.json()["error"]) == (404, True)
    commit(store, manifest, keys=["00001", "00004"], dead=["id-000012"])
    assert page.ask("tables").json()["datasets"] == [{"name": "sums", "table": False, "parts": [UNFINISHED]}]
    about = page("table")
    assert (about["rows"], about["versions"]) == (20, [])
    assert about["being_made"] == {"committed": 20, "rows": ROWS, "every": 1, "unreadable": 0}
    assert page.ids() == ids(1, 4)
    assert page.ids(search="is 17 plus") == ["id-000017"]
    assert page("row", line=2)["row"]["error"] == "prompt_too_long"
    assert page("row", line=2)["row"]["prompt"][-1]["content"] == "What is 12 plus 12?"
    commit(store, manifest, keys=["00000", "00009"])
    earlier = {**page.table, "version": about["version"]}
    assert page.ask("rows", table=earlier, columns=["row_id"]).json()["found"] == 20
    assert page("table")["being_made"]["committed"] == 40
    assert page.ids() == ids(1, 4, 0, 9)
    assert page("row", line=2)["row"]["row_id"] == "id-000012"
    answer = page.ask("export", table=page.table, query={"sort": "row_id"}, form="jsonl")
    assert len(answer.text.splitlines()) == 40


@pytest.mark.slow
def test_another_snapshot_and_a_batch_that_is_made_again_begin_anew(page: ViewerPage, any_objects: Objects) -> None:
    store, manifest = begun(any_objects)
    commit(store, manifest, keys=["00001", "00002"], dead=["id-000012"])
    first = page("table")
    commit(store, manifest, keys=["00001"], generation=1)
    again = page("table")
    assert again["version"] != first["version"]
    assert page.ids() == ids(1, 2) and page("row", line=2)["row"]["error"] is None
    _, other = begun(any_objects, 20)
    commit(store, other, keys=["00000"])
    assert page("table")["being_made"]["rows"] == 20
    old = page.ask("rows", table={**page.table, "version": first["version"]}, columns=["row_id"]).json()
    assert sorted(one for _, one in old["rows"]) == ids(0, 1)  # batch 1 is the same in both snapshots


@pytest.mark.slow
def test_a_published_table_is_not_being_made(page: ViewerPage, any_objects: Objects, tmp_path: Path) -> None:
    store, manifest = begun(any_objects, 20)
    commit(store, manifest)
    publish(store, manifest, card=Card(), now=1.0, workdir=tmp_path)
    assert page.ask("tables").json()["datasets"] == [{"name": "sums", "table": True, "parts": []}]
    _, newer = begun(any_objects, 30)
    assert page.ask("tables").json()["datasets"] == [{"name": "sums", "table": True, "parts": [UNFINISHED]}]
    assert page("table")["being_made"] == {"committed": 20, "rows": newer.rows, "every": 1, "unreadable": 0}


def test_of_very_many_rows_every_nth_batch_is_shown(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished_table, "MOST_ROWS", 40)
    store, manifest = begun(local_objects)
    commit(store, manifest)
    table, being_made = UnfinishedTable(store, tmp_path / "own").look()
    assert (table.rows, being_made.committed, being_made.every) == (40, ROWS, 3)
    assert table.arrow(["batch"]).column("batch").unique().to_pylist() == ["00000", "00003", "00006", "00009"]


def test_a_look_ends_in_time_and_the_next_one_goes_on(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished_table, "_FILE_ROWS", 10)
    monkeypatch.setattr(unfinished_table, "MOST_SECONDS", 2.5)
    store, manifest = begun(local_objects)
    commit(store, manifest)
    seconds = iter(range(1000))
    unfinished = UnfinishedTable(store, tmp_path / "own", clock=lambda: float(next(seconds)))
    assert [unfinished.look()[0].rows for _ in range(5)] == [20, 40, 60, 80, 100]
    assert unfinished.look(stopped=lambda: True)[0].rows == 100
    monkeypatch.setattr(unfinished_table, "MOST_BYTES", 0)
    assert UnfinishedTable(store, tmp_path / "other").look()[0].rows == 10


def test_a_batch_that_cannot_be_read_is_left_out_and_counted(local_objects: Objects, tmp_path: Path) -> None:
    store, manifest = begun(local_objects)
    commit(store, manifest, keys=["00000", "00001", "00002"])
    damaged = store.current_objects(store.entries(manifest.snapshot))["00001"]
    local_objects.put(store.batch_path(damaged), b"nothing")
    unfinished = UnfinishedTable(store, tmp_path / "own")
    table, being_made = unfinished.look()
    assert (table.rows, being_made.unreadable) == (20, 1)
    assert unfinished.look()[0].rows == 20
