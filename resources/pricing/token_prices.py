"""Prices by the token, as people write them: in fleet.yaml, and on the command line."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpu_runner.token_price import TokenPrice


class TokenPriceConfig(BaseModel):
    """US dollars per million tokens. One number stands for both."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    input: float = Field(ge=0, description="of prompts")
    output: float = Field(ge=0, description="of what is written; thinking counts")

    @model_validator(mode="before")
    @classmethod
    def _one_number(cls, given: object) -> object:
        number = isinstance(given, int | float) and not isinstance(given, bool)
        return {"input": given, "output": given} if number else given

    @property
    def price(self) -> TokenPrice:
        """As the rest of the program takes it."""
        return TokenPrice(self.input, self.output)


def parse_token_price(text: str) -> TokenPriceConfig:
    """From the command line: `0.6`, or `0.15,0.6` for input and output. Raises ValueError."""
    try:
        numbers = [float(part) for part in text.split(",")]
        if len(numbers) not in (1, 2):
            raise ValueError
        return TokenPriceConfig(input=numbers[0], output=numbers[-1])
    except ValueError:
        raise ValueError(
            "expected US dollars per million tokens: one number, or two for input and output (0.15,0.6), "
            f"found {text[:100]!r}"
        ) from None
