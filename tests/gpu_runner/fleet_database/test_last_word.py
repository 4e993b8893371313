"""A holder whose lease was ended by others still says what it did: its rows are on the bill."""

from __future__ import annotations

from support.fleet_databases import Clock, ready

from gpu_runner.fleet_database.database import FleetDatabase, LeaseUsage

TTL = 10.0


def test_what_a_holder_did_before_its_lease_was_ended_is_on_the_bill(fleet_db: FleetDatabase, clock: Clock):
    lease = ready(fleet_db, ttl=TTL)
    clock.forward(4)
    assert fleet_db.renew(lease, TTL, LeaseUsage(3.0, 0.0, 90, 900, 900))
    clock.forward(2)
    fleet_db.ended(lease.instance, 0.0, "taken away")
    clock.forward(1)
    assert not fleet_db.release(lease, LeaseUsage(4.5, 0.5, 100, 1000, 1000), reason="engine lost", retire=True)
    (cost,) = fleet_db.costs()
    assert (cost.rows, cost.completion_tokens) == (100, 1000)
    assert (cost.seconds.useful, cost.seconds.wasted) == (4.5, 0.5)
    assert sum(one.seconds.total for one in fleet_db.charges()) == cost.seconds.total


def test_a_lease_that_another_holder_has_since_is_not_touched(fleet_db: FleetDatabase, clock: Clock):
    lease = ready(fleet_db, ttl=TTL)
    clock.forward(TTL + 1)
    second = fleet_db.try_lease(lease.instance, "another run", lease.dataset, TTL)
    assert second is not None
    fleet_db.release(lease, LeaseUsage(5.0, 0.0, 10, 10, 10))
    assert [(one.rows, one.seconds.useful) for one in fleet_db.charges() if one.rows] == [(10, 5.0)]
    assert fleet_db.renew(second, TTL)
