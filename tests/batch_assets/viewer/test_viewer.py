"""The answers of `batch-assets view`: rows, histograms, one row, two versions, a selection, from a folder and from S3.

What a user wrote is never SQL, and everything has an end.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.snapshots import SourceRow, commit, questions, write_snapshot
from support.viewer_page import ViewerPage

from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.viewer import app
from batch_assets.viewer.app import Viewer, bounded_row
from batch_assets.viewer.row_query import Bins, Kind, RowQuery, pattern
from batch_assets.viewer.server import guarded
from batch_assets.viewer.table_reader import Stop, TooSlow
from batch_assets.viewer.tables import Tables
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import DatasetStore

ROWS = 40
EVIL = """<img src=x onerror=alert(1)>'); DROP TABLE rows; --"""


def published(objects: Objects, workdir: Path, rows: list[SourceRow], now: float = 0.0) -> str:
    """Publish a table with a dead letter; returns its version."""
    store = DatasetStore(objects, "sums")
    manifest = write_snapshot(store, rows)
    commit(store, manifest, dead=["id-000003"])
    return publish(store, manifest, card=Card(), now=now, workdir=workdir, part_rows=15).version


@pytest.fixture
def page(any_objects: Objects, tmp_path: Path) -> Iterator[ViewerPage]:
    published(any_objects, tmp_path, questions(ROWS))
    tables = Tables(any_objects.root, ["sums", "never_made"], tmp_path)
    yield ViewerPage(tables, tmp_path)
    tables.close()


@pytest.fixture
def local(local_objects: Objects, tmp_path: Path) -> Iterator[ViewerPage]:
    rows = [*questions(ROWS), SourceRow("evil", EVIL, {"topic": EVIL, "level": 0})]
    published(local_objects, tmp_path, rows)
    tables = Tables(local_objects.root, ["sums"], tmp_path)
    yield ViewerPage(tables, tmp_path)
    tables.close()


@pytest.mark.slow
def test_pages_sorts_filters_and_searches_find_the_lines_of_the_table(page: ViewerPage) -> None:
    all_ids = [f"id-{i:06d}" for i in range(ROWS)]
    assert page.ask("tables").json() == {"datasets": [{"name": "sums", "table": True, "parts": []}]}
    about = page("table")
    assert (about["rows"], len(about["versions"])) == (ROWS, 1)
    assert page.ids() == all_ids
    assert page.ids(first=18, rows=4) == all_ids[18:22]  # over the border of two files
    assert page.ids(sort="row_id", descending=True, first=1, rows=3) == all_ids[-2:-5:-1]
    assert page.ids(search="WHAT IS 17 plus") == [all_ids[17]]
    assert page.ids(search="answer 17 to") == [all_ids[17]]
    dead = {"conditions": [{"column": "error", "filled": True}]}
    assert page.ids(**dead) == [all_ids[3]]
    level = {"column": "level", "low": 1, "high": 3}
    some = [row_id for number, row_id in enumerate(all_ids) if number % 5 in (1, 2)]
    assert page.ids(conditions=[level]) == some
    topic = {"column": "topic", "values": ["topic 1", "topic 2"]}
    both = [row_id for number, row_id in enumerate(all_ids) if number % 5 in (1, 2) and number % 3]
    assert page.ids(conditions=[level, topic], sort="row_id", descending=True) == both[::-1]
    assert page.ids(search="plus", conditions=[level, topic]) == both


@pytest.mark.slow
def test_histograms_count_what_is_found_whatever_is_chosen_in_themselves(page: ViewerPage) -> None:
    assert set(page("table")["pictured"]) >= {"topic", "level", "finish_reason", "error", "completion_tokens"}
    assert page.bars("topic") == {"topic 0": 14, "topic 1": 13, "topic 2": 13}
    assert page.bars("level") == dict.fromkeys(map(float, range(5)), 8)
    assert page.bars("error") == {None: 39, "prompt_too_long": 1}
    chosen = {"column": "topic", "values": ["topic 1"]}
    assert page.bars("topic", conditions=[chosen]) == {"topic 0": 14, "topic 1": 13, "topic 2": 13}
    assert sum(page.bars("level", conditions=[chosen]).values()) == 13
    assert page.bars("topic", search="is 17 plus") == {"topic 2": 1}
    assert page("histogram", column="output")["histogram"] is None


