"""Which engine of a model gets the next request, and what is learned from it: the router with its clock and its ears.

All requests to engines come by here: interactive ones, online ones, lists of texts. Lines of batches do not: they are
spread by their own windows, and the router sees them in the engines' reports.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from batch_assets.api.interactive.engine_directory import EngineDirectory, EngineTarget
from batch_assets.api.interactive.engine_reports import EnginePoller, EngineReading, LoadReader, ReadLoad
from batch_assets.api.interactive.request_body import InteractiveRequest
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.settings import REGION_WORDS, is_region
from batch_assets.api.telemetry.metrics import Gauges, Sample, ServiceMetrics
from batch_assets.settings import SettingError
from gpu_runner.routing.engine_view import EngineReport, Routed
from gpu_runner.routing.latency_target import LatencyTarget
from gpu_runner.routing.output_length import OutputLengths
from gpu_runner.routing.prefix_index import block_keys
from gpu_runner.routing.router import RoutedRequest, Router, RoutingPolicy, Rule, TargetUnmet

SHED = "shed"  # beside the words of Reason
_SECONDS = (20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3)


class RoutingFigures:
    """The figures of one process."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        name = "batch_assets_routing_"
        self._metrics = metrics
        self._choices = Counter(
            f"{name}choices_total", "Requests by why their engine was chosen.", ["reason"], registry=metrics.registry
        )
        self._regions = Counter(
            f"{name}region_choices_total",
            "Requests by the region of their engine; empty: it is not named.",
            ["region"],
            registry=metrics.registry,
        )
        self._seconds = Histogram(
            f"{name}decision_seconds", "Of one choice.", registry=metrics.registry, buckets=_SECONDS
        )

        # Labels are bounded, and looked up for each request.
        self._reason = functools.cache(self._choices.labels)
        self._region = functools.cache(self._regions.labels)

    def chosen(self, reason: str, region: str) -> None:
        """One of the words of Reason, or `shed`."""
        self._reason(reason).inc()
        if reason != SHED:
            self._region(region).inc()

    def decided(self, seconds: float) -> None:
        """A choice took so long."""
        self._seconds.observe(seconds)

    def read(self, gauges: Gauges) -> None:
        """Figures that are read when somebody looks."""
        self._metrics.add_gauges(gauges)


ROUTING, UNMET, REGION = "BATCH_ASSETS_ROUTING", "BATCH_ASSETS_ROUTING_UNMET", "BATCH_ASSETS_REGION"
LONGEST_RETRY = 60  # seconds that a caller is told to wait whose target cannot be met


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """Engines for one request, the best one first. `headroom`: seconds left of the caller's target; None: not known."""

    engines: tuple[EngineTarget, ...]
    request: RoutedRequest
    caller: str
    headroom: float | None


class SentRequest:
    """One request on an engine, from its sending to its end: what is seen of it teaches the router."""

    def __init__(self, choice: EngineChoice, engine: EngineTarget, order: EngineOrder, routed: Routed) -> None:
        self._choice, self._engine, self._order, self._routed = choice, engine, order, routed
        self._tokens: int | None = None
        self._ended_at: float | None = None

    def first_token(self) -> None:
        """The first token of a stream came."""
        if self._routed.first_token_at is None:
            self._choice.router.first_token(self._routed, self._choice.clock())

    def answered(self, tokens: int | None, *, whole: bool, paced: bool = True) -> None:
        """The answer is there, with so many tokens; None: nobody counted them. `paced`: it came as fast as it was made,
        and not as slowly as its caller read.
        """
        self._ended_at = self._choice.clock()
        if tokens is None:
            return
        if whole:
            self._choice.router.whole(self._routed, self._ended_at, tokens)
        elif paced:
            self._tokens = tokens
        if tokens:
            self._choice.lengths.ended(self._order.caller, self._engine.model, tokens)

    def close(self) -> None:
        """Tell that the request has ended, one way or the other."""
        self._choice.ended(
            self._routed, self._choice.clock() if self._ended_at is None else self._ended_at, self._tokens
        )


