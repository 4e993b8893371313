"""Rows that are asked again although they have answers: all of a dataset, or those that meet a condition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from support.dataset_project import MODEL, DatasetProject, dataset_project
from support.plain_engine import PlainEngine, plain_engine
from typer.testing import CliRunner

from batch_assets.catalog import ledger
from batch_assets.catalog.catalog_reader import Catalog
from batch_assets.cli.dataset_commands.regenerate import regeneration_words
from batch_assets.cli.main import app
from batch_assets.cli.user_errors import CommandError
from batch_assets.orchestration.made_anew import Regeneration
from batch_assets.publishing.verify import ledger_of_reports, verify
from batch_assets.tags import ENDPOINT_TAG, REFRESH_TAG, REGENERATE_TAG
from gpu_runner.rows import Outcome

LAST = "00001"


@pytest.fixture
def engine() -> Iterator[PlainEngine]:
    with plain_engine(MODEL) as engine:
        yield engine


@pytest.fixture
def site(tmp_path: Path, engine: PlainEngine) -> Iterator[DatasetProject]:
    """20 rows in two batches, generated."""
    with dataset_project(tmp_path) as site:
        site.source([f"What is {i} plus {i}?" for i in range(20)])
        assert site.materialize("prompts").success
        assert site.run_rows("00000", LAST, engine.url).success
        assert len(engine.requests) == 20
        engine.text = "another answer"
        yield site


def ask_again(site: DatasetProject, engine: PlainEngine, what: str) -> dg.ExecuteInProcessResult:
    return site.materialize("prompts", tags={REFRESH_TAG: "d", ENDPOINT_TAG: engine.url, REGENERATE_TAG: what})


def missing(site: DatasetProject) -> list[str]:
    entries = site.store.entries(site.manifest().snapshot)
    return [entry.key for entry in ledger.missing(entries, ledger.ledger_versions(site.instance, "d"))]


def rows(site: DatasetProject) -> dict[str, Outcome]:
    current = site.store.current_objects(site.store.entries(site.manifest().snapshot))
    return {one.row_id: one for batch in current.values() for one in site.store.outcomes(batch)}


def agrees(site: DatasetProject) -> bool:
    assert site.materialize("dataset").success
    return verify(site.store, ledger_of_reports(Catalog(site.instance, "d").reports())).ok


@pytest.mark.slow
def test_all_rows_are_asked_again(site: DatasetProject, engine: PlainEngine) -> None:
    # What a killed run has left in the journal of before is no new answer.
    left = {"00000": list(site.store.outcomes(next(iter(site.store.current_objects(
        site.store.entries(site.manifest().snapshot)).values()))))}  # fmt: skip
    site.store.journal.append(("00000", LAST), "", "killed", 1, left, "chat")
    assert ask_again(site, engine, "all").success
    assert missing(site) == ["00000", LAST]
    assert site.run_rows("00000", LAST, engine.url).success
    assert len(engine.requests) == 40
    assert {one.output for one in rows(site).values()} == {"another answer"}
    assert not missing(site) and agrees(site)
    assert site.run_rows("00000", LAST, engine.url).success and len(engine.requests) == 40  # once


@pytest.mark.slow
def test_only_rows_that_meet_the_condition_are_asked_again(site: DatasetProject, engine: PlainEngine) -> None:
    before = rows(site)
    assert ask_again(site, engine, "row_id IN ('id-0003', 'id-0004') AND finish_reason = 'stop'").success
    assert missing(site) == ["00000"]
    assert site.run_rows("00000", LAST, engine.url).success
    assert len(engine.requests) == 22
    after = rows(site)
    assert sorted(row for row in after if after[row] != before[row]) == ["id-0003", "id-0004"]
    assert len(after) == 20 and agrees(site)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("finish_raeson = 'length'", "where: no column is called 'finish_raeson'. Columns: row_id, "),
        ("finish_reason = ", "where: expected an SQL condition"),
        ("completion_tokens + 1", "where: expected a condition (true or false)"),
    ],
)
def test_a_condition_that_cannot_be_used_marks_nothing(
    site: DatasetProject, engine: PlainEngine, condition: str, said: str
) -> None:
    assert not ask_again(site, engine, condition).success
    assert said in site.reason()
    assert not missing(site)


@pytest.mark.slow
def test_it_says_how_many_rows_and_what_they_cost_before_it_asks(
    site: DatasetProject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from contextlib import contextmanager

    from batch_assets.cli.dataset_commands import regenerate
    from batch_assets.request_status.dataset_status import Observer

    @contextmanager
    def observing(_: object) -> Iterator[list[Observer]]:
        yield [Observer(site.instance, site.fleet_db, site.store)]

    monkeypatch.setattr(regenerate, "observing", observing)
    monkeypatch.setattr(regenerate, "the_fleet", lambda: site.fleet)
    spec, folder = site.specs["d"]
    said = regeneration_words(spec, folder, Regeneration("row_id = 'id-0003'"), {}, None)
    assert "d: 1 of 20 rows, in 1 batch, are asked again: about 8 tokens; 1 × sim-" in said and " $ (P95 " in said
    assert "20 of 20 rows, in 2 batches" in regeneration_words(spec, folder, Regeneration(), {}, "http://h:1")
    with pytest.raises(CommandError, match="no row of a committed batch meets 'tries > 99'"):
        regeneration_words(spec, folder, Regeneration("tries > 99"), {}, None)
    with pytest.raises(CommandError, match="add --yes"):
        regenerate.confirm("20 rows", yes=False)  # no terminal here
    regenerate.confirm("20 rows", yes=True)
    assert capsys.readouterr().err == "20 rows\n20 rows\n"


def test_where_needs_regenerate() -> None:
    ended = CliRunner().invoke(app, ["run", "example", "--where", "tries > 1"])
    assert (ended.exit_code, "expected with --regenerate" in ended.stderr) == (2, True)
