"""Predicts, for one engine, the time to the first token and the time of each further token. Learned online. Pure.

Features of the first token, in units that make them about 1: a constant, the tokens to compute of this prompt and those
ahead of it, requests that decode beside it, and the seconds until a place is free. Linear, because an engine with
continuous batching is: a step takes so much, and so much a token. Places are the exception: an engine runs so many
requests at once and no more. How many is known of engines of the fleet; else it shows where one reports that it runs
some and lets others wait. One that finds k requests before it without a place waits k / places times the mean stay of a
request (Little's law).
Quantiles are those of the residuals. `error`: mean error of the predictions as a share of the mean time.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_runner.routing.engine_view import EngineReport, EngineView
from gpu_runner.routing.least_squares import LeastSquares, RunningQuantile

KILO, TENS = 1e-3, 0.01
LEAST_SECONDS = 0.02  # errors below this matter little: weights are relative to the time itself, but not below
ENOUGH = 30  # observations before a prediction counts
WORST_ERROR = 3.0
FORGETTING = 0.998
CONFIDENCE = 1.0
FULL_REPORTS = 2
BOUND = 20.0  # how many times the prior a weight may be
USUAL_PLACES = 256.0  # vLLM's default, where no other number is known
LET_WAIT = 0.1  # as a share of those that run: fewer may just have arrived during a step


@dataclass(frozen=True, slots=True)
class HardwarePrior:
    """Seconds: of a step, of a token of a prompt, of a decoding request in a step."""

    step: float = 0.02
    token: float = 50e-6
    decoding: float = 50e-6


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds. `ttft_high`, `tpot_high`: what nine of ten stay below."""

    ttft: float
    ttft_high: float
    tpot: float
    tpot_high: float


class LatencyModel:
    """The latency of one engine. `like`: a model of the same hardware, to begin with what it has learned."""

    def __init__(self, prior: HardwarePrior, like: LatencyModel | None = None) -> None:
        token, decoding = prior.token / KILO, prior.decoding / TENS
        first: list[float] = like._first.theta if like is not None else [prior.step, token, decoding, 1.0]
        pace: list[float] = like._pace.theta if like is not None else [prior.step / 2, decoding, 0.0]
        wide, most = BOUND, 10.0
        bounds = [(0.0, most), (token / wide, token * wide), (0.0, decoding * wide), (1 / 3, 3.0)]
        self._first: LeastSquares = LeastSquares(first, bounds, FORGETTING, CONFIDENCE)
        pace_bounds = [(0.0, most), (0.0, decoding * wide), (0.0, token * wide)]
        self._pace: LeastSquares = LeastSquares(pace, pace_bounds, FORGETTING, CONFIDENCE)
        self._above = RunningQuantile(0.9, prior.step)
        self._pace_above = RunningQuantile(0.9, prior.step / 2)
        self._full = 0  # reports in a row that said so
        self._places: float | None = None  # requests that run at once, where that was seen
        self._stay = 0.0  # seconds of a request from its first token to its end
        self._mean = prior.step
        self._wrong = 0.0
        self.observations = 0

    @property
    def token_seconds(self) -> float:
        """Seconds of one token of a prompt, as learned."""
        return self._first.theta[1] * KILO

    @property
    def mean(self) -> float:
        """Seconds until the first token, of late."""
        return self._mean

    @property
    def places(self) -> float:
        """Requests that run at once at most, as far as that is known."""
        return self._places or USUAL_PLACES

    @property
    def error(self) -> float:
        """Mean error of late, as a share of the mean time."""
        return self._wrong / self._mean

    @property
    def trusted(self) -> bool:
        """Whether it has seen enough, and errs little enough."""
        return self.observations >= ENOUGH and self.error <= WORST_ERROR

    def features(self, view: EngineView, prompt: float, now: float) -> tuple[float, ...]:
        """Features of a request with so many tokens to compute, if it went there now."""
        beside = len(view.decoding) + view.others(now)
        ahead = view.backlog_now(now, self.token_seconds)
        return (1.0, (prompt + ahead) * KILO, beside * TENS, self._place_wait(view, now))

    def _place_wait(self, view: EngineView, now: float) -> float:
        """Seconds until a place is free for one more."""
        if self._places is None:
            return 0.0
        return max(0.0, view.in_flight + 1 + view.others(now) - self._places) * self._stay / self._places

    def reported(self, report: EngineReport) -> None:
        """The engine runs so many requests, and lets so many wait."""
        if report.places is not None:
            self._places = float(report.places)
            return
        self._full = self._full + 1 if report.waiting > max(2.0, LET_WAIT * report.running) else 0
        if self._full >= FULL_REPORTS:
            seen = float(max(1, report.running))
            self._places = seen if self._places is None else self._places + 0.3 * (seen - self._places)
        elif self._places is not None:
            self._places = max(self._places, float(report.running))

    def pace_features(self, view: EngineView, now: float) -> tuple[float, ...]:
        """Features of the tokens of a request that runs beside the others there."""
        ahead = view.backlog_now(now, self.token_seconds)
        return (1.0, (view.in_flight + view.others(now)) * TENS, ahead * KILO)

    def first_token_seconds(self, first: tuple[float, ...]) -> float:
        """Predicted for these features."""
        return max(1e-4, self._first.predict(first))

    def predict(self, first: tuple[float, ...], pace: tuple[float, ...], way: float = 0.0) -> Prediction:
        """For these features, as seen from where the round trip takes `way` seconds."""
        ttft, tpot = way + self.first_token_seconds(first), max(1e-5, self._pace.predict(pace))
        return Prediction(ttft, ttft + max(0.0, self._above.value), tpot, tpot + max(0.0, self._pace_above.value))

    def first_token(self, features: tuple[float, ...], predicted: float, seconds: float) -> None:
        """A first token took so long; `predicted` was said of it."""
        self._wrong += 0.02 * (abs(seconds - predicted) - self._wrong)
        self._mean += 0.02 * (seconds - self._mean)
        self._above.see(seconds - predicted)
        scale = max(seconds, predicted, LEAST_SECONDS)
        self._first.learn(features, seconds, LEAST_SECONDS / scale)
        self.observations += 1

    def whole(
        self, first: tuple[float, ...], pace: tuple[float, ...], predicted: float, seconds: float, tokens: int
    ) -> None:
        """An answer of so many tokens came whole after so many seconds; `predicted` was said of its first token.

        Only the sum is seen. Both parts of it are taken to be off by the same factor: an engine that is slower than was
        thought is slower at prompts and at answers.
        """
        further = max(0, tokens - 1)
        tpot = max(1e-5, self._pace.predict(pace)) if pace else 0.0
        factor = seconds / max(1e-6, predicted + further * tpot)
        self.first_token(first, predicted, predicted * factor)
        if further and pace:
            self.ended(pace, further * tpot * factor, tokens)

    def ended(self, features: tuple[float, ...], stay: float, tokens: int) -> None:
        """An answer of so many tokens, two at least, took so long from its first token on."""
        self._stay = stay if not self._stay else self._stay + 0.05 * (stay - self._stay)
        seconds_per_token = stay / (tokens - 1)
        self._pace_above.see(seconds_per_token - self._pace.predict(features))
        self._pace.learn(features, seconds_per_token)
