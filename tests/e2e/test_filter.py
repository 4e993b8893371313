"""`filter:` by the commands that a user types: a chain reads the rows that pass, and a changed rule asks for no row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from batch_assets.filtering.passed_table import PassedStore
from batch_assets.publishing.published_table import published_table
from e2e.command_line import NAME, SPEC, CommandProject
from e2e.command_line import site as new_site
from resources.store.dataset_store import DatasetStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CommandProject]:
    with new_site(tmp_path) as found:
        yield found


def declare(site: CommandProject, where: str) -> None:
    grid = {"word": [f"word {i}" for i in range(20)], "tone": ["warm", "cold"]}
    shared = {key: SPEC[key] for key in ("sampling", "model", "batch_rows", "batches_per_run")}
    first = {**SPEC, "source": {"grid": grid}, "filter": {"cold": {"where": where, "remove": True}}}
    second = {**shared, "name": "answers", "source": {"dataset": NAME, "passed": True}}
    documents = [
        {"type": "batch_assets.GeneratedDataset", "attributes": one}
        for one in (first, {**second, "prompt": {"user": "A {{ output }} {{ tone }}"}, "keep_columns": ["tone"]})
    ]
    (site.folder / "defs" / NAME / "defs.yaml").write_text(yaml.safe_dump_all(documents))


def done(site: CommandProject, *words: str) -> Any:
    status, output = site.ask(*words)
    assert status == 0, site.commands[-1].said()
    return json.loads(output) if "--json" in words else output


@pytest.mark.soak("dagster")
def test_a_chain_reads_the_rows_that_pass_and_a_changed_rule_asks_for_no_row(site: CommandProject) -> None:
    declare(site, "tone = 'warm'")
    done(site, "run", "answers", "--upstream", "--json")
    assert site.status()["rows_passed"] == 20
    answers = DatasetStore(site.store.objects, "answers")
    table = published_table(answers)
    assert table is not None
    assert pl.read_parquet(table.glob(answers.objects))["tone"].to_list() == ["warm"] * 20
    asked = site.store.objects_by_batch()

    declare(site, "tone = 'warm' AND word <> 'word 3'")
    done(site, "run", NAME, "--json")
    found = site.status()
    assert (found["rows_passed"], found["fallen_by_rule"]) == (19, {"error": 0, "cold": 21})
    assert site.store.objects_by_batch() == asked
    passed = published_table(PassedStore(site.store))
    assert passed is not None and passed.rows == 19
    assert "19 of 40 rows pass the filter (fell out: cold 21)" in done(site, "status", NAME)

    done(site, "run", "answers", "--upstream", "--json")
    table = published_table(answers)
    assert table is not None and table.rows == 19
