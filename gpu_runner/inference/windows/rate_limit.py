"""When the next request may go to an engine that takes so many requests, or tokens, a minute. Pure: no clock, no I/O.

Two token buckets that hold a quarter of a second's worth, so that requests are spread over the minute. A request is
charged when it is sent: the bytes of its prompts divided by four, and the mean length of the answers so far. Its answer
says how many tokens it was, and the difference is charged then. What was charged too little is a debt, which the next
requests wait for: so there is always a time at which one may be sent, however long it is.
"""

from __future__ import annotations

from collections.abc import Hashable

from gpu_runner.request_limits import RequestLimits

SHORTEST_WAIT = 0.001  # timers are no finer
SAVED_SECONDS = 0.25
BYTES_PER_TOKEN = 4
FIRST_ANSWER = 256  # tokens, where nothing was answered and no limit of tokens is set
REMEMBERED = 50


class RateLimit:
    """The rate limit of one engine. Times are monotonic seconds. `most_tokens`: of one answer, where that is known."""

    def __init__(self, limits: RequestLimits, most_tokens: int | None) -> None:
        self._requests = None if limits.requests_per_minute is None else _Bucket(limits.requests_per_minute, 1.0)
        self._tokens = None if limits.tokens_per_minute is None else _Bucket(limits.tokens_per_minute, 0.0)
        self._charged: dict[Hashable, tuple[float, float]] = {}
        self._answer = float(FIRST_ANSWER if most_tokens is None else most_tokens)
        self._answers = 0

    def wait(self, now: float) -> float:
        """Seconds until the next request may be sent; 0.0: now."""
        waits = [bucket.wait(now) for bucket in (self._requests, self._tokens) if bucket is not None]
        longest = max(waits, default=0.0)
        return max(SHORTEST_WAIT, longest) if longest > 0 else 0.0

    def on_sent(self, request: Hashable, prompt_bytes: int, now: float, rows: int = 1) -> None:
        """A request is being sent."""
        if self._requests is not None:
            self._requests.charge(1.0, now)
        if self._tokens is not None:
            prompt = prompt_bytes / BYTES_PER_TOKEN
            charged = self._tokens.charge(prompt + rows * self._answer, now)
            self._charged[request] = charged, prompt

    def on_end(self, request: Hashable) -> None:
        """Tell that a request failed or was broken off: it may have cost as much as was charged."""
        self._charged.pop(request, None)

    def on_answer(
        self, request: Hashable, prompt_tokens: int, completion_tokens: int, now: float, rows: int = 1
    ) -> None:
        """Tell that a request was answered."""
        self._answers = min(REMEMBERED, self._answers + 1)
        self._answer += (completion_tokens / rows - self._answer) / self._answers
        charged, prompt = self._charged.pop(request, (None, 0.0))
        if self._tokens is not None and charged is not None:
            self._tokens.charge((prompt_tokens or prompt) + completion_tokens - charged, now)


class _Bucket:
    """Refilled evenly. A request may be sent while it holds `needed`; what is charged may be more than it holds."""

    def __init__(self, per_minute: int, needed: float) -> None:
        saved = per_minute / 60 * SAVED_SECONDS
        self._most = max(1.0, saved)
        # What is saved is sent beside what comes in: in no minute is it more than `per_minute`.
        self._rate = (per_minute if saved <= 1 else per_minute - saved) / 60
        self._needed, self._debt = needed, float(per_minute)
        self._level = self._most
        self._at: float | None = None

    def wait(self, now: float) -> float:
        self._refill(now)
        if self._level > self._needed - 1e-9 and self._level > 0:
            return 0.0
        return (self._needed - self._level) / self._rate or SHORTEST_WAIT

    def charge(self, amount: float, now: float) -> float:
        """Charges so much, one minute's worth at most. Returns what was charged."""
        self._refill(now)
        before = self._level
        self._level = min(self._most, max(-self._debt, self._level - amount))
        return before - self._level

    def _refill(self, now: float) -> None:
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now if self._at is None else max(self._at, now)
        self._level = min(self._most, self._level + passed * self._rate)
