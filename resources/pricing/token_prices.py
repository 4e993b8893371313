"""Prices by the token, as people write them: in fleet.yaml, and on the command line."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpu_runner.token_price import TokenPrice
from resources.yaml_errors import Unusable


class TokenPriceConfig(BaseModel):
    """US dollars per million tokens. One number stands for both."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    input: float = Field(ge=0, description="of prompts")
    output: float = Field(ge=0, description="of what is written; thinking counts")
    cached: float | None = Field(
        default=None,
        ge=0,
        description="of prompts, where the engine says that they were in its cache; else `input`",
    )

    @model_validator(mode="after")
    def _cached_costs_no_more(self) -> TokenPriceConfig:
        if self.cached is not None and self.cached > self.input:
            raise Unusable(f"at most input ({self.input:g})", f"{self.cached:g}", key="cached")
        return self

    @model_validator(mode="before")
    @classmethod
    def _one_number(cls, given: object) -> object:
        number = isinstance(given, int | float) and not isinstance(given, bool)
        return {"input": given, "output": given} if number else given

    @property
    def price(self) -> TokenPrice:
        """As the rest of the program takes it."""
        return TokenPrice(self.input, self.output, self.cached)


def parse_token_price(text: str) -> TokenPriceConfig:
    """From the command line: `0.6`, `0.15,0.6` for input and output, or `0.15,0.6,0.075` with what is cached.

    Raises ValueError.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
        if len(numbers) not in (1, 2, 3):
            raise ValueError
        cached = numbers[2] if len(numbers) == 3 else None
        return TokenPriceConfig(input=numbers[0], output=numbers[min(1, len(numbers) - 1)], cached=cached)
    except ValueError:
        raise ValueError(
            "expected US dollars per million tokens: one number, two for input and output (0.15,0.6), or a third, at "
            "most the first, for input from the engine's cache (0.15,0.6,0.075), "
            f"found {text[:100]!r}"
        ) from None
