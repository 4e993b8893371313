"""The work in hand: rows that a dataset still has to generate, and how long they are. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from gpu_runner.offers.speed import LengthMix
from gpu_runner.token_price import TokenPrice

BYTES_PER_TOKEN = 4.0  # that an estimate has; a prompt has at most one token per byte
MEASURED_MARGIN = 1.25  # over the longest of some prompts, where the mean of tokens per byte is known
TEMPLATE_TOKENS = 32  # of a chat template, around all messages

Basis = Literal["measured", "estimated", "assumed"]


class Subject(enum.Enum):
    """What an assumption is about."""

    ROWS = "rows"
    LENGTHS = "lengths"
    SPEEDS = "speeds"


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something of a workload that is not known, and what stands in its place: a sentence for people."""

    subject: Subject
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows left of `all_rows`, their mean lengths, and the longest of them (prompt and completion, in tokens).

    `prompt_basis`, `output_basis`: how we know the mean lengths. `assumptions`: what is not known. `longest_output`:
    tokens that a completion may have at most; None: nobody says. `rejected`: rows of the source that cannot be used, as
    far as they were looked at; `problems`: what keeps a run from beginning, for people.
    """

    rows: int
    all_rows: int
    mix: LengthMix
    longest: int
    prompt_basis: Basis
    output_basis: Basis
    assumptions: tuple[Assumption, ...] = ()
    longest_output: int | None = None
    rejected: int = 0
    problems: tuple[str, ...] = ()

    def usd(self, price: TokenPrice) -> float:
        """What all rows left are expected to cost, paid by the token."""
        return self.rows * price.usd(self.mix.prompt_tokens, self.mix.output_tokens)

    def row_usd(self, price: TokenPrice) -> float:
        """The most that one row may cost, paid by the token.

        Where nothing is measured, the longest prompt is taken to have a token per byte.
        """
        if self.longest_output is None:
            return max(price.usd(self.longest, 0), price.usd(0, self.longest))
        prompt = max(0, self.longest - self.longest_output)
        bound = MEASURED_MARGIN * prompt if self.prompt_basis == "measured" else BYTES_PER_TOKEN * prompt
        return price.usd(bound + TEMPLATE_TOKENS, self.longest_output)

    @property
    def tokens(self) -> float:
        """Prompt and completion tokens of all rows left."""
        return self.rows * self.mix.tokens
