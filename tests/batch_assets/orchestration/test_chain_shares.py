"""Deadline and budget of a chain, and what each of its steps gets of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleet_databases import ready
from support.sensor_dataset import SPEC, S, SensorDataset
from support.snapshots import questions, write_snapshot

from batch_assets.orchestration import chain_shares
from batch_assets.orchestration.active_request import begin_or_go_on
from batch_assets.orchestration.chain_shares import share, step_tags
from batch_assets.spec.deadline import parse_deadline
from batch_assets.spec.request_options import InvalidTag
from batch_assets.tags import (
    BUDGET_TAG,
    CHAIN_BUDGET_TAG,
    CHAIN_TAG,
    DEADLINE_TAG,
    REFRESH_TAG,
    STREAMING_TAG,
    UPSTREAM_TAG,
)
from resources.store.dataset_store import DatasetStore

STEPS = ["topics", "questions", "answers"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    """Three datasets, each of which reads the one before."""
    specs = [
        {**SPEC, "name": name, "source": SPEC["source"] if not at else {"asset": f"{STEPS[at - 1]}/dataset"}}
        for at, name in enumerate(STEPS)
    ]
    with contextlib.ExitStack() as stack:
        yield SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack, *specs)


def tags_of(site: SensorDataset, name: str, **tags: str) -> dict[str, str]:
    """Of a step that is run with these tags."""
    run = site.instance.get_run_by_id(site.run(S.STARTED, {REFRESH_TAG: name, UPSTREAM_TAG: "answers", **tags}))
    assert run is not None
    objects, last = site.store.objects, run.tags[UPSTREAM_TAG]
    return step_tags(
        site.instance,
        site.fleet_db,
        run,
        name,
        last,
        site.specs,
        lambda one: DatasetStore(objects, one),
    )


def handed_on(found: dict[str, str]) -> dict[str, str]:
    return {tag: value for tag, value in found.items() if tag.startswith("batch/chain")}


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=8), st.floats(0, 1e6))
def test_the_shares_of_all_steps_are_the_whole_whatever_each_of_them_spends(weights: list[float], whole: float):
    left = whole
    for at in range(len(weights)):
        mine = share(left, weights[at:])
        assert 0 <= mine <= left * (1 + 1e-9)
        left -= mine
    assert math.isclose(left, 0, abs_tol=1e-6 * max(1, whole))


def test_nothing_is_left_where_more_was_spent_than_there_was():
    assert share(-1.0, [1.0, 2.0]) == 0.0


def test_a_step_gets_of_the_budget_what_earlier_steps_have_left_by_its_expected_tokens(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    spent: dict[str, float] = {}
    monkeypatch.setattr(chain_shares, "spent_since", lambda _, names, since: sum(spent.get(one, 0) for one in names))
    write_snapshot(site.store, questions(120))
    first = tags_of(site, "topics", **{BUDGET_TAG: "9"})
    assert (first[CHAIN_BUDGET_TAG], 0 < float(first[BUDGET_TAG]) < 4) == ("9.0", True)
    spent["topics"] = 1.0
    second = tags_of(site, "questions", **handed_on(first))
    assert float(second[BUDGET_TAG]) == pytest.approx(4.0)  # of 8 for two steps of the same size
    spent["questions"] = 5.0  # of which some after the step
    last = tags_of(site, "answers", **handed_on(second))
    assert float(last[BUDGET_TAG]) == pytest.approx(3.0)
    assert handed_on(last) == handed_on(first)
    spent["questions"] = 50.0
    assert 0 < float(tags_of(site, "answers", **handed_on(second))[BUDGET_TAG]) < 0.00001


def test_what_instances_of_earlier_steps_cost_until_they_are_ended_is_not_left(site: SensorDataset):
    write_snapshot(site.store, questions(120))
    first = tags_of(site, "topics", **{BUDGET_TAG: "900"})
    before = float(tags_of(site, "answers", **handed_on(first))[BUDGET_TAG])
    ready(site.fleet_db, dataset="topics", ttl=100)  # 3.6 $ an hour, by a clock that is 60 times as fast
    after = float(tags_of(site, "answers", **handed_on(first))[BUDGET_TAG])
    assert before == pytest.approx(900) and before - after > 0.06 * (100 + 10)


def test_a_run_that_is_started_again_by_dagster_gets_its_share_of_the_same_whole(site: SensorDataset):
    write_snapshot(site.store, questions(120))
    first = tags_of(site, "topics", **{BUDGET_TAG: "9", DEADLINE_TAG: "2h"})
    again = tags_of(site, "topics", **first)
    assert (again[CHAIN_TAG], again[BUDGET_TAG]) == (first[CHAIN_TAG], first[BUDGET_TAG])


def test_each_step_is_due_before_the_next_one_and_the_last_with_the_whole(site: SensorDataset):
    write_snapshot(site.store, questions(120))
    first = tags_of(site, "topics", **{DEADLINE_TAG: "3h"})
    second, last = (tags_of(site, name, **handed_on(first)) for name in STEPS[1:])
    due = [parse_deadline(one[DEADLINE_TAG]).at(0) for one in (first, second, last)]
    assert due == sorted(due) and BUDGET_TAG not in first
    assert due[-1] == pytest.approx(site.fleet_db.now() + 3 * 3600, abs=60)


def test_deadline_and_budget_are_those_of_the_dataset_that_is_asked_for_and_each_step_keeps_its_own(
    site: SensorDataset,
):
    write_snapshot(site.store, questions(120))
    wishes: dict[str, dict[str, Any]] = {
        "answers": {"budget_usd": 6.0, "deadline": "4h"},
        "topics": {"budget_usd": 0.5},
    }
    for name, more in wishes.items():
        spec, folder = site.specs[name]
        site.specs[name] = (spec.model_copy(update=more), folder)
    first = tags_of(site, "topics")
    assert (first[CHAIN_BUDGET_TAG], float(first[BUDGET_TAG])) == ("6.0", 0.5)
    assert parse_deadline(first[DEADLINE_TAG]).at(0) < site.fleet_db.now() + 4 * 3600


def test_a_chain_without_wishes_sets_none(site: SensorDataset):
    found = tags_of(site, "topics")
    assert found[CHAIN_TAG] and {BUDGET_TAG, DEADLINE_TAG}.isdisjoint(found)


def test_a_dataset_that_is_in_no_chain_to_the_one_that_is_named_is_refused(site: SensorDataset):
    with pytest.raises(InvalidTag, match="batch/upstream: expected a dataset that reads what answers makes"):
        tags_of(site, "answers", **{UPSTREAM_TAG: "topics"})


@pytest.mark.slow
def test_steps_that_overlap_count_on_what_the_others_may_not_spend(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: dict[str, float] = {}
    monkeypatch.setattr(chain_shares, "spent_since", lambda _, names, since: sum(spent.get(one, 0) for one in names))
    write_snapshot(site.store, questions(120))

    def refresh(name: str, **tags: str) -> tuple[dict[str, str], float]:
        """A refresh, as `prompts` begins it."""
        run_id = site.run(S.STARTED, {REFRESH_TAG: name, UPSTREAM_TAG: "answers", **tags})
        run = site.instance.get_run_by_id(run_id)
        assert run is not None
        objects, last = site.store.objects, run.tags[UPSTREAM_TAG]
        found = step_tags(
            site.instance,
            site.fleet_db,
            run,
            name,
            last,
            site.specs,
            lambda one: DatasetStore(objects, one),
        )
        site.instance.add_run_tags(run_id, found)
        target = begin_or_go_on(site.instance, site.fleet_db, site.specs[name][0], run_id, {**tags, **found})
        assert target.budget_usd is not None
        return found, target.budget_usd

    streams = {STREAMING_TAG: "true"}
    first, topics = refresh("topics", **{BUDGET_TAG: "9", DEADLINE_TAG: "3h"})
    whole = handed_on(first)
    second, middle = refresh("questions", **whole, **streams)
    third, last = refresh("answers", **whole, **streams)
    assert topics + middle + last == pytest.approx(9.0, abs=1e-5)
    due = [parse_deadline(one[DEADLINE_TAG]).at(0) for one in (first, second, third)]
    assert due == sorted(due) and due[-1] <= parse_deadline(whole["batch/chain_deadline"]).at(0)
    # The middle one has spent some, in a request that is over, and reads more rows: that is not to be had again.
    spent |= {"questions": 1.0}
    ended = site.fleet_db.target("questions")
    assert ended is not None and site.fleet_db.end_request("questions", ended.request)
    _, again = refresh("questions", **whole, **streams)
    assert topics + 1.0 + again + last == pytest.approx(9.0, abs=1e-5)
    # The first one is done with less: its table is read, and the others have the rest.
    spent |= {"topics": 0.5}
    ended = site.fleet_db.target("topics")
    assert ended is not None and site.fleet_db.end_request("topics", ended.request)
    _, table = refresh("questions", **whole)
    assert 0.5 + 1.0 + table + last == pytest.approx(9.0, abs=1e-5)


def test_a_request_of_the_same_step_goes_on_with_what_was_spent_and_another_one_begins_anew(
    site: SensorDataset,
) -> None:
    spec = site.specs["questions"][0]
    tags = {REFRESH_TAG: "questions", CHAIN_TAG: "one"}
    first, second = (site.run(S.SUCCESS, tags) for _ in range(2))
    began = begin_or_go_on(site.instance, site.fleet_db, spec, first, tags)
    site.fleet_db.set_instances("questions", 3)
    found = begin_or_go_on(site.instance, site.fleet_db, spec, second, {**tags, BUDGET_TAG: "2"})
    assert (found.request, found.since, found.instances, found.budget_usd) == (second, began.since, 3, 2.0)
    other = begin_or_go_on(site.instance, site.fleet_db, spec, "other", {**tags, CHAIN_TAG: "two"})
    assert (other.request, other.instances) == ("other", 1)
    assert not site.fleet_db.continue_request("questions", second, "late")
