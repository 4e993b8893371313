"""What an engine costs that is paid by the token, as a hosted API is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MILLION = 1e6


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """US dollars per million tokens: of prompts, and of what is written. `cached`: of tokens of prompts that the engine
    had in its cache, as it counts them; None: as of any other.
    """

    input: float
    output: float
    cached: float | None = None

    def usd(self, prompt_tokens: float, completion_tokens: float, cached_tokens: float = 0) -> float:
        """What so many tokens cost. `cached_tokens` are among `prompt_tokens`."""
        cached = min(cached_tokens, prompt_tokens)
        of_cached = self.input if self.cached is None else self.cached
        return (self.input * (prompt_tokens - cached) + of_cached * cached + self.output * completion_tokens) / MILLION