@pytest.mark.slow
def test_a_row_is_shown_whole_with_the_other_answers_to_its_prompt(page: ViewerPage) -> None:
    row = page("row", line=3)["row"]
    assert (row["row_id"], row["output"], row["error"]) == ("id-000003", None, "prompt_too_long")
    assert row["error_message"].startswith("the prompt has 9000 tokens")
    assert row["prompt"][-1] == {"role": "user", "content": "What is 3 plus 3?"}
    assert [one["line"] for one in page("samples", line=3)["samples"]] == [3]
    assert page.ask("row", table=page.table, line=ROWS).status_code == 400


def test_answers_to_the_same_prompt_stand_side_by_side(local_objects: Objects, tmp_path: Path) -> None:
    rows = [SourceRow(f"id-{i}", f"What is {i // 3}?", {"sample_index": i % 3}) for i in range(9)]
    published(local_objects, tmp_path, rows)
    found = ViewerPage(Tables(local_objects.root, [], tmp_path), tmp_path)("samples", line=4)["samples"]
    assert [(one["line"], one["sample_index"]) for one in found] == [(3, 0), (4, 1), (5, 2)]


@pytest.mark.slow
def test_two_versions_differ_in_what_was_added_removed_and_changed(any_objects: Objects, tmp_path: Path) -> None:
    rows = questions(ROWS)
    older = published(any_objects, tmp_path, rows, now=1.0)
    changed = SourceRow("id-000007", "What is seven?", rows[7].keep)
    newer = published(any_objects, tmp_path, [*rows[1:7], changed, *rows[8:], *questions(1, start=90)], now=2.0)
    page = ViewerPage(Tables(any_objects.root, ["sums"], tmp_path), tmp_path)
    page.table["version"] = older
    found = page("differences", newer={"dataset": "sums", "version": newer})
    counts = {one: [row for row in found["rows"] if row["change"] == one] for one in ("added", "removed", "changed")}
    assert {change: len(listed) for change, listed in counts.items()} == {
        change: min(found["counts"][change], 50) for change in counts
    }
    assert [row["after"][0] for row in counts["added"]] == ["id-000090"]
    assert [row["before"][0] for row in counts["removed"]] == ["id-000000"]
    assert "id-000007" in [row["after"][0] for row in counts["changed"]]
    only = page("differences", newer={"dataset": "sums", "version": newer}, change="removed")
    assert [(row["change"], row["after"]) for row in only["rows"]] == [("removed", None)]


@pytest.mark.slow
def test_a_selection_is_saved_as_lines_of_the_table(page: ViewerPage, monkeypatch: pytest.MonkeyPatch) -> None:
    query = {"conditions": [{"column": "level", "values": [4]}], "sort": "row_id", "descending": True}
    answer = page.ask("export", table=page.table, query=query, form="jsonl")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["row_id"] for line in lines] == [f"id-{i:06d}" for i in range(39, 0, -5)]
    assert lines[0]["prompt"][-1]["content"] == "What is 39 plus 39?"
    assert (answer.headers["x-rows"], answer.headers["x-whole"]) == ("8", "true")
    monkeypatch.setattr(app, "MOST_EXPORT_ROWS", 10)
    answer = page.ask("export", table=page.table, form="parquet")
    saved = pq.read_table(io.BytesIO(answer.content))
    assert saved.column("row_id").to_pylist() == [f"id-{i:06d}" for i in range(10)]
    assert (answer.headers["x-rows"], answer.headers["x-whole"]) == ("10", "false")


