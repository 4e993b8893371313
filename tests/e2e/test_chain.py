"""`batch-assets run NAME --upstream`: datasets that read each other's tables, by the command that a user types."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from batch_assets.tags import CHAIN_TAG, REFRESH_TAG
from e2e.command_line import NAME, SPEC, CommandProject
from e2e.command_line import site as new_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = [NAME, "questions", "answers"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CommandProject]:
    with new_site(tmp_path) as found:
        yield found


def declare(site: CommandProject, **questions: Any) -> None:
    """Three datasets in one file; the first is that of other tests."""
    shared = {key: SPEC[key] for key in ("sampling", "model", "batch_rows", "batches_per_run")}
    chained = [
        SPEC,
        {**shared, "name": "questions", "source": {"dataset": NAME}, "prompt": {"user": "Q {{ output }}"}} | questions,
        {**shared, "name": "answers", "source": {"asset": "questions/dataset"}, "prompt": {"user": "A {{ output }}"}},
    ]
    documents = [{"type": "batch_assets.GeneratedDataset", "attributes": one} for one in chained]
    (site.folder / "defs" / NAME / "defs.yaml").write_text(yaml.safe_dump_all(documents))


def chain_runs(site: CommandProject) -> list[str]:
    with site.instance() as instance:
        runs = instance.get_runs(dg.RunsFilter(tags={REFRESH_TAG: STEPS}))
        return [run.tags[REFRESH_TAG] for run in runs if CHAIN_TAG in run.tags]


@pytest.mark.soak("dagster")
def test_a_bad_step_stops_those_below_it_alone_and_what_is_done_is_not_asked_again(site: CommandProject):
    declare(site, prompt={"user": "Q {{ no_such_column }}"})
    command = site.start("run", "answers", "--upstream", "--json")
    status, output = command.end(300)
    found = json.loads(output)
    assert (status, found["complete"], found["not_started"]) == (1, False, ["answers"]), command.said()
    assert [(one["dataset"], one["complete"]) for one in found["steps"]] == [(NAME, True), ("questions", False)]
    assert "no_such_column" in command.said()
    assert "not started, as it needs questions: answers" in command.said()
    assert command.left() == []

    declare(site)
    command = site.start("run", "answers", "--upstream", "--json")
    status, output = command.end(300)
    found = json.loads(output)
    assert (status, found["complete"]) == (0, True), command.said()
    assert [one["dataset"] for one in found["steps"]] == STEPS
    assert [one["rows_generated"] > 0 for one in found["steps"]] == [False, True, True]


@pytest.mark.soak("dagster")
def test_a_chain_that_is_interrupted_starts_nothing_more_and_goes_on_when_it_is_asked_for_again(site: CommandProject):
    declare(site)
    command = site.start("run", "answers", "--upstream")
    site.working(command)
    command.interrupt(signal.SIGINT)
    assert command.end(120)[0] == 130, command.said()
    assert command.left() == []
    assert chain_runs(site).count("questions") == 0
    status, output = site.ask("run", "answers", "--upstream", "--json")
    assert (status, json.loads(output)["complete"]) == (0, True)
