"""The work in hand: rows that a dataset still has to generate, and how long they are. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from gpu_runner.market.speed import LengthMix

Basis = Literal["measured", "estimated", "assumed"]


class Subject(enum.Enum):
    """What an assumption is about."""

    ROWS = "rows"
    LENGTHS = "lengths"


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

    `prompt_basis`, `output_basis`: how we know the mean lengths. `assumptions`: what is not known.
    """

    rows: int
    all_rows: int
    mix: LengthMix
    longest: int
    prompt_basis: Basis
    output_basis: Basis
    assumptions: tuple[Assumption, ...] = ()

    @property
    def tokens(self) -> float:
        """Prompt and completion tokens of all rows left."""
        return self.rows * self.mix.tokens
