"""Datasets on an engine that is paid by the token: what a row costs, what is billed, and where the budget stops it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dataset_project import MODEL, DatasetProject, dataset_project
from support.plain_engine import plain_engine
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.timing import PATIENCE

import resources.fleet.client
from batch_assets.orchestration.cost_report import Summary
from gpu_runner.fleet_database.accounting.charges import by_day
from gpu_runner.fleet_database.wait_reason import WaitKind

ROWS = 40


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedEngine]:
    with simulated_engine("--speed", "200", "--max-num-seqs", "4", model=MODEL) as found:
        yield found


@pytest.fixture
def site(tmp_path: Path, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetProject]:
    monkeypatch.setattr(resources.fleet.client, "BUDGET_WAITS", 1)
    (tmp_path / "fleet.yaml").write_text(
        f"engines: [{{name: api, kind: endpoint, url: '{engine.url}', max_num_seqs: 4, "
        "usd_per_million_tokens: {input: 1000, output: 4000}}]\n"
    )
    with dataset_project(tmp_path) as found:
        found.source([f"What is {i}?" for i in range(ROWS)])
        assert found.materialize("prompts").success
        yield found


def until(said: str, found: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds * PATIENCE
    while not found():  # type: ignore[operator]
        assert time.monotonic() < deadline, said
        time.sleep(0.02)


@pytest.mark.slow
def test_a_row_costs_its_tokens_and_every_figure_is_their_sum(site: DatasetProject) -> None:
    assert site.run_rows("00000", "00003", None).success
    objects = [batch for found in site.store.objects_by_batch().values() for batch in found]
    outcomes = [one for batch in objects for one in site.store.outcomes(batch)]
    assert len(outcomes) == ROWS
    for one in outcomes:
        assert one.usd == pytest.approx((1000 * one.prompt_tokens + 4000 * one.completion_tokens) / 1e6)
    (cost,) = site.fleet_db.costs()
    summary = Summary.of(by_day(site.fleet_db.charges()))
    spent = sum(one.usd or 0.0 for one in outcomes)
    assert (cost.usd.useful, summary.usd, site.fleet_db.spend("d").usd) == pytest.approx((spent,) * 3)
    assert cost.usd.wasted == 0 and cost.rows == summary.rows == ROWS


@pytest.mark.slow
def test_the_budget_stops_it_before_it_is_passed_and_it_goes_on_when_that_is_raised(site: DatasetProject) -> None:
    budget = 1.0
    site.fleet_db.begin_request("d", "r", budget_usd=budget)
    done: list[bool] = []
    run = threading.Thread(target=lambda: done.append(site.run_rows("00000", "00003", None).success))
    run.start()
    waits = [WaitKind.BUDGET]
    until("it waits for money", lambda: [b.wait.kind for b in site.fleet_db.runs() if b.wait is not None] == waits)
    spent = site.fleet_db.spend("d").usd
    assert 0 < spent <= budget
    site.fleet_db.override("d", budget_usd=1000.0)
    run.join()
    assert done == [True] and site.fleet_db.spend("d").usd > budget


@pytest.mark.slow
@pytest.mark.parametrize(("cached", "usd"), [(None, 0.017), (4, 0.0142), (99, 0.0135)])
def test_a_row_costs_less_as_far_as_its_prompt_came_from_the_cache(
    tmp_path: Path, cached: int | None, usd: float
) -> None:
    with plain_engine(MODEL) as api, dataset_project(tmp_path) as site:
        api.cached_tokens = cached
        (tmp_path / "fleet.yaml").write_text(
            f"engines: [{{name: api, kind: endpoint, url: '{api.url}', "
            "usd_per_million_tokens: {input: 1000, output: 4000, cached: 300}}]\n"
        )
        site.source(["What is it?"])
        assert site.materialize("prompts").success and site.run_rows("00000", "00000", None).success
        ((found,),) = site.store.objects_by_batch().values()
        (outcome,) = site.store.outcomes(found)
        assert (outcome.prompt_tokens, outcome.completion_tokens) == (5, 3)
        assert outcome.usd == pytest.approx(usd) and site.fleet_db.spend("d").usd == pytest.approx(usd)
