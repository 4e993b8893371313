"""Requests and commands in the fleet's database: what a dataset wants, may lease and has spent."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import sqlalchemy as sa
from support.fleet_databases import Clock, intended, ready

from gpu_runner.fleet_database.capacity_plan import (
    Assignment,
    CapacityMemory,
    CapacityPlan,
    ControllerState,
    Pause,
    PauseKind,
    RequestSummary,
    ToldAlert,
)
from gpu_runner.fleet_database.connection import DATASETS
from gpu_runner.fleet_database.database import DatasetTarget, FleetDatabase, Lease

MOVES = (Assignment("ba-1", "cloud/b", beside=True), Assignment("ba-2"))
PLAN = CapacityPlan("grow", "2 more", 5.0, 3, True, True, 9.0, 10.0, 1.5, 2.5, 0.5, MOVES, 7, 8, ("another way",))
ENDED = RequestSummary("one", 50.0, 5.0, False, 60.0, 4.5, 0.25, 4.0, 6.0, 2, "2 more", 3)
PAUSE = Pause(PauseKind.BUDGET_REACHED, "budget of 1.00 $ reached")
NOTHING = CapacityMemory()
STATE = ControllerState((("x", 3), ("y spot", 1)), ("y spot",), (Assignment("ba-1", "y spot", beside=True),))
MEMORY = CapacityMemory(STATE, (ToldAlert("late", 1.5), ToldAlert("budget", 2.0, over=True)))
PRICE = 60 * 3.6 / 3600  # of a real second of OFFER on a provider whose clock runs 60 times faster


def test_a_dataset_without_a_row_may_lease_one_instance_and_has_no_target(fleet_db: FleetDatabase, clock: Clock):
    assert (fleet_db.instances("d"), fleet_db.target("d"), fleet_db.targets()) == (1, None, [])
    assert fleet_db.now() == clock.now
    assert not fleet_db.override("d", budget_usd=5)
    assert not fleet_db.command("d", "refresh", 3)
    assert not fleet_db.end_request("d", "refresh")


def test_a_request_begins_with_one_instance_and_its_wishes(fleet_db: FleetDatabase, clock: Clock):
    begun = fleet_db.begin_request(
        "d", "refresh", deadline_at=clock.now + 600, budget_usd=12, objective="fastest", max_instances=7
    )
    clock.forward(60)
    found = fleet_db.target("d")
    assert found is not None
    assert replace(begun, age=60, deadline_in=540) == found
    assert (found.instances, found.request, found.age, found.deadline_in) == (1, "refresh", 60, 540)
    assert (found.budget_usd, found.objective, found.max_instances) == (12, "fastest", 7)
    assert (found.offers, found.pause, found.memory, found.plan, found.updated_age) == ((), None, NOTHING, None, None)
    with pytest.raises(ValueError, match="name of a request"):
        fleet_db.begin_request("d", "")


def test_what_is_commanded_is_read_back_and_only_for_the_request_that_is_current(fleet_db: FleetDatabase, clock: Clock):
    fleet_db.begin_request("d", "refresh")
    assert fleet_db.command("d", "refresh", 4, [("a/b/h100 spot", 3), ("a/b/l4", 1)], None, MEMORY, PLAN)
    clock.forward(5)
    assert not fleet_db.command("d", "another", 9)
    found = fleet_db.target("d")
    assert found is not None
    assert (found.instances, fleet_db.instances("d")) == (4, 4)
    assert found.offers == (("a/b/h100 spot", 3), ("a/b/l4", 1))
    assert (found.memory, found.plan, found.updated_age) == (MEMORY, PLAN, 5)
    assert fleet_db.command("d", "refresh", 0, pause=PAUSE)
    found = fleet_db.target("d")
    assert found is not None
    assert (found.instances, found.offers, found.pause) == (0, (), PAUSE)


def test_the_same_request_keeps_its_beginning_command_and_overrides_and_takes_new_wishes(
    fleet_db: FleetDatabase, clock: Clock
):
    fleet_db.begin_request("d", "refresh", budget_usd=5, deadline_at=clock.now + 50)
    fleet_db.command("d", "refresh", 3, [("x", 3)], memory=MEMORY)
    fleet_db.override("d", budget_usd=9)
    clock.forward(10)
    found = fleet_db.begin_request("d", "refresh", budget_usd=6, deadline_at=clock.now + 70, max_instances=2)
    assert (found.age, found.instances, found.offers, found.memory) == (10, 3, (("x", 3),), MEMORY)
    assert (found.budget_usd, found.deadline_in, found.max_instances) == (9, 70, 2)
    fleet_db.override("d", budget_usd=None)
    assert fleet_db.target("d").budget_usd == 6


def test_a_new_request_forgets_the_command_and_what_was_overridden(fleet_db: FleetDatabase, clock: Clock):
    fleet_db.begin_request("d", "one", budget_usd=5)
    fleet_db.command("d", "one", 0, [("x", 3)], PAUSE, MEMORY, PLAN)
    assert fleet_db.override("d", budget_usd=9, deadline_at=clock.now + 3)
    clock.forward(10)
    found = fleet_db.begin_request("d", "two", budget_usd=4)
    assert (found.request, found.age, found.instances, found.offers, found.pause) == ("two", 0, 1, (), None)
    assert (found.budget_usd, found.deadline_at, found.memory, found.plan) == (4, None, NOTHING, None)
    assert found.updated_age is None


def test_an_operators_word_is_for_one_figure_at_a_time(fleet_db: FleetDatabase, clock: Clock):
    fleet_db.begin_request("d", "one", budget_usd=5, deadline_at=clock.now + 50)
    assert fleet_db.override("d", deadline_at=clock.now + 20)
    assert fleet_db.override("d", budget_usd=8)
    found = fleet_db.target("d")
    assert found is not None
    assert (found.deadline_in, found.budget_usd) == (20, 8)


def test_when_a_request_is_over_nothing_of_it_is_left(fleet_db: FleetDatabase, clock: Clock):
    fleet_db.begin_request("d", "one", budget_usd=5, deadline_at=clock.now + 50, objective="fastest", max_instances=3)
    fleet_db.command("d", "one", 0, [("x", 3)], PAUSE, MEMORY, PLAN)
    assert not fleet_db.end_request("d", "another")
    assert fleet_db.end_request("d", "one")
    found = fleet_db.target("d")
    assert found is not None
    assert (found.request, found.instances, found.budget_usd, found.deadline_at) == ("", 1, None, None)
    assert (found.pause, found.offers, found.memory, found.plan, found.objective) == (None, (), NOTHING, None, "")
    assert found.ended is None


def test_how_a_request_ended_is_kept_until_the_next_one(fleet_db: FleetDatabase):
    fleet_db.begin_request("d", "one", budget_usd=5)
    fleet_db.command("d", "one", 1, plan=PLAN)
    assert fleet_db.end_request("d", "one", ENDED)
    found = fleet_db.target("d")
    assert found is not None
    assert (found.plan, found.ended) == (None, ENDED)
    begun = fleet_db.begin_request("d", "two")
    assert (begun.plan, begun.ended) == (None, None)


def written(fleet_db: FleetDatabase, request: str, plan: str) -> DatasetTarget:
    """The row, after another version of this program wrote its plan."""
    fleet_db.begin_request("d", "one")
    with fleet_db.engine.begin() as connection:
        connection.execute(DATASETS.update().values(request=request, plan=plan))
    found = fleet_db.target("d")
    assert found is not None
    return found


def test_a_plan_of_another_version_is_read_as_far_as_it_is_known(fleet_db: FleetDatabase):
    plan = '{"reason": "1 kept", "on_time": null, "leave": ["ba-1"], "usd_p50": null, "a later key": [1]}'
    assert written(fleet_db, "one", plan).plan == CapacityPlan(reason="1 kept")
    later = '{"assignments": [{"instance": "ba-1", "successor": "cloud/b", "a later key": 1}, {"instance": "ba-2"}]}'
    moves = (Assignment("ba-1", "cloud/b"), Assignment("ba-2"))
    assert written(fleet_db, "one", later).plan == CapacityPlan(assignments=moves)


def test_a_summary_of_another_version_is_read_as_far_as_it_is_known(fleet_db: FleetDatabase):
    story = '{"request": "r", "finished_at": 7.5, "on_time": true, "paused": "", "p": 1, "clock": "c", "instances": 2}'
    assert written(fleet_db, "", story).ended == RequestSummary(
        "r", on_time=True, finished_at=7.5, instances=2, clock="c"
    )
    assert not fleet_db.override("d", budget_usd=3)


def test_a_number_that_somebody_commands_by_hand_leaves_the_request_alone(fleet_db: FleetDatabase):
    fleet_db.begin_request("d", "one", budget_usd=5)
    fleet_db.set_instances("d", 4)
    fleet_db.set_instances("e", 2)
    found = fleet_db.targets()
    assert [(one.dataset, one.instances, one.request, one.budget_usd) for one in found] == [
        ("d", 4, "one", 5),
        ("e", 2, "", None),
    ]


def test_a_bill_belongs_to_the_datasets_whose_leases_stood_on_the_instance_boot_and_idleness_too(
    fleet_db: FleetDatabase, clock: Clock
):
    lease = intended(fleet_db, dataset="d")
    assert lease
    clock.forward(3)
    fleet_db.created(lease, "i-1")
    clock.forward(4)
    fleet_db.ready(lease, "http://127.0.0.1:1", 8)
    clock.forward(5)
    fleet_db.renew(lease, 10)
    fleet_db.release(lease)
    clock.forward(6)  # idle: still d's
    taken = fleet_db.try_lease("ba-1", "other", "e", 10)
    assert taken
    clock.forward(2)
    assert fleet_db.spend("d").usd == pytest.approx(18 * PRICE)
    assert fleet_db.spend("e").usd == pytest.approx(2 * PRICE)
    assert (fleet_db.spend("d").usd_per_second, fleet_db.spend("d").reserve_usd) == (0, 0)
    assert fleet_db.spend("e").usd_per_second == pytest.approx(PRICE)
    assert fleet_db.spend("e").reserve_usd == pytest.approx((8 + 15) * PRICE)
    fleet_db.give_up(taken, "engine dead")
    assert fleet_db.spend("e").reserve_usd == pytest.approx(15 * PRICE)
    fleet_db.ended("ba-1", 0.0)
    clock.forward(50)
    assert fleet_db.spend("e").usd == pytest.approx(2 * PRICE)
    assert (fleet_db.spend("e").usd_per_second, fleet_db.spend("e").reserve_usd) == (0, 0)


def test_only_what_was_spent_since_the_request_began_counts(fleet_db: FleetDatabase, clock: Clock):
    first = ready(fleet_db, "ba-1", ttl=100)
    clock.forward(10)
    fleet_db.begin_request("d", "one")
    assert fleet_db.spend("d").usd == 0
    clock.forward(5)
    assert ready(fleet_db, "ba-2", ttl=100)
    clock.forward(2)
    fleet_db.give_up(first, "moved")
    fleet_db.ended("ba-1", 1.0)
    assert fleet_db.spend("d").usd == pytest.approx((6 + 2) * PRICE)
    clock.forward(1)
    fleet_db.begin_request("d", "two")
    clock.forward(1)
    assert fleet_db.spend("d").usd == pytest.approx(PRICE)


def test_an_order_that_nothing_came_of_costs_nothing_and_one_just_accepted_counts_from_then(
    fleet_db: FleetDatabase, clock: Clock
):
    assert intended(fleet_db, "ba-1")
    lease = intended(fleet_db, "ba-2")
    assert lease
    clock.forward(3)
    fleet_db.created(lease, "i-2", just_now=True)
    clock.forward(1)
    assert fleet_db.spend("d").usd == pytest.approx((4 + 1) * PRICE)  # the first one may exist
    clock.forward(10)
    fleet_db.end_overdue(60)
    fleet_db.ended("ba-1", None)
    assert fleet_db.spend("d").usd == pytest.approx(11 * PRICE)


def test_a_retired_instance_takes_no_new_lease_and_ends_with_its_last_one(fleet_db: FleetDatabase):
    lease = ready(fleet_db, "ba-1")
    assert fleet_db.retire("ba-1", "the fleet shrinks to 2")
    assert not fleet_db.retire("ba-1", "again")
    found = fleet_db.instance("ba-1")
    assert found is not None
    assert (found.state, found.retiring, found.reason) == ("ready", True, "the fleet shrinks to 2")
    fleet_db.drain(lease)
    assert fleet_db.try_lease("ba-1", "next", "d", 10) is None
    assert fleet_db.release(lease)
    assert fleet_db.instance("ba-1").state == "ending"
    fleet_db.release(ready(fleet_db, "ba-2"))
    assert fleet_db.retire("ba-2", "nobody needs it")
    assert fleet_db.instance("ba-2").state == "ending"
    assert not fleet_db.retire("ba-2", "again")
    assert not fleet_db.retire("unknown", "x")


def test_a_database_whose_datasets_had_only_a_number_gets_the_other_columns(url: str, clock: Clock):
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE datasets (dataset VARCHAR(128) PRIMARY KEY, instances INTEGER)")
        connection.exec_driver_sql("INSERT INTO datasets VALUES ('d', 3)")
    engine.dispose()
    with contextlib.closing(FleetDatabase(url, now=clock)) as fleet_db:
        found = fleet_db.target("d")
        assert found is not None
        assert (found.instances, found.request, found.offers, found.memory) == (3, "", (), NOTHING)
        assert fleet_db.begin_request("d", "one", budget_usd=3).budget_usd == 3
        assert ready(fleet_db) == Lease("ba-1", 1, "run", "d")


def test_what_an_older_sensor_kept_is_read_from_its_row(url: str, clock: Clock):
    old = '{"controller": {"offers": [["x", 3]], "tried": []}, "alerts": {"late": {"at": 5, "over": true}}}'
    with contextlib.closing(FleetDatabase(url, now=clock)) as fleet_db:
        fleet_db.begin_request("d", "one")
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.execute(DATASETS.update().values(memory=old, pause="budget of 1.00 $ reached"))
        engine.dispose()
        kept = CapacityMemory(ControllerState((("x", 3),)), (ToldAlert("late", 5.0, over=True),))
        found = fleet_db.target("d")
        assert found is not None and (found.memory, found.pause) == (kept, PAUSE)


def test_a_gate_pauses_the_request_until_it_is_accepted(fleet_db: FleetDatabase):
    fleet_db.begin_request("d", "refresh")
    assert fleet_db.command("d", "refresh", 4, [("a", 4)])
    assert fleet_db.trip_gate("d", "cut", "half of the rows are cut")
    assert fleet_db.trip_gate("d", "cut", "said by another run, too")
    assert fleet_db.trip_gate("d", "empty", "all are empty")
    gates = (("empty", "all are empty"), ("cut", "half of the rows are cut"))
    paused = Pause(PauseKind.QUALITY, "all are empty; half of the rows are cut", gates=gates)
    assert (found := fleet_db.target("d")) is not None and (found.instances, found.pause) == (0, paused)
    # The sensor has looked before: its command allows nothing.
    assert fleet_db.command("d", "refresh", 4, [("a", 4)])
    assert (found := fleet_db.target("d")) is not None and (found.instances, found.pause) == (0, paused)

    assert fleet_db.accept_gates("d", ["cut"])
    assert (found := fleet_db.target("d")) is not None and found.pause == replace(
        paused, text="all are empty", gates=gates[:1]
    )
    assert not fleet_db.trip_gate("d", "cut", "again")
    assert fleet_db.accept_gates("d", ["empty", "dead"])
    assert (found := fleet_db.target("d")) is not None and (found.instances, found.pause) == (1, None)
    assert not fleet_db.trip_gate("d", "dead", "no answers")
    assert fleet_db.command("d", "refresh", 4, [("a", 4)])
    assert fleet_db.instances("d") == 4


def test_what_was_accepted_is_of_one_request(fleet_db: FleetDatabase):
    assert not fleet_db.accept_gates("d", ["cut"])
    fleet_db.begin_request("d", "one", accepted_gates=["cut"])
    fleet_db.begin_request("d", "one")
    assert not fleet_db.trip_gate("d", "cut", "half of the rows are cut")
    fleet_db.begin_request("d", "two")
    assert fleet_db.trip_gate("d", "cut", "half of the rows are cut")
    fleet_db.begin_request("d", "three")
    assert (found := fleet_db.target("d")) is not None and (found.instances, found.pause) == (1, None)


def test_a_budget_that_pauses_it_gives_way_to_a_gate(fleet_db: FleetDatabase):
    fleet_db.begin_request("d", "refresh")
    assert fleet_db.command("d", "refresh", 0, (), PAUSE)
    assert fleet_db.trip_gate("d", "cut", "half of the rows are cut")
    assert (found := fleet_db.target("d")) is not None and found.pause is not None
    assert found.pause.kind is PauseKind.QUALITY
