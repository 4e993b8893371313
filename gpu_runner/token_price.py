"""What an engine costs that is paid by the token, as a hosted API is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MILLION = 1e6


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """US dollars per million tokens: of prompts, and of what is written."""

    input: float
    output: float

    def usd(self, prompt_tokens: float, completion_tokens: float) -> float:
        """What so many tokens cost."""
        return (self.input * prompt_tokens + self.output * completion_tokens) / MILLION
