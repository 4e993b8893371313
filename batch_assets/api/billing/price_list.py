"""The price list: US dollars per million tokens, by model and class. `prices.yaml` in DAGSTER_HOME says it.

A class is `interactive`, or that of a batch by its completion window: the first tier whose `within` is not shorter than
the window. Amounts are whole picodollars (10^-12 dollars), so prices have at most six decimals.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from batch_assets.api.billing.usage import PICODOLLARS, Tokens, Used
from batch_assets.spec.deadline import parse_seconds
from gpu_runner.errors import ExitStatus, UserFacingError
from resources.yaml_files import read_settings

FILE = "prices.yaml"
BATCH = "batch"
MOST_MODELS = 10_000
LONGEST_NAME = 300
LONGEST_WINDOW = 40  # letters: the class of a tier is named after it
MILLION = 10**6
DEAREST = 1_000_000
DECIMALS = 6


class PricesError(UserFacingError):
    """The price list cannot be used."""

    exit_status = ExitStatus.WRONG_REQUEST


def _decimal(value: Any) -> Any:
    """A number of YAML as it is written: 0.1 is a tenth."""
    if isinstance(value, bool):
        raise ValueError("expected a number, found true or false")
    return Decimal(str(value)) if isinstance(value, int | float) else value


def _whole_picodollars(value: Decimal) -> Decimal:
    if value != round(value, DECIMALS):
        raise ValueError(f"expected at most {DECIMALS} decimals")
    return value


Price = Annotated[
    Decimal,
    BeforeValidator(_decimal),
    Field(ge=0, le=DEAREST, allow_inf_nan=False),
    AfterValidator(_whole_picodollars),
]


class TokenPrices(BaseModel):
    """US dollars per million tokens. `cached_input`: of input tokens that the engine had in its cache; else `input`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: Price
    output: Price = Decimal(0)
    cached_input: Price | None = None

    def amount(self, tokens: Tokens) -> int:
        """What tokens cost, in picodollars: exact."""
        cached = min(tokens.cached_tokens, tokens.input_tokens)
        dear = self.input if self.cached_input is None else self.cached_input
        parts = ((tokens.input_tokens - cached, self.input), (cached, dear), (tokens.output_tokens, self.output))
        return sum(count * int(price * (PICODOLLARS // MILLION)) for count, price in parts)


class BatchTier(TokenPrices):
    """Prices of batches whose window is at most `within`; without it: of all longer ones."""

    within: Annotated[str, Field(max_length=LONGEST_WINDOW)] | None = None

    @property
    def seconds(self) -> float | None:
        """The longest window of the tier; None: any."""
        return None if self.within is None else parse_seconds(self.within)

    @property
    def name(self) -> str:
        """The class of these batches."""
        return BATCH if self.within is None else f"{BATCH}_{self.within.replace(' ', '')}"


class ModelPrices(BaseModel):
    """Prices of one model. `batch`: tiers, from the shortest window to the last one, which takes any."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    interactive: TokenPrices | None = None
    batch: tuple[BatchTier, ...] = Field(default=(), max_length=20)

    @model_validator(mode="after")
    def _in_order(self) -> ModelPrices:
        before = 0.0
        for number, tier in enumerate(self.batch):
            last = number == len(self.batch) - 1
            if (tier.within is None) != last:
                raise ValueError("batch: expected `within` at each tier but the last, which takes all longer windows")
            if tier.within is None:
                continue
            if (seconds := tier.seconds) is None or seconds <= before:
                raise ValueError(f"batch: expected tiers from short to long windows as 1h, 24h, found {tier.within!r}")
            before = seconds
        return self


ModelName = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class PriceList(BaseModel):
    """Prices of models, and of those that are not named. Empty: usage is counted, and costs nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: ModelPrices = ModelPrices()
    models: dict[ModelName, ModelPrices] = Field(default={}, max_length=MOST_MODELS)

    def of(self, model: str) -> ModelPrices:
        """The prices of one model."""
        return self.models.get(model, self.default)

    def batch_class(self, model: str, window_seconds: float) -> str:
        """The class of a batch."""
        tier = self._tier(model, window_seconds)
        return BATCH if tier is None else tier.name

    def batch_prices(self, model: str, window_seconds: float) -> TokenPrices | None:
        """What the tokens of a batch cost; None: nobody has said."""
        return self._tier(model, window_seconds)

    def interactive_prices(self, model: str) -> TokenPrices | None:
        """What the tokens of interactive requests cost; None: nobody has said."""
        return self.of(model).interactive

    def _tier(self, model: str, window_seconds: float) -> BatchTier | None:
        for tier in self.of(model).batch:
            if tier.seconds is None or window_seconds <= tier.seconds:
                return tier
        return None


def charged(prices: TokenPrices | None, tokens: Tokens, requests: int = 1) -> Used:
    """Usage with its amount."""
    return Used(
        requests=requests,
        input_tokens=tokens.input_tokens,
        cached_tokens=tokens.cached_tokens,
        output_tokens=tokens.output_tokens,
        unpriced_tokens=tokens.total if prices is None else 0,
        amount=0 if prices is None else prices.amount(tokens),
    )


def read_prices(path: Path) -> PriceList:
    """The price list of a file; an empty one where there is none. Raises PricesError."""
    return read_settings(path, PriceList, PricesError)
