"""`want:` by the commands that a user types: rows are asked in rounds until enough are accepted."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
import yaml

from batch_assets.filtering.passed_table import PassedStore
from batch_assets.judging.judged_table import judged_store
from batch_assets.publishing.published_table import published_table
from batch_assets.tags import CHAIN_TAG, REFRESH_TAG
from e2e.command_line import NAME, SPEC, CommandProject
from e2e.command_line import site as new_site
from resources.store.dataset_store import DatasetStore

pytestmark = [pytest.mark.soak("dagster"), pytest.mark.timeout(600)]
WANTED, ONE_IN, SOURCE = 400, 3, 6000


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CommandProject]:
    with new_site(tmp_path) as found:
        yield found


def declare(site: CommandProject, rows: int = SOURCE, **more: Any) -> None:
    """One row in three is accepted: a column of the source says which."""
    source = site.folder / "words.parquet"
    numbers = pl.int_range(rows, eager=True)
    good = ((numbers * 7919) % 1009 % ONE_IN == 0).cast(pl.Int64)
    pl.DataFrame({"word": numbers.cast(pl.String), "tone": (numbers % 2).cast(pl.String), "good": good}).write_parquet(
        source
    )
    rule = {"good": {"where": "good = 1", "remove": True}}
    site.declare(
        {**SPEC, "source": {"path": str(source)}, "keep_columns": ["word", "tone", "good"], "filter": rule}
        | {"want": {"rows": WANTED}}
        | more
    )


def least_rows(accepted: int) -> int:
    """Rows of the source that hold so many accepted ones."""
    numbers = pl.int_range(SOURCE, eager=True)
    good = (numbers * 7919) % 1009 % ONE_IN == 0
    return int(numbers.filter(good)[accepted - 1]) + 1


def refreshes(site: CommandProject) -> list[dg.DagsterRun]:
    with site.instance() as instance:
        return list(instance.get_runs(dg.RunsFilter(tags={REFRESH_TAG: NAME})))


def passed(site: CommandProject) -> pl.DataFrame:
    table = published_table(PassedStore(site.store))
    assert table is not None
    return pl.read_parquet(table.glob(site.store.objects))


def test_rounds_go_on_until_enough_rows_are_accepted_also_after_a_kill(site: CommandProject, tmp_path: Path) -> None:
    declare(site)
    command = site.start("run", NAME, "--json")
    site.working(command)
    command.interrupt(signal.SIGKILL)
    command.process.wait(60)
    status, output = site.ask("run", NAME, "--json")
    assert status == 0, site.commands[-1].said()
    assert json.loads(output)["complete"]
    assert len(passed(site)) == WANTED
    table = published_table(site.store)
    assert table is not None
    words = pl.read_parquet(table.glob(site.store.objects))["word"].cast(pl.Int64)
    assert sorted(words) == list(range(len(words)))  # the first rows of the source, no more than were needed
    needed = least_rows(WANTED)
    assert needed <= table.rows <= 1.03 * needed + SPEC["batch_rows"]
    runs = [run for run in refreshes(site) if CHAIN_TAG in run.tags]
    assert len({run.tags[CHAIN_TAG] for run in runs}) <= 2 <= len(runs)  # one for each command
    assert site.ask("export", NAME, "--passed", "--format", "jsonl", "--to", str(tmp_path / "out"))[0] == 0


def test_rows_are_wanted_that_a_dataset_below_accepts(site: CommandProject) -> None:
    declare(site, want={"rows": 150, "accepted_by": "scores"}, filter=None)
    own = site.folder / "defs" / NAME / "defs.yaml"
    scores = {key: SPEC[key] for key in ("sampling", "model", "batch_rows", "batches_per_run")} | {
        "name": "scores",
        "source": {"dataset": NAME},
        "prompt": {"user": "Is it good? {{ output }}"},
        "keep_columns": ["word", "good"],
        "filter": {"good": {"where": "good = 1", "remove": True}},
    }
    documents = [yaml.safe_load(own.read_text()), {"type": "batch_assets.GeneratedDataset", "attributes": scores}]
    own.write_text(yaml.safe_dump_all(documents))
    status, output = site.ask("run", NAME, "--json")
    assert status == 0, site.commands[-1].said()
    assert [one["dataset"] for one in json.loads(output)["steps"]] == [NAME, "scores"]
    table = published_table(PassedStore(DatasetStore(site.store.objects, "scores")))
    assert table is not None and table.rows == 150
    made = published_table(site.store)
    least = least_rows(150)
    assert made is not None and least <= made.rows <= 1.03 * least + SPEC["batch_rows"]
    runs = refreshes(site)
    assert len(runs) >= 2 and len({run.tags[CHAIN_TAG] for run in runs}) == 1


def test_rows_are_wanted_that_a_judge_accepts(site: CommandProject) -> None:
    declare(site, want={"rows": 100, "accepted_by": "scores"}, filter=None)
    own = site.folder / "defs" / NAME / "defs.yaml"
    scores = {key: SPEC[key] for key in ("model", "batch_rows", "batches_per_run")} | {
        "name": "scores",
        "judge": {"dataset": NAME, "rubric": "True.", "votes": 2, "accept": "score >= 3 AND good = 1"},
        "sampling": {"max_tokens": 300},
        "keep_columns": ["word", "good"],
    }
    documents = [yaml.safe_load(own.read_text()), {"type": "batch_assets.GeneratedDataset", "attributes": scores}]
    own.write_text(yaml.safe_dump_all(documents))
    status, output = site.ask("run", "scores", "--upstream", "--json")
    assert status == 0, site.commands[-1].said()
    assert [one["dataset"] for one in json.loads(output)["steps"]] == [NAME, "scores"]
    objects = site.store.objects
    accepted = published_table(PassedStore(DatasetStore(objects, "scores")))
    assert accepted is not None and accepted.rows == 100
    rows = pl.read_parquet(accepted.glob(objects))
    assert rows["score"].min() >= 3 and set(rows["good"]) == {1}  # type: ignore[operator]
    judged = published_table(judged_store(DatasetStore(objects, "scores")))
    made = published_table(site.store)
    assert made is not None and judged is not None and judged.rows == made.rows
    every = pl.read_parquet(judged.glob(objects))
    least = 1 + int(every.with_row_index().filter((pl.col("score") >= 3) & (pl.col("good") == 1))["index"][99])
    assert least <= made.rows <= 1.03 * least + SPEC["batch_rows"]
