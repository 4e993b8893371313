"""Chooses an engine for the next request by predicted latency. Pure: plain bookkeeping on one thread.

What is compared is the predicted time to the first token, and how full the engine's places are: a place that is taken
now is paid for by requests to come. Where an engine's model knows too little or errs too much, or its report is stale,
it is the engine with the fewest requests. An engine that was not heard of for long is tried now and then, at most once
in `explore_seconds`, and only where its prediction is not far worse than the best: exploration is bounded in number and
in cost. Routers of several replicas agree as far as they read the same reports; each knows its own requests exactly.

The way to an engine is measured (`RoundTrips`) and added to its prediction: models learn what engines take, without
it, so a model is as good in another region. Where no model is followed, the way counts as so many requests more as are
served in its time; engines that are so passed over get one in `TEACH_EVERY` requests until enough is known of them.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpu_runner.routing.engine_view import EngineReport, EngineView, Routed
from gpu_runner.routing.latency_model import ENOUGH, HardwarePrior, LatencyModel, Prediction
from gpu_runner.routing.latency_target import ANY_LATENCY, LatencyTarget
from gpu_runner.routing.prefix_index import PrefixIndex

MOST_HARDWARE = 100  # kinds of which the last model is kept
MOST_TRIED = 2 * ENOUGH  # requests to an engine that is still to be known: one that only fails gets no more for it
TEACH_EVERY = 10
ASSUMED_SECONDS = 0.05  # to another region, until something there was measured
KEPT_TRIPS = 30  # measurements of an engine: half a minute of them
MOST_REGIONS = 100


class RoundTrips:
    """How far away engines are, as measured, by engine and by region. `region`: the service's own; empty: not named.

    What is measured of an engine is the time of a small request to it on an open connection; the least of the last
    ones is its round trip, because load only adds to it. An engine that was not measured yet counts as far away as the
    nearest one of its region; where nobody there was measured either, an engine of the service's own region (or of
    none that is named) counts as near, one of another region as `ASSUMED_SECONDS` away.
    """

    def __init__(self, region: str = "") -> None:
        self._own = region
        self._engines: dict[str, str] = {}  # the region of each engine
        self._measured: dict[str, deque[float]] = {}
        self._least: dict[str, float] = {}
        self._regions: OrderedDict[str, float] = OrderedDict()  # the last measurement in each

    def known(self, engine: str, region: str) -> None:
        """This engine is in this region; empty: not named."""
        self._engines[engine] = region

    def measured(self, engine: str, seconds: float) -> None:
        """A small request to it took so long."""
        kept = self._measured.setdefault(engine, deque(maxlen=KEPT_TRIPS))
        kept.append(seconds)
        self._least[engine] = min(kept)
        if region := self._engines.get(engine, ""):
            self._regions[region] = min(
                self._least[name] for name, where in self._engines.items() if where == region and name in self._least
            )
            self._regions.move_to_end(region)
            if len(self._regions) > MOST_REGIONS:
                self._regions.popitem(last=False)

    def seconds(self, engine: str) -> float:
        """The round trip to this engine."""
        if engine in self._least:
            return self._least[engine]
        region = self._engines.get(engine, "")
        if region in self._regions:
            return self._regions[region]
        return ASSUMED_SECONDS if region and self._own and region != self._own else 0.0

    def regions(self) -> dict[str, float]:
        """The round trip to each region in which an engine was measured. May be called in any thread."""
        return dict(self._regions)

    def forget(self, engine: str) -> None:
        """Forget an engine that is gone. What is known of its region stays."""
        self._engines.pop(engine, None)
        self._measured.pop(engine, None)
        self._least.pop(engine, None)


class Rule(enum.Enum):
    """What an engine is chosen by."""

    PREDICTED = "predicted"
    LEAST_REQUESTS = "least_requests"


class Reason(enum.Enum):
    """Why an engine was chosen."""

    PREDICTED = "predicted"
    FEWEST_REQUESTS = "fewest_requests"
    EXPLORED = "explored"


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """Seconds and factors. `explore_factor`: how much worse an engine's prediction may be that is tried for news.

    `block_tokens`: tokens of one block of the prefix index. `shed`: whether a request is refused that no engine is
    predicted to answer within its caller's target; otherwise it goes to the best one. `fullness_weight`: what an engine
    with all places taken costs beside one with none, in mean times to the first token. `region`: where the router is;
    empty: not named.
    """

    rule: Rule = Rule.PREDICTED
    explore_seconds: float = 10.0
    explore_factor: float = 3.0
    block_tokens: float = 256.0
    shed: bool = True
    fullness_weight: float = 4.0
    prior: HardwarePrior = field(default_factory=HardwarePrior)
    region: str = ""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What is known of a request before it is sent. `prompt`, `output`: tokens; `blocks`: keys of its beginning.

    `whole`: its answer comes as a whole, so what its caller waits for is all of it.
    """

    prompt: float
    output: float
    blocks: tuple[int, ...] = ()
    target: LatencyTarget = ANY_LATENCY
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """`headroom`: of the target that is nearest, in seconds of the first token or of each token; None without a target,
    and where nothing can be predicted.
    """

    engine: str
    reason: Reason
    prediction: Prediction
    headroom: float | None
    order: tuple[str, ...]  # all engines, the best one first: where to go when this one cannot be reached


