"""What the router knows of one engine: its own requests there, and what the engine last said. Pure.

The backlog is kept as a fluid queue: tokens of prompts that were sent and whose first token has not come, less what the
engine has surely computed since, at the rate that the model has learned. A first token that comes says that all prompts
that were sent before it are computed as well: engines take them first come, first served.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

# An engine's page is read once a second or so; older than this it says nothing.
STALE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What /metrics said at a time: requests of all routers and batches. `kv_usage`: 0 to 1.

    `places`: requests that run at once at most, where that is known (vLLM's `--max-num-seqs`).
    """

    running: int
    waiting: int
    kv_usage: float
    at: float
    places: int | None = None


@dataclass(slots=True, eq=False)
class Routed:
    """One request on an engine. `prompt`: tokens to compute; `output`: tokens expected. Times of one clock.

    `predicted`: of its first token, at the engine. `way`: seconds of the round trip to it. `whole`: its answer comes as
    a whole, so nobody sees its first token.
    """

    engine: str
    prompt: float
    output: float
    sent_at: float
    features: tuple[float, ...]
    predicted: float
    first_token_at: float | None = None
    pace_features: tuple[float, ...] = ()
    whole: bool = False
    way: float = 0.0


@dataclass(slots=True)
class EngineView:
    """One engine. `hardware`: what it is, for priors. `probed_at`: when it got a request whose target it was not to
    meet, to see whether that is still so.
    """

    hardware: str = ""
    report: EngineReport | None = None
    waiting: dict[Routed, None] = field(default_factory=dict)  # no first token yet; in the order in which they went
    decoding: dict[Routed, None] = field(default_factory=dict)
    backlog: float = 0.0  # tokens of prompts to be computed, at `backlog_at`
    backlog_at: float = 0.0
    observed_at: float = float("-inf")
    probed_at: float = float("-inf")
    sent: int = 0  # requests of ours, so far
    usual_in_flight: float = 0.0  # requests of ours there when another one goes, of late
    _others: int = 0
    _unseen: list[tuple[float, int, Routed]] = field(default_factory=list)  # heap of whole answers, by first token
    _count: int = 0

    @property
    def in_flight(self) -> int:
        """Requests of ours."""
        return len(self.waiting) + len(self.decoding)

    def fresh(self, now: float) -> EngineReport | None:
        """The report, if it is not stale."""
        return self.report if self.report is not None and now - self.report.at <= STALE_SECONDS else None

    def others(self, now: float) -> int:
        """Requests there that are not ours, as far as a fresh report shows."""
        return 0 if self.fresh(now) is None else self._others

    def reported(self, report: EngineReport) -> None:
        """The engine says this. What is not ours of it is counted now: ours will have ended before the next report."""
        self.report = report
        self._others = max(0, report.running + report.waiting - self.in_flight)

    def backlog_now(self, now: float, token_seconds: float) -> float:
        """Tokens of prompts ahead of the next one."""
        return max(0.0, self.backlog - (now - self.backlog_at) / max(token_seconds, 1e-9))

    def send(self, request: Routed, now: float, token_seconds: float) -> None:
        """A request goes there."""
        self.backlog = self.backlog_now(now, token_seconds) + request.prompt
        self.backlog_at = now
        self.sent += 1
        self.usual_in_flight += 0.02 * (self.in_flight - self.usual_in_flight)
        self.waiting[request] = None
        if request.whole:
            self._count += 1
            heapq.heappush(self._unseen, (now + request.predicted + request.way, self._count, request))

    def unseen(self, now: float) -> Iterator[Routed]:
        """Requests whose first token nobody sees, as soon as it should have come: they decode from now on."""
        while self._unseen and self._unseen[0][0] <= now:
            request = heapq.heappop(self._unseen)[2]
            if self.waiting.pop(request, request) is None:
                self.decoding[request] = None
                yield request

    def first_token(self, request: Routed, at: float) -> None:
        """Its first token came at this time."""
        if self.waiting.pop(request, request) is None:
            self.decoding[request] = None
        ahead = [other for other in self.waiting if other.sent_at > request.sent_at]
        self.backlog = min(self.backlog, sum([other.prompt for other in ahead]))
        self.backlog_at = max(self.backlog_at, at)
        self.observed_at = at

    def end(self, request: Routed, at: float, token_seconds: float) -> None:
        """Tell that a request has ended. Without a first token its prompt is computed no more: it was refused, its
        caller left, or the engine was not reached.
        """
        if self.waiting.pop(request, request) is None:
            now = max(at, self.backlog_at)
            left = sum([other.prompt for other in self.waiting])
            self.backlog, self.backlog_at = min(self.backlog_now(now, token_seconds), left), now
        self.decoding.pop(request, None)
