"""The work in hand: rows that a dataset still has to generate, and how long they are. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
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
class UserTexts:
    """What a model writes for the user of a conversation: mean lengths of a row, of all its requests for them together,
    and what it costs at an engine of its own; `price` None: that of the engine that answers. `engine`: its name.
    """

    mix: LengthMix
    price: TokenPrice | None = None
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows left of `all_rows`, their mean lengths, and the longest of them (prompt and completion, in tokens).

    `prompt_basis`, `output_basis`: how we know the mean lengths. `assumptions`: what is not known. `longest_output`:
    tokens that a completion may have at most; None: nobody says. `rejected`: rows of the source that cannot be used, as
    far as they were looked at; `problems`: what keeps a run from beginning, for people. `stops`: the sentence with
    which a run would end before it asks a row; empty: none is known. `user`: of `mix`, what the user's model takes.
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
    user: UserTexts | None = None
    stops: str = ""

    def mean_row_usd(self, price: TokenPrice | None) -> float:
        """What a row is expected to cost, paid by the token; `price` None: the engine that answers costs nothing."""
        prompt, output, usd = self.mix.prompt_tokens, self.mix.output_tokens, 0.0
        if self.user is not None and self.user.price is not None:
            of_user = self.user.mix
            prompt, output = max(0.0, prompt - of_user.prompt_tokens), max(0.0, output - of_user.output_tokens)
            usd = self.user.price.usd(of_user.prompt_tokens, of_user.output_tokens)
        return usd + (0.0 if price is None else price.usd(prompt, output))

    def usd(self, price: TokenPrice) -> float:
        """What all rows left are expected to cost, paid by the token."""
        return self.rows * self.mean_row_usd(price)

    def with_mix(self, mix: LengthMix) -> Workload:
        """The same rows with other mean lengths, of which the user's model takes the same shares."""
        if (user := self.user) is None:
            return replace(self, mix=mix)
        prompt = user.mix.prompt_tokens * mix.prompt_tokens / max(1.0, self.mix.prompt_tokens)
        output = user.mix.output_tokens * mix.output_tokens / max(1.0, self.mix.output_tokens)
        return replace(self, mix=mix, user=replace(user, mix=LengthMix(max(1.0, prompt), output)))

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