@dataclass(frozen=True, slots=True)
class TargetUnmet:
    """No engine is predicted to answer within the target. `headroom`: of the nearest one, negative."""

    headroom: float


class Router:
    """Engines are named by strings; `known` names those of the moment at each choice."""

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self._policy = policy or RoutingPolicy()
        self._views: dict[str, EngineView] = {}
        self._models: dict[str, LatencyModel] = {}
        self._prefixes: dict[str, PrefixIndex] = {}
        self._of_hardware: OrderedDict[str, LatencyModel] = OrderedDict()  # of engines that are gone
        self._explored_at = float("-inf")
        self._passed_over = 0  # choices by requests in which an engine that is to be known was too far away
        self.round_trips = RoundTrips(self._policy.region)

    def choose(self, known: Sequence[str], request: RoutedRequest, now: float) -> Choice | TargetUnmet:
        """The engine for a request; TargetUnmet where none can meet its caller's target and the policy is to shed.

        `known` is not empty.
        """
        found = {name: self._predict(name, request, now) for name in known}
        fresh = all(self._views[name].fresh(now) is not None for name in known)
        if not fresh or not all(self._models[name].trusted for name in known):
            order, reason = self._fewest(known, now, others=fresh), Reason.FEWEST_REQUESTS
            if (taught := self._teach(order)) is not None:
                order, reason = [taught, *(name for name in order if name != taught)], Reason.EXPLORED
            return Choice(order[0], reason, found[order[0]], None, tuple(order))
        reason = Reason.PREDICTED
        if self._policy.rule is Rule.LEAST_REQUESTS:
            order, reason = self._fewest(known, now, others=True), Reason.FEWEST_REQUESTS
        else:
            order = self._by_prediction(known, request, found)
        if request.target != ANY_LATENCY:
            meets = [name for name in order if _headroom(found[name], request.target) >= 0]
            if not meets and self._policy.shed:
                if now - max(self._views[name].probed_at for name in known) < self._policy.explore_seconds:
                    return TargetUnmet(max(_headroom(found[name], request.target) for name in order))
                # One is sent all the same, or nobody would learn that the engines are well again.
                self._views[order[0]].probed_at, reason = now, Reason.EXPLORED
            order = meets + [name for name in order if name not in meets]
        elif reason is Reason.PREDICTED and (tried := self._explore(order, found, now)) is not None:
            order, reason = [tried, *(name for name in order if name != tried)], Reason.EXPLORED
        best = order[0]
        headroom = None if request.target == ANY_LATENCY else _headroom(found[best], request.target)
        return Choice(best, reason, found[best], headroom, tuple(order))

    def send(self, engine: str, request: RoutedRequest, now: float) -> Routed:
        """The request goes to this engine; `first_token` and `end` follow, or `whole`."""
        view, model = self._of(engine)
        tokens = self._to_compute(engine, request)
        features = model.features(view, tokens, now)
        routed = Routed(engine, tokens, request.output, now, features, model.first_token_seconds(features))
        routed.whole, routed.way = request.whole, self.round_trips.seconds(engine)
        view.send(routed, now, model.token_seconds)
        self._prefixes[engine].sent(request.blocks)
        return routed

    def first_token(self, routed: Routed, at: float) -> None:
        """Its first token came."""
        view, model = self._of(routed.engine)
        routed.first_token_at = at
        view.first_token(routed, at)
        routed.pace_features = model.pace_features(view, at)
        model.first_token(routed.features, routed.predicted, _at_engine(routed, at))

    def end(self, routed: Routed, at: float, tokens: int | None = None) -> None:
        """Tell that a request has ended; `tokens`: of its answer, where they were counted."""
        view, model = self._of(routed.engine)
        view.end(routed, at, model.token_seconds)
        if tokens is not None and tokens > 1 and routed.first_token_at is not None:
            model.ended(routed.pace_features, at - routed.first_token_at, tokens)

    def whole(self, routed: Routed, at: float, tokens: int) -> None:
        """Its answer came as a whole, with so many tokens; 0 for what generates none. `end` follows."""
        view, model = self._of(routed.engine)
        view.first_token(routed, at)
        if not routed.pace_features:  # nobody has asked since its first token, or it came before it was expected
            routed.pace_features = model.pace_features(view, at)
        model.whole(routed.features, routed.pace_features, routed.predicted, _at_engine(routed, at), tokens)

    def report(self, engine: str, report: EngineReport, hardware: str = "") -> None:
        """What an engine says of itself."""
        view, model = self._of(engine, hardware)
        view.reported(report)
        model.reported(report)

    def fresh(self, engine: str, now: float) -> bool:
        """Whether the last report of this engine still counts. May be called in any thread."""
        view = self._views.get(engine)
        return view is not None and view.fresh(now) is not None

    def forget(self, keep: Callable[[str], bool]) -> None:
        """Engines that are gone, and hold no request of ours. What was learned of their hardware stays."""
        for name in [name for name, view in self._views.items() if not keep(name) and not view.in_flight]:
            view, model = self._views.pop(name), self._models.pop(name)
            del self._prefixes[name]
            self.round_trips.forget(name)
            before = self._of_hardware.get(view.hardware)
            if view.hardware and (before is None or model.observations >= before.observations):
                self._of_hardware[view.hardware] = model
                self._of_hardware.move_to_end(view.hardware)
                while len(self._of_hardware) > MOST_HARDWARE:
                    self._of_hardware.popitem(last=False)

    def errors(self) -> dict[str, float]:
        """The mean error of each engine's predictions, as a share of the mean time. May be called in any thread."""
        return {name: model.error for name, model in list(self._models.items())}

    def _fewest(self, known: Sequence[str], now: float, *, others: bool) -> list[str]:
        """By requests. `others`: also those that are not ours, which only fresh reports of all engines compare."""

        passed = self._passed(known)

        def requests(name: str) -> tuple[int, int]:
            view = self._views[name]
            known_well = min(view.sent, MOST_TRIED)  # else requests one at a time would teach of one engine only
            return view.in_flight + (view.others(now) if others else 0) + passed[name], known_well

        return sorted(known, key=requests)  # among equals the first one that is named

    def _passed(self, known: Sequence[str]) -> dict[str, int]:
        """Requests that are served in the time of the way to each engine, beyond the way to the nearest one."""
        ways = {name: self.round_trips.seconds(name) for name in known}
        beside = [self._models[name].mean / (1 + self._views[name].usual_in_flight) for name in known]
        of_one, nearest = sum(beside) / len(beside), min(ways.values())
        return {name: int((way - nearest) / max(of_one, 1e-4)) for name, way in ways.items()}

    def _teach(self, order: Sequence[str]) -> str | None:
        """An engine of which too little is known because it is far away, for one in some requests."""
        passed = self._passed(order)
        unknown = [
            name
            for name in order[1:]
            if passed[name] and self._models[name].observations < ENOUGH and self._views[name].sent < MOST_TRIED
        ]
        if not unknown:
            return None
        self._passed_over += 1
        return None if self._passed_over % TEACH_EVERY else min(unknown, key=lambda name: self._views[name].sent)

    def _by_prediction(
        self, known: Sequence[str], request: RoutedRequest, found: Mapping[str, Prediction]
    ) -> list[str]:
        full = self._policy.fullness_weight * sum([self._models[name].mean for name in known]) / len(known)

        def cost(name: str) -> float:
            fullness = self._views[name].in_flight / self._models[name].places
            answer = request.output * found[name].tpot if request.whole else 0.0
            return found[name].ttft + full * fullness + answer

        return sorted(known, key=cost)

    def _of(self, engine: str, hardware: str = "") -> tuple[EngineView, LatencyModel]:
        if engine not in self._views:
            like = [self._models[name] for name, view in self._views.items() if hardware and view.hardware == hardware]
            before = self._of_hardware.get(hardware)
            best = max(like, key=lambda one: one.observations, default=before)
            self._views[engine] = EngineView(hardware)
            self._models[engine] = LatencyModel(self._policy.prior, best)
            self._prefixes[engine] = PrefixIndex()
        return self._views[engine], self._models[engine]

    def known(self, engine: str, hardware: str, region: str = "") -> None:
        """An engine of this hardware, in this region, may be chosen from now on."""
        self._of(engine, hardware)
        self.round_trips.known(engine, region)

    def _to_compute(self, engine: str, request: RoutedRequest) -> float:
        cached = self._prefixes[engine].match(request.blocks) * self._policy.block_tokens if request.blocks else 0.0
        return max(1.0, request.prompt - cached)

    def _predict(self, engine: str, request: RoutedRequest, now: float) -> Prediction:
        view, model = self._of(engine)
        for routed in view.unseen(now):
            routed.pace_features = model.pace_features(view, now)
        features = model.features(view, self._to_compute(engine, request), now)
        return model.predict(features, model.pace_features(view, now), self.round_trips.seconds(engine))

    def _explore(self, order: Sequence[str], found: Mapping[str, Prediction], now: float) -> str | None:
        if now - self._explored_at < self._policy.explore_seconds:
            return None
        most, least = self._policy.explore_factor * found[order[0]].ttft, self._policy.explore_seconds
        silent = [
            name for name in order[1:] if found[name].ttft <= most and now - self._views[name].observed_at >= least
        ]
        if not silent:
            return None
        self._explored_at = now
        return min(silent, key=lambda name: self._views[name].observed_at)


def _at_engine(routed: Routed, at: float) -> float:
    """Seconds of a request that passed at its engine."""
    return max(1e-4, at - routed.sent_at - routed.way)


def _headroom(prediction: Prediction, target: LatencyTarget) -> float:
    rooms = [
        *([] if target.ttft is None else [target.ttft - prediction.ttft_high]),
        *([] if target.tpot is None else [target.tpot - prediction.tpot_high]),
    ]
    return min(rooms, default=float("inf"))
