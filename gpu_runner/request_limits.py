"""What one engine may be asked, as whoever runs it says."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

REQUEST_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """None: nothing was said. `timeout`: seconds of one request. `concurrency`: rows in flight at most.

    Tokens are those of prompts and answers.
    """

    timeout: float | None = None
    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    @property
    def request_seconds(self) -> float:
        """How long a request may take: a row may wait behind three times the engine's slots, and then write thousands
        of tokens.
        """
        return REQUEST_SECONDS if self.timeout is None else self.timeout

    def over(self, others: RequestLimits) -> RequestLimits:
        """These, and the others where these say nothing."""
        said = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}
        return replace(others, **said)


NO_LIMITS = RequestLimits()
