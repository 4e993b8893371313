"""A request is for one snapshot: what the launcher starts for it, and what it leaves to people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test
from support.dataset_project import MODEL, DatasetProject, dataset_project
from support.simulated_engine import simulated_engine

from batch_assets.tags import RANGE_END_TAG, RANGE_START_TAG, REDRIVE_TAG, REFRESH_TAG, WILL_RETRY_TAG

QUESTIONS = [f"What is {i} plus {i}?" for i in range(20)]
REFRESH, REDRIVE = {REFRESH_TAG: "d"}, {REDRIVE_TAG: "d"}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DatasetProject]:
    with dataset_project(tmp_path) as site:
        site.source(QUESTIONS)
        yield site


def launched(site: DatasetProject) -> list[tuple[str, str]]:
    requests = site.tick("launcher").run_requests or ()
    return [(found.tags[RANGE_START_TAG], found.tags[RANGE_END_TAG]) for found in requests]


@pytest.mark.slow
def test_prompts_materialized_by_hand_spend_nothing_also_after_an_earlier_refresh(site: DatasetProject):
    assert site.materialize("prompts", tags=REFRESH).success
    assert launched(site) == [("00000", "00001")]
    site.source([*QUESTIONS, "What else?"])
    assert site.materialize("prompts").success
    found = site.tick("launcher")
    assert not found.run_requests
    assert "3 batches are missing, but nobody asked for this snapshot: start d_refresh" in (found.skip_message or "")
    assert site.materialize("prompts", tags=REFRESH).success
    assert launched(site) == [("00000", "00002")]


@pytest.mark.slow
def test_prompts_materialized_by_hand_on_an_unchanged_source_do_not_stop_a_request(site: DatasetProject):
    assert site.materialize("prompts", tags=REFRESH).success
    assert site.materialize("prompts").success
    assert launched(site) == [("00000", "00001")]


@pytest.mark.slow
def test_a_redrive_is_no_standing_order_for_the_dead_letters_of_later_snapshots(site: DatasetProject):
    poison = {"kind": "too_long", "match": {"contains": "sum"}}
    with simulated_engine("--speed", "100", model=MODEL) as engine:
        engine.set_faults(poison)
        assert site.materialize("prompts").success
        assert site.run_rows("00000", "00001", engine.url).success
        assert site.materialize("dead_letters", tags=REDRIVE).success
        assert launched(site) == []
        site.source([*QUESTIONS, "The sum of 3 and 4?"])
        assert site.materialize("prompts").success
        assert site.run_rows("00000", "00002", engine.url).success
    assert site.materialize("dead_letters").success
    assert launched(site) == []
    assert site.materialize("dead_letters", tags=REDRIVE).success
    assert launched(site) == [("00002", "00002")]


@pytest.mark.slow
def test_a_publication_that_is_to_be_retried_is_awaited(site: DatasetProject):
    assert site.materialize("prompts").success
    with simulated_engine("--speed", "100", model=MODEL) as engine:
        assert site.run_rows("00000", "00001", engine.url).success
    (request,) = site.tick("publisher").run_requests or ()
    tags = {**request.tags, WILL_RETRY_TAG: "true"}
    create_run_for_test(site.instance, job_name="d_publish", status=dg.DagsterRunStatus.FAILURE, tags=tags)
    assert "is being published" in (site.tick("publisher").skip_message or "")
