"""What is commanded for the open batches of a model: windows, budgets, reserves, replicas, and the end.

Offers are those of simulated providers in fleet.yaml; instances are rows of the fleet's database. Nothing runs.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest
import sqlalchemy as sa
import yaml
from support.api_service import CHAT
from support.capacity_fleet import fleet_yaml, instance
from support.sensor_dataset import SensorDataset

from batch_assets.api.billing.spending import Spending, SpendingRecords, write_spending
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.capacity import capacity as module
from batch_assets.api.capacity.backlog import BatchBudgets
from batch_assets.api.capacity.capacity import ModelCapacity
from batch_assets.api.database.batch_records import BatchRecord
from batch_assets.api.database.service_database import Records
from gpu_runner.cost_meter import LeaseUsage
from gpu_runner.fleet_database.connection import DATASETS, INSTANCES, LEASES
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.targets import DatasetTarget
from resources.fleet.resource import GpuFleet
from resources.objects.opening import LocalObjects

MODEL = "Qwen/Qwen3-8B"
NAME = f"api/{MODEL}"
HOUR = 3600
LINES = 100_000  # of 712 tokens, as nothing of them can be read: 200 of a prompt, half of 1,024


@dataclass
class Desk:
    """A fleet whose database is open, and a clock that stands still."""

    folder: Path
    fleet: GpuFleet
    fleet_db: FleetDatabase
    records: Records
    now: float = field(default_factory=time.time)
    steady: float = 0.0
    said: list[dg.AssetObservation] = field(default_factory=list)

    def capacity(self, reserve: int = 0, seconds: float = 30.0) -> ModelCapacity:
        return ModelCapacity(
            self.fleet, LocalObjects(self.folder / "store"), UsageLedger(self.records), SpendingRecords(self.records),
            {MODEL: reserve}, seconds,
            decided=self.said.append, clock=lambda: self.now, steady=lambda: self.steady,
        )  # fmt: skip

    def batch(self, number: int = 1, *, hours: float = 24, lines: int = LINES, **more: Any) -> BatchRecord:
        now = int(self.now)
        end = now + int(hours * HOUR)
        return BatchRecord(
            f"batch_{number}", "t", CHAT, "file-1", f"{hours}h", now + number, end, "d",
            status="in_progress", model=MODEL, total=lines, **more,
        )  # fmt: skip

    def works(self, *names: str) -> None:
        """Ready instances of measured speed that the front door holds: 2,000 tokens a second each."""
        for name in names:
            lease, rows = instance(cast(SensorDataset, self), name, dataset=NAME), 2_000_000 // 712
            self.fleet_db.renew(lease, 600, LeaseUsage(1_000, 0.0, rows, 200 * rows, 512 * rows))
        with self.fleet_db.engine.begin() as connection:  # they have existed for that long
            earlier = {name: INSTANCES.c[name] - 1_200 for name in ("created_at", "ready_at")}
            connection.execute(sa.update(INSTANCES).values(**earlier))
            connection.execute(sa.update(LEASES).values(acquired_at=LEASES.c.acquired_at - 1_200))

    @property
    def target(self) -> DatasetTarget:
        found = self.fleet_db.target(NAME)
        assert found is not None
        return found

    def standing(self) -> set[str]:
        return {one.name for one in self.fleet_db.fleet() if not one.retiring}


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    fleet_yaml(tmp_path)
    database = f"sqlite:///{tmp_path}/fleet.db"
    fleet = GpuFleet(database=database, home=str(tmp_path), config_path=str(tmp_path / "fleet.yaml"))
    with contextlib.ExitStack() as stack:
        fleet_db = stack.enter_context(contextlib.closing(FleetDatabase(database)))
        records = stack.enter_context(contextlib.closing(Records(f"sqlite:///{tmp_path}/api.db")))
        yield Desk(tmp_path, fleet, fleet_db, records)


def test_a_short_window_has_as_many_instances_as_it_needs_and_a_long_one_stays_on_one(desk: Desk) -> None:
    desk.works("a")
    whole = LINES * 712 / 2_000 / HOUR  # hours of one instance: 9.9
    batch = desk.batch(hours=10 * whole)
    assert desk.capacity().look([batch], {batch.id})[MODEL, "chat"] == 1
    assert desk.target.instances == 1
    urgent = desk.batch(hours=whole / 2.5)
    engines = desk.capacity().look([urgent], {urgent.id})[MODEL, "chat"]
    assert 3 <= engines == desk.target.instances <= 8
    target = desk.target
    assert target.deadline_in == pytest.approx(urgent.expires_at - desk.now, abs=30)
    assert target.plan is not None and target.plan.reason and target.plan.rows_left == LINES
    assert sum(count for _, count in target.offers) == engines


def test_every_new_decision_is_explained_once_in_the_catalog(desk: Desk) -> None:
    desk.works("a")
    batch, capacity = desk.batch(hours=4), desk.capacity()
    for _ in range(3):
        capacity.look([batch], {batch.id})
        desk.steady += 30
    (said,) = desk.said
    assert said.asset_key == dg.AssetKey(["api", "batches"])
    figures = {name: value.value for name, value in said.metadata.items()}
    assert (figures["model"], figures["decision"], figures["rows_left"]) == (MODEL, "capacity", LINES)
    assert figures["instances"] == desk.target.instances > 1 and figures["reason"] in (said.description or "")


def test_a_short_window_behind_a_long_one_is_seen(desk: Desk) -> None:
    desk.works("a")
    long = desk.batch(1, hours=48)
    capacity = desk.capacity()
    assert capacity.look([long], {long.id})[MODEL, "chat"] == 1
    short = desk.batch(2, hours=1, lines=30_000)  # three hours of one instance
    desk.steady += 30
    assert capacity.look([long, short], {long.id, short.id})[MODEL, "chat"] >= 3
    assert desk.target.deadline_in == pytest.approx(HOUR, abs=30)


def test_the_holder_of_the_oldest_batch_decides_and_the_other_replica_follows(desk: Desk) -> None:
    desk.works("a")
    one, two = desk.batch(1, hours=4), desk.batch(2, hours=4)
    other = desk.capacity()
    assert other.look([one, two], {two.id})[MODEL, "chat"] == 1
    assert desk.fleet_db.target(NAME) is None and not desk.said
    mine = desk.capacity().look([one, two], {one.id})[MODEL, "chat"]
    assert desk.target.instances > mine > 1, "each has the share of its own batches"
    assert other.look([one, two], {two.id})[MODEL, "chat"] == mine


def test_it_decides_again_when_its_time_has_come_and_not_before(desk: Desk) -> None:
    desk.works("a")
    batch, capacity = desk.batch(hours=4), desk.capacity()
    capacity.look([batch], {batch.id})
    before = desk.target.instances
    nearly_done = replace(batch, completed=LINES - 10)
    desk.steady += 29
    capacity.look([nearly_done], {batch.id})
    assert desk.target.instances == before > 1
    desk.steady += 1
    capacity.look([nearly_done], {batch.id})
    assert desk.target.instances == 1


def test_what_is_too_much_for_the_rest_is_given_up(desk: Desk) -> None:
    desk.works("a", "b", "c", "d")
    batch = desk.batch(hours=24, lines=2 * module.ROWS_OF_ENGINE)
    assert desk.capacity().look([batch], {batch.id})[MODEL, "chat"] < 4
    assert len(desk.standing()) == desk.target.instances < 4


def test_a_reserve_is_the_least_that_is_commanded(desk: Desk) -> None:
    desk.works("a", "b", "c")
    batch = desk.batch(hours=24, lines=20)
    assert desk.capacity(2).look([batch], {batch.id})[MODEL, "chat"] == 2
    assert desk.target.instances == 2 and len(desk.standing()) == 2
    assert desk.target.plan is not None and "reserve" in desk.target.plan.reason


def test_budgets_bound_what_is_rented_beyond_the_first_engine(desk: Desk) -> None:
    desk.works("a")
    rich, poor = ({"metadata": json.dumps({"budget_usd": usd})} for usd in ("500", "0.01"))
    batch = desk.batch(hours=4, **rich)
    assert desk.capacity().look([batch], {batch.id})[MODEL, "chat"] > 1
    batch = desk.batch(hours=4, **poor)
    assert desk.capacity().look([batch], {batch.id})[MODEL, "chat"] == 1
    assert desk.target.instances == 1 and desk.target.pause is None and desk.standing() == {"a"}
    unlimited = desk.batch(2, hours=4)
    assert desk.capacity().look([batch, unlimited], {batch.id})[MODEL, "chat"] > 1, "one batch has no budget"


def test_batches_that_cannot_send_count_for_nothing(desk: Desk) -> None:
    desk.works("a")
    paused = desk.batch(1, hours=1, metadata=json.dumps({"budget_usd": "1"}))
    with desk.records.writing() as connection:
        write_spending(connection, paused.id, Spending(10**12, True))
    over, checked = desk.batch(2, hours=-1), replace(desk.batch(3, hours=1), status="validating", total=0)
    done, cancelled = desk.batch(4, completed=LINES), replace(desk.batch(5, hours=1), status="cancelling")
    found = [paused, over, checked, done, cancelled]
    assert desk.capacity().look(found, {one.id for one in found}) == {}
    assert desk.fleet_db.target(NAME) is None


def test_without_batches_it_falls_back_to_one_or_the_reserve_and_not_before_it_is_idle_for_long(desk: Desk) -> None:
    desk.works("a", "b", "c")
    batch, capacity = desk.batch(hours=3), desk.capacity(2)
    capacity.look([batch], {batch.id})
    assert desk.target.instances >= 3
    for seconds in (0.0, module.IDLE_SECONDS - 1):
        desk.steady = seconds
        assert capacity.look([], set()) == {}
        assert desk.target.request
    desk.steady = module.IDLE_SECONDS
    capacity.look([], set())
    assert not desk.target.request and desk.target.instances == 2 and len(desk.standing()) == 2
    assert desk.target.ended is not None and desk.target.ended.reason == "no batch is open"


def test_the_end_of_the_windows_ends_what_the_model_pays_for_whoever_ordered_it(desk: Desk) -> None:
    desk.works("a", "b")
    ordered = instance(cast(SensorDataset, desk), "of-d", dataset="d")
    others = instance(cast(SensorDataset, desk), "used-by-d", dataset=NAME)
    desk.fleet_db.release(ordered)
    desk.fleet_db.release(others)
    for name, dataset in (("of-d", NAME), ("used-by-d", "d")):
        taken = desk.fleet_db.try_lease(name, "run", dataset, 600)
        assert taken is not None
        desk.fleet_db.release(taken)
    batch, capacity = desk.batch(hours=3), desk.capacity()
    capacity.look([batch], {batch.id})
    for desk.steady in (0.0, module.IDLE_SECONDS):
        capacity.look([], set())
    assert not desk.target.request
    standing = desk.standing()
    assert len(standing & {"a", "b"}) == 1 and standing - {"a", "b"} == {"used-by-d"}


def test_what_a_killed_service_left_is_ended_by_the_next(desk: Desk) -> None:
    desk.works("a", "b")
    batch = desk.batch(hours=3)
    desk.capacity().look([batch], {batch.id})
    following = desk.capacity()
    following.look([], set())
    desk.steady += module.IDLE_SECONDS
    following.look([], set())
    assert not desk.target.request and len(desk.standing()) == 1


def test_a_replica_with_an_older_look_does_not_end_what_another_has_just_planned(desk: Desk) -> None:
    desk.works("a", "b")
    batch, planning, other = desk.batch(hours=3), desk.capacity(), desk.capacity()
    planning.look([batch], {batch.id})
    other.look([], set())
    desk.steady = module.IDLE_SECONDS
    planning.look([batch], {batch.id})
    other.look([], set())
    assert desk.target.request and len(desk.standing()) == 2
    desk.steady += module.IDLE_SECONDS  # nobody plans any more
    other.look([], set())
    assert not desk.target.request and len(desk.standing()) == 1


def test_each_replica_has_an_engine_for_each_kind_of_task_that_it_holds(desk: Desk) -> None:
    desk.works("a", "b", "c")
    few = {"hours": 24, "lines": 10}
    one, two = desk.batch(1, **few, holder="here/1"), desk.batch(2, **few, holder="there/1")
    three = replace(desk.batch(3, **few, holder="there/1"), endpoint="/v1/embeddings")
    capacity = desk.capacity()
    capacity.look([one, two, three], {one.id})
    assert desk.target.instances == 3
    desk.steady += 30
    capacity.look([one, replace(two, holder="here/1")], {one.id, two.id})
    assert desk.target.instances == 1


def test_free_standing_engines_help_where_a_new_instance_would_come_too_late(desk: Desk) -> None:
    fleet = yaml.safe_load((desk.folder / "fleet.yaml").read_text())
    urls = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]
    engines = [{"name": url[-1], "kind": "endpoint", "url": url, "models": [MODEL]} for url in urls]
    (desk.folder / "fleet.yaml").write_text(yaml.safe_dump({**fleet, "engines": engines}))
    desk.works("a")
    batch = desk.batch(hours=60 / HOUR)  # boots take two minutes
    assert desk.capacity().look([batch], {batch.id})[MODEL, "chat"] == 3


def test_rent_that_was_paid_is_taken_off_the_budgets(desk: Desk) -> None:
    """Three instances have stood for twenty minutes, for 0.80 $. What is left to do costs about 4 $ at their speed."""
    desk.works("a", "b", "c")
    batch = desk.batch(hours=4, metadata=json.dumps({"budget_usd": "4.50"}), completed=LINES // 2)
    for ago, short in ((0, False), (1_200, True)):
        desk.fleet_db.begin_request(NAME, "batches since batch_1")
        with desk.fleet_db.engine.begin() as connection:
            connection.execute(sa.update(DATASETS).values(since=DATASETS.c.since - ago))
        desk.capacity().look([batch], {batch.id})
        assert desk.target.plan is not None
        assert ("the budget of 3.70 $ does not pay" in desk.target.plan.reason) == short, desk.target.plan.reason


def test_budgets_bear_their_share_of_the_rent_by_tokens() -> None:
    budgets = BatchBudgets(limit_usd=10.0, left_usd=8.0, tokens_done=1_000.0)
    assert budgets.left_beside(0.0, 0.0) == 8.0
    assert budgets.left_beside(6.0, 1_000.0) == pytest.approx(4.0)
    assert budgets.left_beside(6.0, 3_000.0) == pytest.approx(8.0), "two thirds were others'"
    assert budgets.left_beside(6.0, 0.0) == pytest.approx(4.0), "a boot before anything is done"
    assert budgets.left_beside(60.0, 1_000.0) == 0.0


def test_no_engine_is_rented_for_a_window_that_ends_before_it_would_answer(desk: Desk) -> None:
    batch = desk.batch(hours=60 / HOUR)  # boots take two minutes
    assert desk.capacity().look([batch], {batch.id})[MODEL, "chat"] == 1
    assert desk.target.instances == 1 and desk.target.plan is not None and not desk.target.plan.feasible


def test_a_fleet_that_cannot_be_read_stops_nothing(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    (desk.folder / "fleet.yaml").write_text("nonsense: 1")
    batch = desk.batch()
    assert desk.capacity().look([batch], {batch.id})[MODEL, "chat"] == 1
    assert "nothing is planned" in caplog.text


@pytest.mark.parametrize("reserve", [0, 2])
def test_a_feed_without_lines_leaves_what_is_leased_to_those_that_have_some(desk: Desk, reserve: int) -> None:
    """Those of another replica, or of another kind of task. It serves chats with the engines that these lease."""
    batch = desk.batch(hours=1_000)
    other = desk.capacity(reserve)
    assert other.look([batch], set()) == {(MODEL, "chat"): 0, (MODEL, "completion"): 0}
    engines = desk.capacity(reserve).look([batch], {batch.id})
    assert engines == {(MODEL, "chat"): max(1, reserve), (MODEL, "completion"): 0}
    assert other.look([], set()) == {}


def test_what_cannot_be_planned_is_tried_again_in_its_turn_and_not_at_every_look(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    good = (desk.folder / "fleet.yaml").read_text()
    (desk.folder / "fleet.yaml").write_text("nonsense: 1")
    batch, capacity = desk.batch(), desk.capacity()
    for _ in range(3):
        capacity.look([batch], {batch.id})
    assert caplog.text.count("nothing is planned") == 1
    (desk.folder / "fleet.yaml").write_text(good)
    desk.steady += 30
    capacity.look([batch], {batch.id})
    assert desk.target.plan is not None


def test_a_model_that_cannot_be_planned_keeps_no_other_from_its_engines(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk.works("a")
    build_input = module.build_input

    def built(around: Any, spec: Any, *arguments: Any, **named: Any) -> Any:
        if spec.model == "strange":
            raise ZeroDivisionError
        return build_input(around, spec, *arguments, **named)

    monkeypatch.setattr(module, "build_input", built)
    first = replace(desk.batch(1, hours=1), model="strange")
    batch, capacity = desk.batch(2, hours=4), desk.capacity()
    for _ in range(2):
        engines = capacity.look([first, batch], {first.id, batch.id})
        assert engines["strange", "chat"] == 1 < engines[MODEL, "chat"]
    assert caplog.text.count("model strange") == 1


@pytest.mark.parametrize(("lines", "window", "least"), [(10_000, 480, 6), (6_000, 420, 8)])
def test_a_window_too_short_to_wait_for_measured_speeds_has_its_fleet_at_once(
    desk: Desk, lines: int, window: int, least: int
) -> None:
    """At a look every four seconds. A boot takes two minutes, and a full engine answers its first after one or two."""
    batch = desk.batch(hours=window / HOUR, lines=lines)
    engines = desk.capacity(seconds=4.0).look([batch], {batch.id})[MODEL, "chat"]
    assert engines == desk.target.instances >= least


def test_slow_engines_are_counted_on_where_no_speed_can_be_measured_in_time(desk: Desk) -> None:
    short, long = desk.batch(1, hours=420 / HOUR, lines=6_000), desk.batch(2, hours=12, lines=6_000)
    desk.capacity(seconds=4.0).look([short], {short.id})
    assert desk.target.plan is not None and module.NOT_MEASURED_IN_TIME in desk.target.plan.reason
    desk.capacity(seconds=4.0).look([long], {long.id})
    assert desk.target.plan is not None and module.NOT_MEASURED_IN_TIME not in desk.target.plan.reason
    desk.works("a")  # the speed is known, and the window is lost
    lost = desk.batch(3, hours=200 / HOUR)
    desk.capacity().look([lost], {lost.id})
    assert desk.target.plan is not None and module.NOT_MEASURED_IN_TIME not in desk.target.plan.reason
