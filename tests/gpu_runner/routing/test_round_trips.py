"""Round trips to engines and regions, and what the router makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gpu_runner.routing.engine_view import EngineReport
from gpu_runner.routing.latency_target import LatencyTarget
from gpu_runner.routing.router import (
    ASSUMED_SECONDS,
    KEPT_TRIPS,
    TEACH_EVERY,
    Choice,
    Reason,
    RoundTrips,
    RoutedRequest,
    Router,
    RoutingPolicy,
)

WAYS = {"here": 0.001, "there": 0.101}
PLACES = 16


def test_the_round_trip_is_the_least_of_the_last_measurements() -> None:
    trips = RoundTrips()
    trips.known("a", "")
    for seconds in (0.5, 0.1, 0.3):
        trips.measured("a", seconds)
    assert trips.seconds("a") == 0.1
    for _ in range(KEPT_TRIPS):
        trips.measured("a", 0.2)
    assert trips.seconds("a") == 0.2, "it has moved away"
    assert trips.regions() == {}


def test_what_was_not_measured_counts_as_its_region_then_by_its_name() -> None:
    trips = RoundTrips("here")
    for engine, region in (("near", "here"), ("far", "there"), ("unnamed", "")):
        trips.known(engine, region)
    assert [trips.seconds(name) for name in ("near", "far", "unnamed")] == [0.0, ASSUMED_SECONDS, 0.0]
    trips.measured("far", 0.2)
    trips.known("far too", "there")
    assert trips.seconds("far too") == 0.2
    trips.measured("far too", 0.1)
    assert trips.seconds("far") == 0.2 and trips.regions() == {"there": 0.1}
    trips.forget("far too")
    trips.forget("far")
    trips.known("far again", "there")
    assert trips.seconds("far again") == 0.1, "what is known of a region outlives its engines"
    nowhere = RoundTrips()
    nowhere.known("far", "there")
    assert nowhere.seconds("far") == 0.0, "a service without a region does not know what is far"


class NearAndFar:
    """A router and two engines; the way to one of them is long. Each computes a prompt in 10 ms, PLACES at a time."""

    def __init__(self, ways: Mapping[str, float] = WAYS) -> None:
        self.router, self.now, self.ways = Router(RoutingPolicy(region="here")), 0.0, ways
        for name in ways:
            self.router.known(name, "gpu m", name)
        self.report()

    def report(self) -> None:
        for name, way in self.ways.items():
            self.router.round_trips.measured(name, way)
            self.router.report(name, EngineReport(0, 0, 0.0, self.now, PLACES))

    def choose(self, target: float | None = None) -> Choice:
        request = RoutedRequest(100, 10, target=LatencyTarget(target))
        choice = self.router.choose(list(self.ways), request, self.now)
        assert isinstance(choice, Choice)
        return choice

    def serve(self, count: int) -> Counter[str]:
        went = Counter[str]()
        for _ in range(count):
            self.now += 1.0
            self.report()
            chosen = self.choose().engine
            routed = self.router.send(chosen, RoutedRequest(100, 10), self.now)
            self.router.first_token(routed, self.now + 0.01 + self.ways[chosen])
            self.router.end(routed, self.now + 0.05 + self.ways[chosen], 11)
            went[chosen] += 1
        return went


def test_the_other_region_is_taught_by_one_request_in_ten_and_gets_no_more_while_here_is_idle() -> None:
    site = NearAndFar()
    went = site.serve(30)
    assert went["there"] == 30 // TEACH_EVERY
    site.serve(TEACH_EVERY * 30)
    assert all(model.trusted for model in site.router._models.values())
    assert site.serve(100) == {"here": 100}, "not even explored: it is much farther away than it could be slower"


def test_requests_spill_over_when_the_wait_here_exceeds_the_way() -> None:
    site = NearAndFar()
    site.serve(400)
    sent: list[str] = []
    for _ in range(4 * PLACES):
        choice = site.choose()
        assert choice.reason is not Reason.FEWEST_REQUESTS
        site.router.send(choice.engine, RoutedRequest(100, 10), site.now)
        sent.append(choice.engine)
    first = sent.index("there")
    assert first >= 3, "here first"
    assert 0 < sent.count("there") < sent.count("here"), "the way is worth so much wait here, and no more"


def test_models_learn_what_engines_take_without_the_way() -> None:
    site = NearAndFar()
    site.serve(400)
    here, there = (site.router._models[name] for name in WAYS)
    assert abs(here.mean - there.mean) < 0.01, "a model is as good in another region"
    headroom = site.choose(target=1.0).headroom
    assert headroom is not None and 0.95 < headroom < 1.0
    far = site.router.choose(["there"], RoutedRequest(100, 10, target=LatencyTarget(1.0)), site.now)
    assert isinstance(far, Choice) and far.headroom is not None and 0.85 < far.headroom < 0.9, "the way counts"


def test_without_known_models_the_way_counts_as_the_requests_that_are_served_in_its_time() -> None:
    site = NearAndFar({"here": 0.0, "there": 0.1})
    sent = []
    for _ in range(20):
        choice = site.choose()
        site.router.send(choice.engine, RoutedRequest(100, 10), site.now)
        sent.append((choice.reason, choice.engine))
    first = sent.index((Reason.FEWEST_REQUESTS, "there"))
    assert 4 <= first <= 8, "of a request 20 ms are assumed"
    assert Counter(sent)[Reason.FEWEST_REQUESTS, "there"] >= 4


def test_engines_of_one_region_share_requests_evenly_whatever_their_round_trips_differ_by() -> None:
    site = NearAndFar({"a": 0.0004, "b": 0.0009})
    assert site.serve(40) == {"a": 20, "b": 20}