def test_an_empty_selection_is_saved_too(local: ViewerPage) -> None:
    query = {"search": "nobody wrote this"}
    assert local.ask("export", table=local.table, query=query, form="jsonl").content == b""
    saved = pq.read_table(io.BytesIO(local.ask("export", table=local.table, query=query, form="parquet").content))
    assert (saved.num_rows, "row_id" in saved.column_names) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [EVIL, "'", '"', ".*", "(", "[", "\\", "%", "a{3", "é", "日本", "\n", "x" * 200, "$1", "?", "\\x{41}"]
)
def test_what_a_user_wrote_is_only_ever_text(local: ViewerPage, text: str) -> None:
    evil = [ROWS] if text in EVIL and text != "x" * 200 else []
    found = local("rows", query={"search": text}, columns=["row_id"])["rows"]
    assert [line for line, _ in found if line == ROWS] == evil
    assert all(text.lower() in json.dumps(local("row", line=line)).lower() for line, _ in found if line == 0)
    value = {"column": "topic", "values": [text]}
    contains = {"column": "topic", "contains": text}
    assert local.ids(conditions=[value]) == (["evil"] if text == EVIL else [])
    assert ("evil" in local.ids(conditions=[contains])) is bool(evil)
    for column in (text, f'topic" = topic OR "{text}'):
        for body in ({"query": {"sort": column}}, {"query": {"conditions": [{"column": column, "filled": True}]}}):
            answer = local.ask("rows", table=local.table, columns=["row_id"], **body)
            assert (answer.status_code, "expected a column of the table" in answer.text) == (400, True)
        assert local.ask("rows", table=local.table, columns=[column]).status_code == 400
    assert len(local.ids()) == ROWS + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("rows", {"table": {"dataset": "../sums"}}, 400),
        ("rows", {"table": {"dataset": "nobody"}}, 404),
        ("rows", {"table": {"dataset": "sums", "version": "0" * 16}}, 404),
        ("rows", {"table": {"dataset": "sums", "version": "../../x"}}, 400),
        ("rows", {"table": {"dataset": "sums"}, "rows": 100_000}, 400),
        ("rows", {"table": {"dataset": "sums"}, "first": -1}, 400),
        ("rows", {"table": {"dataset": "sums"}, "query": {"search": "x" * 201}}, 400),
        ("rows", {"table": {"dataset": "sums"}, "query": {"where": "1=1"}}, 400),
        ("rows", {"table": {"dataset": "sums"}, "query": {"conditions": [{"column": "topic", "low": 1}]}}, 400),
        ("rows", {"table": {"dataset": "sums"}, "query": {"conditions": [{"column": "level", "values": ["x"]}]}}, 400),
        ("rows", {"table": {"dataset": "sums"}, "columns": ["row_id"] * 61}, 400),
        ("export", {"table": {"dataset": "sums"}, "form": "csv"}, 400),
        ("rows", {}, 400),
    ],
)
def test_a_wrong_request_is_answered_in_words(local: ViewerPage, path: str, body: dict[str, Any], status: int) -> None:
    answer = local.ask(path, **body)
    assert (answer.status_code, bool(answer.json()["error"])) == (status, True)


def test_nothing_but_the_tables_can_be_read_by_the_database(local_objects: Objects, tmp_path: Path) -> None:
    published(local_objects, tmp_path, questions(5))
    outside = tmp_path / "secret.csv"
    outside.write_text("a\n1\n")
    tables = Tables(local_objects.root, ["sums"], tmp_path / "spill")
    with tables.database.session(Stop()) as session:
        with pytest.raises(duckdb.PermissionException):
            session.rows(f"SELECT * FROM read_csv('{outside}')")
        with pytest.raises(duckdb.Error):
            session.rows("SET enable_external_access = true")
    tables.close()


