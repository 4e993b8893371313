"""`gates:` of a defs.yaml: when a request is paused because of the rows that come."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from batch_assets.spec.errors import Unusable
from batch_assets.spec.fields import Condition, Name, Strict

Words = Annotated[str, Field(min_length=1, max_length=300)]
Bound = Annotated[float, Field(gt=0, lt=1)]


class RuleSpec(Strict):
    """A gate of one's own."""

    where: Condition = Field(
        description="SQL condition over a row's output, finish_reason, error, prompt_tokens, completion_tokens, tries "
        "and seconds, and over the fields of its JSON."
    )
    max_rate: Bound = Field(description="Most of the rows that may meet it.")


class LengthSpec(Strict):
    """How long an output is to be."""

    min_letters: int = Field(default=0, ge=0, description="Fewest letters of an output.")
    max_letters: int | None = Field(default=None, ge=1, description="Most letters of an output.")
    max_rate: Bound = Field(default=0.5, description="Most of the outputs that may be shorter or longer.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_letters is not None and self.max_letters < self.min_letters:
            raise Unusable(f"max_letters of at least min_letters ({self.min_letters})", str(self.max_letters))
        return self


class NearRepeatedSpec(Strict):
    """How similar outputs may be."""

    similarity: float = Field(
        default=0.8,
        ge=0.5,
        le=1,
        description="Runs of three words that two outputs have in common, among all that they have, from which on one "
        "nearly repeats the other.",
    )
    max_rate: Bound = Field(
        default=0.5,
        description="Most outputs of 80 letters or more that nearly repeat one of the last 5,000 that were looked at.",
    )


class LanguageSpec(Strict):
    """In which languages an output is to be."""

    allowed: list[Annotated[str, Field(pattern="^[a-z]{2,3}$")]] = Field(
        min_length=1,
        max_length=100,
        description="Languages of the outputs, by ISO 639-1, or 639-3 where that has none: `[en, de]`.",
    )
    max_rate: Bound = Field(default=0.5, description="Most of the outputs that may be in another language.")


class GatesSpec(Strict):
    """Rates of bad rows that pause a request while it is made. Leave one empty (null) to switch its gate off."""

    max_dead_rate: Bound | None = Field(default=0.5, description="Most rows without an answer.")
    max_invalid_rate: Bound | None = Field(
        default=None,
        description="Most outputs that miss the JSON schema, the choice or the pattern of `output`. They are rows "
        "without an answer, too. Default: no gate.",
    )
    max_empty_rate: Bound | None = Field(default=0.5, description="Most outputs that are blank.")
    max_cut_rate: Bound | None = Field(
        default=0.5, description="Most outputs that end at the token limit, where max_tokens is above 32."
    )
    max_refused_rate: Bound | None = Field(
        default=0.5, description="Most outputs that refuse the request: by the engine's word, or by how they begin."
    )
    max_repeated_rate: Bound | None = Field(
        default=0.7, description="Most outputs of 80 letters or more that repeat one of the 5,000 before."
    )
    min_judge_score: float | None = Field(
        default=None, description="Least mean of the scores, on the scale of the dataset's `judge`. Default: no gate."
    )
    refusals: list[Words] = Field(
        default=[], max_length=100, description="Beginnings of a refusal, besides those known in eight languages."
    )
    length: LengthSpec | None = Field(default=None, description="How long an output is to be.")
    near_repeated: NearRepeatedSpec | None = Field(default=None, description="How similar outputs may be.")
    language: LanguageSpec | None = Field(default=None, description="In which languages an output is to be.")
    rules: dict[Name, RuleSpec] = Field(default={}, max_length=20, description="Gates of one's own, by their names.")
    least_rows: int = Field(
        default=100,
        ge=20,
        le=1_000_000,
        description="A gate trips only on a stretch of so many rows of a run, or of 1 in 200 rows of the dataset, at "
        "most a tenth of the run's.",
    )

    @model_validator(mode="after")
    def _names_are_free(self) -> Self:
        own = self.names[: len(self.names) - len(self.rules)]
        for name in self.rules:
            if name in own:
                raise Unusable(f"names of rules other than {', '.join(own)}", name)
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all gates."""
        # Those that came later are names only where they are on: a rule of a file from before may be called so.
        later = (name for name, written in self._bounds.items() if name not in OWN_GATES and written is not None)
        return (*OWN_GATES, *later, *self.rules)

    @property
    def on(self) -> tuple[str, ...]:
        """Names of the gates that may pause a request."""
        off = {name for name, written in self._bounds.items() if written is None}
        return tuple(name for name in self.names if name in self.rules or name not in off)

    @property
    def off(self) -> tuple[str, ...]:
        """Names of those that are known and switched off."""
        return tuple(name for name, written in self._bounds.items() if written is None and name not in self.rules)

    @property
    def _bounds(self) -> dict[str, object]:
        """What is written of each gate that is not one's own; None: it is off."""
        return {
            "dead": self.max_dead_rate,
            "empty": self.max_empty_rate,
            "cut": self.max_cut_rate,
            "refused": self.max_refused_rate,
            "repeated": self.max_repeated_rate,
            "length": self.length,
            INVALID: self.max_invalid_rate,
            NEAR_REPEATED: self.near_repeated,
            WRONG_LANGUAGE: self.language,
            JUDGE_SCORE: self.min_judge_score,
        }


JUDGE_SCORE = "judge_score"
INVALID = "invalid"
NEAR_REPEATED = "near_repeated"
WRONG_LANGUAGE = "wrong_language"
OWN_GATES = ("dead", "empty", "cut", "refused", "repeated", "length")
