"""Usage as values: tokens, amounts of money, and under which heading they are added up. Pure."""

from __future__ import annotations

import datetime
import enum
from dataclasses import dataclass

PICODOLLARS = 10**12  # of a US dollar: amounts are whole numbers, so that sums are exact in any order
INTERACTIVE = "interactive"


class Kind(enum.StrEnum):
    """What the tokens were used for, as OpenAI's usage routes divide it."""

    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of answers. `cached_tokens` are among `input_tokens`."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def total(self) -> int:
        """Input and output."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class UsageKey:
    """One line of the ledger. `service_class`: `interactive`, or a batch's by its window (`prices`)."""

    day: datetime.date
    tenant: str
    service_class: str
    model: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Used:
    """What was used under one heading. `amount` in picodollars, of the tokens that have a price.

    `requests`: answers. `unmetered`: requests among them of which no usage was said: their caller left, or the engine
    was lost. `unpriced_tokens`: tokens of models without a price.
    """

    requests: int = 0
    unmetered: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    unpriced_tokens: int = 0
    amount: int = 0

    def counts(self) -> dict[str, int]:
        """All but the amount, by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "amount"}

    def plus(self, other: Used, sign: int = 1) -> Used:
        """Both together; with `sign` -1 the difference."""
        names = Used.__dataclass_fields__
        return Used(**{name: getattr(self, name) + sign * getattr(other, name) for name in names})

    @property
    def tokens(self) -> int:
        """Input and output."""
        return self.input_tokens + self.output_tokens

    @property
    def usd(self) -> float:
        """The amount in US dollars, rounded by the division only."""
        return self.amount / PICODOLLARS


@dataclass(frozen=True, slots=True)
class TaskUsage:
    """What the answer to one online request used, at a Unix time."""

    task_id: str
    at: float
    key: UsageKey
    used: Used


def day_of(moment: float) -> datetime.date:
    """The day (UTC) of a Unix time."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).date()


def midnight(day: datetime.date) -> int:
    """The Unix time at which a day (UTC) begins."""
    return int(datetime.datetime.combine(day, datetime.time(), datetime.UTC).timestamp())