def test_a_query_that_takes_too_long_is_stopped(
    local: ViewerPage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stop = Stop()
    stop()
    store = open_objects(str(tmp_path / "store"))
    tables = Tables(store.root, ["sums"], tmp_path)
    with tables.database.session(stop) as session, pytest.raises(TooSlow):
        session.rows("SELECT count(*) FROM range(100000000000)")
    tables.close()
    monkeypatch.setattr("batch_assets.viewer.table_reader.search_sql", _forever)
    monkeypatch.setattr(app, "QUERY_SECONDS", 0.2)
    tables = Tables(store.root, ["sums"], tmp_path)
    slow = ViewerPage(tables, tmp_path)
    answer = slow.ask("rows", table=slow.table, query={"search": "x"}, columns=["row_id"])
    assert (answer.status_code, "took too long" in answer.text) == (503, True)
    monkeypatch.setattr(app, "QUERY_SECONDS", 60.0)
    assert ViewerPage(tables, tmp_path).ids() != []
    tables.close()


def _forever(text: str, columns: Any) -> Any:
    from batch_assets.viewer.row_query import Sql

    return Sql("(SELECT count(*) FROM range(100000000) a, range(100000000) b WHERE a.range + b.range = -1) > 0")


def test_a_long_value_is_cut_and_says_so() -> None:
    row = bounded_row({"a": "x" * (300 << 10), "b": 1, "c": ["y" * (400 << 10)]})
    assert row["a"].endswith(f"… ({44 << 10:,} more characters)")
    assert (row["b"], isinstance(row["c"], str)) == (1, True)
    assert (
        sum(len(str(value)) for value in bounded_row({str(i): "z" * (255 << 10) for i in range(50)}).values()) < 3 << 20
    )


@pytest.mark.parametrize(
    ("spelled", "kind"),
    [
        ("BIGINT", Kind.NUMBER),
        ("DOUBLE", Kind.NUMBER),
        ("DECIMAL(18,3)", Kind.NUMBER),
        ("TIMESTAMP WITH TIME ZONE", Kind.TIME),
        ("BOOLEAN", Kind.FLAG),
        ("VARCHAR", Kind.TEXT),
        ("VARCHAR[]", Kind.TAGS),
        ('STRUCT("role" VARCHAR, "content" VARCHAR)[]', Kind.MESSAGES),
        ("STRUCT(a VARCHAR)[]", Kind.OTHER),
        ("FLOAT[]", Kind.OTHER),
        ("BLOB", Kind.OTHER),
    ],
)
def test_columns_have_kinds(spelled: str, kind: Kind) -> None:
    assert Kind.of(spelled) is kind


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.floats(0, 1), st.booleans())
def test_bins_hold_every_value(low: float, span: float, share: float, whole: bool) -> None:
    high = low + span
    if not low < high:
        return
    bins = Bins.of(low, high, low + share * span, whole=whole)
    assert bins.width > 0 and 1 <= bins.count <= 27
    assert bins.edges(0)[0] <= low + 1e-6 * max(1.0, abs(low)) + 1e-8 * bins.width
    last = bins.edges(bins.count - 1)[1]
    assert last is None or last >= high - 1e-6 * max(1.0, abs(high)) - 1e-8 * bins.width


@pytest.mark.slow
@given(st.text(max_size=30))
def test_a_pattern_finds_its_own_text(text: str) -> None:
    with duckdb.connect() as connection:
        (found,) = connection.execute("SELECT regexp_matches(?, ?)", [text, pattern(text)]).fetchall()[0]
    assert found


def test_the_page_and_its_answers_stand_behind_the_guard(local: ViewerPage, tmp_path: Path) -> None:
    """Another host name, a page of another site, and who has no cookie get nothing; the page sets the cookie."""
    store = open_objects(str(tmp_path / "store"))
    served = guarded(Viewer(Tables(store.root, ["sums"], tmp_path), tmp_path).app(), tmp_path, 3002)

    async def asked() -> list[int]:
        transport = httpx.ASGITransport(served, client=("127.0.0.1", 1))
        found = []
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:3002") as client:
            token = (tmp_path / "webserver.token").read_text()
            body = {"table": {"dataset": "sums"}, "columns": ["row_id"]}
            found.append((await client.post("/api/rows", json=body)).status_code)
            bearer = {"authorization": f"Bearer {token}"}
            found.append((await client.post("/api/rows", json=body, headers=bearer)).status_code)
            rebound = {**bearer, "host": "attacker.example:3002"}
            found.append((await client.post("/api/rows", json=body, headers=rebound)).status_code)
            foreign = {**bearer, "origin": "http://attacker.example"}
            found.append((await client.post("/api/rows", json=body, headers=foreign)).status_code)
            text = {**bearer, "content-type": "text/plain"}
            found.append((await client.post("/api/rows", content=json.dumps(body), headers=text)).status_code)
            page = await client.get("/", headers=bearer)
            found.append(page.status_code)
            policies = page.headers.get_list("content-security-policy")
            assert any("default-src 'none'" in one and "script-src 'self'" in one for one in policies)
            assert not any("unsafe" in one for one in policies)
        return found

    assert asyncio.run(asked()) == [403, 200, 403, 403, 415, 200]


def test_columns_that_the_page_needs_for_itself_are_refused_in_words(tmp_path: Path) -> None:
    from batch_assets.table_access.opened_table import Table
    from batch_assets.viewer.row_query import QueryError
    from batch_assets.viewer.table_reader import Database, TableReader

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"__line__": [1]}), path)
    database = Database(tmp_path, [str(tmp_path)])
    table = Table("sums", "0" * 16, 1, ("__line__",), (str(path),), open_objects(str(tmp_path)))
    with pytest.raises(QueryError, match="__line__"):
        TableReader(database, table)
    assert RowQuery().is_whole