class EngineChoice:
    """`clock`: monotonic seconds. `read`: how engines are asked for their load; `hears`: who else is told of it. Lives
    on one event loop.
    """

    def __init__(
        self,
        directory: EngineDirectory,
        clock: Callable[[], float],
        policy: RoutingPolicy,
        figures: RoutingFigures,
        read: ReadLoad | None = None,
    ) -> None:
        self._directory, self.clock, self._figures = directory, clock, figures
        self.router, self.lengths = Router(policy), OutputLengths()
        self._reader = LoadReader()
        self.read = read or self._reader.read
        self.hears: Callable[[EngineTarget, EngineReading], None] = lambda engine, reading: None
        self.poller = EnginePoller(self.read, self._reported, served=self._served, over=self._forget, clock=clock)
        figures.read(self._samples)

    async def close(self) -> None:
        """End the readings of the engines' loads."""
        await self.poller.close()
        await self._reader.close()

    def order(
        self, engines: Sequence[EngineTarget], request: InteractiveRequest, caller: str, target: LatencyTarget
    ) -> EngineOrder:
        """The order in which these engines are to be asked. Raises ApiError 503 where none can meet the target."""
        wanted = self._routed(request, caller, target)
        resting = [engine for engine in engines if self._directory.resting(engine)]
        ready = {
            engine.url: engine for engine in reversed(engines) if engine not in resting or len(resting) == len(engines)
        }
        for engine in ready.values():
            self.poller.watch(engine)
            self.router.known(engine.url, _kind(engine), engine.region)
        began = time.perf_counter()
        choice = self.router.choose(list(reversed(ready)), wanted, self.clock())
        self._figures.decided(time.perf_counter() - began)
        if isinstance(choice, TargetUnmet):
            self._figures.chosen(SHED, "")
            raise _unmet(choice.headroom)
        self._figures.chosen(choice.reason.value, ready[choice.engine].region)
        first = [ready[name] for name in choice.order]
        rest = [engine for engine in engines if engine not in first]
        return EngineOrder((*first, *rest), wanted, caller, choice.headroom)

    def sent(self, engine: EngineTarget, order: EngineOrder) -> SentRequest:
        """The request goes to this engine now; `close` must follow."""
        return SentRequest(self, engine, order, self.router.send(engine.url, order.request, self.clock()))

    def ended(self, routed: Routed, at: float, tokens: int | None) -> None:
        """A request has ended at this time."""
        self.router.end(routed, at, tokens)
        if routed.engine not in self.poller.watched:
            self._forget()

    def _routed(self, request: InteractiveRequest, caller: str, target: LatencyTarget) -> RoutedRequest:
        size = request.size
        if not size.generates:
            return RoutedRequest(size.prompt_tokens, 0.0, target=LatencyTarget(target.ttft), whole=True)
        output = self.lengths.expected(caller, request.model, size.answer_limit)
        keys = block_keys(size.beginning, caller=caller)
        return RoutedRequest(size.prompt_tokens, output, keys, target, whole=not request.stream)

    def _reported(self, engine: EngineTarget, reading: EngineReading) -> None:
        self.hears(engine, reading)
        if reading.round_trip is not None:
            self.router.known(engine.url, _kind(engine), engine.region)
            self.router.round_trips.measured(engine.url, reading.round_trip)
        if (load := reading.load) is None:
            return
        report = EngineReport(load.running, load.waiting, load.kv_usage, self.clock(), engine.places)
        self.router.report(engine.url, report, _kind(engine))

    def _served(self, engine: EngineTarget) -> bool:
        return self._directory.serves(engine.url)

    def _forget(self) -> None:
        self.router.forget(self._directory.serves)

    def _samples(self) -> Iterable[Sample]:
        """The error of each model's worst engine, and how many engines are known well enough."""
        errors, worst, now = self.router.errors(), dict[str, float](), self.clock()
        watched = [engine for engine in self._directory.targets() if engine.url in self.poller.watched]
        for engine in watched:
            worst[engine.model] = max(worst.get(engine.model, 0.0), errors.get(engine.url, 0.0))
        for model, error in worst.items():
            text = "Mean error of predicted times to the first token, as a share of the mean; of the worst engine."
            yield "batch_assets_routing_error", text, {"model": model}, error
        fresh = sum([self.router.fresh(engine.url, now) for engine in watched])
        for state, count in (("fresh", fresh), ("stale", len(watched) - fresh)):
            yield "batch_assets_routing_engines", "Engines that are asked, by their report.", {"report": state}, count
        resting = sum([self._directory.resting(engine) for engine in self._directory.targets()])
        yield "batch_assets_routing_resting", "Engines that are asked last: not reached, or failing.", {}, resting
        for region, seconds in self.router.round_trips.regions().items():
            text = "Round trip to the nearest engine of a region, as measured."
            yield "batch_assets_routing_round_trip_seconds", text, {"region": region}, seconds


def routing_policy() -> RoutingPolicy:
    """As the environment says. Raises SettingError."""
    rule = _word(ROUTING, Rule.PREDICTED.value, tuple(rule.value for rule in Rule))
    shed = _word(UNMET, "shed", ("shed", "send")) == "shed"
    region = os.environ.get(REGION, "").strip()
    if region and not is_region(region):
        raise SettingError(f"{REGION}: expected a name of {REGION_WORDS}, found {region!r:.80}")
    return RoutingPolicy(rule=Rule(rule), shed=shed, region=region)


def _kind(engine: EngineTarget) -> str:
    """Engines that are equally fast: of one kind of machine, with one model."""
    return f"{engine.hardware} {engine.model}" if engine.hardware else ""


def _word(name: str, default: str, words: tuple[str, ...]) -> str:
    text = os.environ.get(name, "").strip() or default
    if text not in words:
        raise SettingError(f"{name}: expected {' or '.join(words)}, found {text!r:.40}")
    return text


def _unmet(headroom: float) -> ApiError:
    wait = min(LONGEST_RETRY, max(1, math.ceil(-headroom)))
    said = f"No engine can meet the latency target of this request now: {-headroom:.3f} seconds too slow."
    return ApiError(503, said, code="target_unmet", headers={"Retry-After": str(wait)})
