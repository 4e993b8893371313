"""Offers and instances as the planner sees them: real seconds, money per real hour, risks, corrected speeds."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
from support.fleet_databases import OFFER, ready

from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.offers.offer import Offer, RankedOffer, Ranking
from gpu_runner.offers.selection import FailureKind, OfferFailure
from gpu_runner.offers.speed import Basis, Speed
from gpu_runner.planner.speed_model import HardwareType, SpeedEstimate
from resources.fleet.planner_options import SPREAD, beliefs, held, options

SPOT = Offer("north", "eu", "spot", "H100", 1, 80, True, 1.5, 240.0, 0.9, 0.0, "test", capacity=4)
SURE = Offer("east", "eu", "sure", "L40S", 1, 48, False, 0.8, 120.0, 0.99, 0.0, "test")


def ranking(*offers: tuple[Offer, float, Basis]) -> Ranking:
    ranked = tuple(RankedOffer(offer, Speed(speed, basis), 1.0, 1.0) for offer, speed, basis in offers)
    return Ranking("cheapest", ranked, ())


def test_all_is_in_real_seconds_and_real_money() -> None:
    found = ranking((SPOT, 1000.0, "estimate"), (SURE, 400.0, "estimate"))
    (spot, sure) = options(found, {"north": 60.0}, (), beliefs(found, found), {})
    assert (spot.usd_per_hour, spot.tokens_per_second, spot.boot_seconds) == (90.0, 60_000.0, 4.0)
    assert (spot.spot, spot.capacity, spot.spread) == (True, 4, SPREAD["estimate"])
    assert spot.interruptions_per_hour == pytest.approx(-math.log(0.9) * 60)
    assert (sure.usd_per_hour, sure.boot_seconds, sure.interruptions_per_hour) == (0.8, 120.0, 0.0)


def test_what_failed_a_moment_ago_has_no_capacity_now_and_what_was_lost_is_lost_more_often() -> None:
    found = ranking((SPOT, 1000.0, "measured"))
    believed = beliefs(found, found)
    (paused,) = options(
        found, {}, [OfferFailure("north", SPOT.name, 1.0, FailureKind.NO_CAPACITY, "no capacity")], believed, {}
    )
    assert paused.capacity == 0
    last = [OfferFailure("north", SPOT.name, 300.0, FailureKind.LOST, "lost")]
    assert options(found, {}, last, believed, {})[0].capacity == 0  # the only one that stood was taken
    (lost,) = options(found, {}, last, believed, {SPOT.name: 2})
    assert lost.capacity == 4
    assert lost.interruptions_per_hour == pytest.approx(-math.log(0.9) + 0.5)
    (long_ago,) = options(found, {}, [OfferFailure("north", SPOT.name, 7200.0, FailureKind.LOST, "lost")], believed, {})
    assert long_ago.interruptions_per_hour == pytest.approx(-math.log(0.9))


def test_a_measured_speed_corrects_those_that_were_only_estimated() -> None:
    estimates = ranking((SPOT, 1000.0, "estimate"), (SURE, 400.0, "estimate"))
    known = ranking((SPOT, 500.0, "measured"), (SURE, 400.0, "estimate"))
    believed = beliefs(known, estimates)
    assert believed[HardwareType(*SPOT.hardware)] == SpeedEstimate(500.0, SPREAD["measured"])
    other = believed[HardwareType(*SURE.hardware)]
    assert 200 < other.tokens_per_second < 400 and other.spread < SPREAD["estimate"]


def test_an_instance_that_boots_is_there_when_its_boot_is_over(tmp_path: Path) -> None:
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db:
        ready(fleet_db, "ba-1")
        lease = fleet_db.intend(
            "ba-2", OFFER, clock=60, engine_key="key", model="m", run_id="other", dataset="d", ttl=10, limit=None
        )
        assert lease is not None
        believed = {HardwareType(*OFFER.hardware): SpeedEstimate(100.0, 0.05)}
        first, second = held(fleet_db.fleet(), (), believed)
        assert held(fleet_db.fleet(), (), {}) == []
        lease = fleet_db.intend(
            "ba-3", OFFER, clock=60, engine_key="key", model="m", run_id="other", dataset="d", ttl=10, limit=None
        )
        assert lease is not None
        replaced = {one.instance: one.replaces for one in held(fleet_db.fleet(), (), believed)}
        assert replaced == {"ba-1": "", "ba-2": "", "ba-3": "ba-2"}
    assert (first.instance, first.ready_in, first.option.usd_per_hour) == ("ba-1", 0.0, 3.6 * 60)
    assert second.instance == "ba-2" and 1.0 <= second.ready_in <= OFFER.boot_seconds / 60
