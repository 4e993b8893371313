"""Requests and commands in the book: what is wanted of a dataset, what it may lease, and what it spent so far."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import sqlalchemy as sa
from fleet_books import Clock, intended, ready

from gpu_runner.fleet import FleetBook, Lease

PRICE = 60 * 3.6 / 3600  # of a real second of OFFER on a provider whose clock runs 60 times faster


def test_a_dataset_without_a_row_may_lease_one_instance_and_has_no_target(book: FleetBook, clock: Clock):
    assert (book.instances("d"), book.target("d"), book.targets()) == (1, None, [])
    assert book.now() == clock.now
    assert not book.override("d", budget_usd=5)
    assert not book.command("d", "refresh", 3)
    assert not book.end_request("d", "refresh")


def test_a_request_begins_with_one_instance_and_its_wishes(book: FleetBook, clock: Clock):
    begun = book.begin_request(
        "d", "refresh", deadline_at=clock.now + 600, budget_usd=12, objective="fastest", max_instances=7
    )
    clock.forward(60)
    found = book.target("d")
    assert found is not None
    assert replace(begun, age=60, deadline_in=540) == found
    assert (found.instances, found.request, found.age, found.deadline_in) == (1, "refresh", 60, 540)
    assert (found.budget_usd, found.objective, found.max_instances) == (12, "fastest", 7)
    assert (found.offers, found.pause, found.memory, found.plan, found.updated_age) == ((), "", {}, {}, None)
    with pytest.raises(ValueError, match="name of a request"):
        book.begin_request("d", "")


def test_what_is_commanded_is_read_back_and_only_for_the_request_that_is_current(book: FleetBook, clock: Clock):
    book.begin_request("d", "refresh")
    assert book.command("d", "refresh", 4, [("a/b/h100 spot", 3), ("a/b/l4", 1)], "", {"x": [1.5]}, {"usd": 7})
    clock.forward(5)
    assert not book.command("d", "another", 9)
    found = book.target("d")
    assert found is not None
    assert (found.instances, book.instances("d")) == (4, 4)
    assert found.offers == (("a/b/h100 spot", 3), ("a/b/l4", 1))
    assert (found.memory, found.plan, found.updated_age) == ({"x": [1.5]}, {"usd": 7}, 5)
    assert book.command("d", "refresh", 0, pause="budget of 1.00 $ reached")
    found = book.target("d")
    assert found is not None
    assert (found.instances, found.offers, found.pause) == (0, (), "budget of 1.00 $ reached")


def test_the_same_request_keeps_its_beginning_command_and_overrides_and_takes_new_wishes(book: FleetBook, clock: Clock):
    book.begin_request("d", "refresh", budget_usd=5, deadline_at=clock.now + 50)
    book.command("d", "refresh", 3, [("x", 3)], memory={"a": 1})
    book.override("d", budget_usd=9)
    clock.forward(10)
    found = book.begin_request("d", "refresh", budget_usd=6, deadline_at=clock.now + 70, max_instances=2)
    assert (found.age, found.instances, found.offers, found.memory) == (10, 3, (("x", 3),), {"a": 1})
    assert (found.budget_usd, found.deadline_in, found.max_instances) == (9, 70, 2)
    book.override("d", budget_usd=None)
    assert book.target("d").budget_usd == 6


def test_a_new_request_forgets_the_command_and_what_was_overridden(book: FleetBook, clock: Clock):
    book.begin_request("d", "one", budget_usd=5)
    book.command("d", "one", 0, [("x", 3)], "budget reached", {"a": 1}, {"b": 2})
    assert book.override("d", budget_usd=9, deadline_at=clock.now + 3)
    clock.forward(10)
    found = book.begin_request("d", "two", budget_usd=4)
    assert (found.request, found.age, found.instances, found.offers, found.pause) == ("two", 0, 1, (), "")
    assert (found.budget_usd, found.deadline_at, found.memory, found.plan) == (4, None, {}, {})
    assert found.updated_age is None


def test_an_operators_word_is_for_one_figure_at_a_time(book: FleetBook, clock: Clock):
    book.begin_request("d", "one", budget_usd=5, deadline_at=clock.now + 50)
    assert book.override("d", deadline_at=clock.now + 20)
    assert book.override("d", budget_usd=8)
    found = book.target("d")
    assert found is not None
    assert (found.deadline_in, found.budget_usd) == (20, 8)


def test_when_a_request_is_over_nothing_of_it_is_left(book: FleetBook, clock: Clock):
    book.begin_request("d", "one", budget_usd=5, deadline_at=clock.now + 50, objective="fastest", max_instances=3)
    book.command("d", "one", 0, [("x", 3)], "budget reached", {"a": 1}, {"b": 2})
    assert not book.end_request("d", "another")
    assert book.end_request("d", "one")
    found = book.target("d")
    assert found is not None
    assert (found.request, found.instances, found.budget_usd, found.deadline_at) == ("", 1, None, None)
    assert (found.pause, found.offers, found.memory, found.plan, found.objective) == ("", (), {}, {}, "")
    assert not book.override("d", budget_usd=3)


def test_a_number_that_somebody_commands_by_hand_leaves_the_request_alone(book: FleetBook):
    book.begin_request("d", "one", budget_usd=5)
    book.set_instances("d", 4)
    book.set_instances("e", 2)
    found = book.targets()
    assert [(one.dataset, one.instances, one.request, one.budget_usd) for one in found] == [
        ("d", 4, "one", 5),
        ("e", 2, "", None),
    ]


def test_a_bill_belongs_to_the_datasets_whose_leases_stood_on_the_instance_boot_and_idleness_too(
    book: FleetBook, clock: Clock
):
    lease = intended(book, dataset="d")
    assert lease
    clock.forward(3)
    book.created(lease, "i-1")
    clock.forward(4)
    book.ready(lease, "http://127.0.0.1:1", 8)
    clock.forward(5)
    book.renew(lease, 10)
    book.release(lease)
    clock.forward(6)  # idle: still d's
    taken = book.try_lease("ba-1", "other", "e", 10)
    assert taken
    clock.forward(2)
    assert book.spend("d").usd == pytest.approx(18 * PRICE)
    assert book.spend("e").usd == pytest.approx(2 * PRICE)
    assert (book.spend("d").usd_per_second, book.spend("d").reserve_usd) == (0, 0)
    assert book.spend("e").usd_per_second == pytest.approx(PRICE)
    assert book.spend("e").reserve_usd == pytest.approx((8 + 15) * PRICE)
    book.give_up(taken, "engine dead")
    assert book.spend("e").reserve_usd == pytest.approx(15 * PRICE)
    book.ended("ba-1", 0.0)
    clock.forward(50)
    assert book.spend("e").usd == pytest.approx(2 * PRICE)
    assert (book.spend("e").usd_per_second, book.spend("e").reserve_usd) == (0, 0)


def test_only_what_was_spent_since_the_request_began_counts(book: FleetBook, clock: Clock):
    first = ready(book, "ba-1", ttl=100)
    clock.forward(10)
    book.begin_request("d", "one")
    assert book.spend("d").usd == 0
    clock.forward(5)
    assert ready(book, "ba-2", ttl=100)
    clock.forward(2)
    book.give_up(first, "moved")
    book.ended("ba-1", 1.0)
    assert book.spend("d").usd == pytest.approx((6 + 2) * PRICE)
    clock.forward(1)
    book.begin_request("d", "two")
    clock.forward(1)
    assert book.spend("d").usd == pytest.approx(PRICE)


def test_an_order_that_nothing_came_of_costs_nothing_and_one_just_accepted_counts_from_then(
    book: FleetBook, clock: Clock
):
    assert intended(book, "ba-1")
    lease = intended(book, "ba-2")
    assert lease
    clock.forward(3)
    book.created(lease, "i-2", just_now=True)
    clock.forward(1)
    assert book.spend("d").usd == pytest.approx((4 + 1) * PRICE)  # the first one may exist
    clock.forward(10)
    book.end_overdue(60)
    book.ended("ba-1", None)
    assert book.spend("d").usd == pytest.approx(11 * PRICE)


def test_a_retired_instance_takes_no_new_lease_and_ends_with_its_last_one(book: FleetBook):
    lease = ready(book, "ba-1")
    assert book.retire("ba-1", "the fleet shrinks to 2")
    assert not book.retire("ba-1", "again")
    found = book.instance("ba-1")
    assert found is not None
    assert (found.state, found.retiring, found.reason) == ("ready", True, "the fleet shrinks to 2")
    book.drain(lease)
    assert book.try_lease("ba-1", "next", "d", 10) is None
    assert book.release(lease)
    assert book.instance("ba-1").state == "ending"
    book.release(ready(book, "ba-2"))
    assert book.retire("ba-2", "nobody needs it")
    assert book.instance("ba-2").state == "ending"
    assert not book.retire("ba-2", "again")
    assert not book.retire("unknown", "x")


def test_a_database_whose_datasets_had_only_a_number_gets_the_other_columns(url: str, clock: Clock):
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE datasets (dataset VARCHAR(128) PRIMARY KEY, instances INTEGER)")
        connection.exec_driver_sql("INSERT INTO datasets VALUES ('d', 3)")
    engine.dispose()
    with contextlib.closing(FleetBook(url, now=clock)) as book:
        found = book.target("d")
        assert found is not None
        assert (found.instances, found.request, found.offers, found.memory) == (3, "", (), {})
        assert book.begin_request("d", "one", budget_usd=3).budget_usd == 3
        assert ready(book) == Lease("ba-1", 1, "run", "d")
