"""What one engine may be asked, as whoever runs it says."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

REQUEST_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a provider of OpenAI's Batch API takes. `completion_window`: as its API is told, `window_seconds` of it.

    `max_requests`, `max_file_bytes`: of one input file; `max_output_bytes`: of one output file. `max_open`: batches at
    once. `gather_seconds`: without a further row, until a batch that is not full is sent. `poll_seconds`: between two
    looks at a batch, at most. `elsewhere`: another engine can be had, and rows that come back wrong wait for it.
    """

    completion_window: str = "24h"
    window_seconds: float = 86_400.0
    max_requests: int = 10_000
    max_file_bytes: int = 100 << 20
    max_output_bytes: int = 2 << 30
    max_open: int = 2
    gather_seconds: float = 5.0
    poll_seconds: float = 30.0
    elsewhere: bool = False

    @property
    def rows(self) -> int:
        """Rows that may be in flight."""
        return self.max_requests * self.max_open


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """None: nothing was said. `timeout`: seconds of one request. `concurrency`: rows in flight at most.

    Tokens are those of prompts and answers. `batches`: rows go out as files, and their answers come hours later.
    """

    timeout: float | None = None
    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    batches: BatchLimits | None = None

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
