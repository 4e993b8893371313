"""Which rows of a table pass: `filter:` of a defs.yaml, rules by their names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from batch_assets.spec.errors import Unusable, show
from batch_assets.spec.fields import Column, Condition, Flag, Name, SourcePath, Strict

NO_ANSWER = "error"  # the flag of rows without a completion, which never pass
OWN_RULES = "passed"  # who accepts, where it is the dataset itself
SURPLUS = "surplus"  # of rows that pass, after as many as are wanted
MOST_RULES = 50
COLUMN_KEYS = ("column", "over")
_TEXT = "Column of texts; of a conversation, as in `prompt`, all its messages."


PersonalData = Literal["email", "phone", "credit_card", "iban", "ip_address"]


class _Band(Strict):
    min: float | None = Field(default=None, ge=0, description="Least that passes.")
    max: float | None = Field(default=None, ge=0, description="Most that passes.")

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if self.min is None and self.max is None:
            raise Unusable("min, max, or both", "none")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise Unusable(f"at least min ({self.min:g})", f"{self.max:g}", key="max")
        return self


class LengthRule(_Band):
    """Texts outside a band of lengths are flagged."""

    column: Column = Field(description=_TEXT)
    unit: Literal["characters", "words"] = Field(
        default="characters",
        description="characters or words. Of Chinese, Japanese and Korean each character is a word.",
    )


class RatioRule(_Band):
    """Texts that are too short or too long beside another one are flagged, in characters."""

    column: Column = Field(description=_TEXT)
    over: Column = Field(description="Column of texts by whose lengths those of `column` are divided.")


class DuplicatesRule(Strict):
    """Texts that stand in an earlier row, but for case and spaces, are flagged."""

    column: Column = Field(description=_TEXT)


class NearDuplicatesRule(Strict):
    """Texts that are similar to one of an earlier row are flagged (MinHash)."""

    column: Column = Field(description=_TEXT)
    threshold: float = Field(
        default=0.8,
        ge=0.3,
        le=1,
        description="Runs of words that two texts have in common, among all that they have, from which on they are "
        "similar.",
    )
    words: int = Field(default=3, ge=1, le=20, description="Words of a run.")


class SemanticDuplicatesRule(Strict):
    """Rows whose vectors are near the one of a row that is kept before are flagged, by their cosine."""

    column: Column = Field(description="Column of lists of numbers: `output` of embeddings, or a kept column.")
    threshold: float = Field(
        default=0.95, ge=0.3, le=1, description="Cosine of two vectors from which on they are near."
    )


class LanguageRule(Strict):
    """Texts in another language are flagged."""

    column: Column = Field(description=_TEXT)
    allowed: list[Annotated[str, Field(pattern="^[a-z]{2}$")]] = Field(
        min_length=1, max_length=100, description="Languages that pass, by ISO 639-1: `[en, de]`."
    )
    min_characters: int = Field(
        default=20, ge=1, le=10_000, description="Shorter texts are not flagged: nobody can tell their language."
    )


class RefusalsRule(Strict):
    """Texts that begin as a refusal are flagged."""

    column: Column = Field(description=_TEXT)
    also: list[Annotated[str, Field(min_length=1, max_length=1000)]] = Field(
        default=[],
        max_length=1000,
        description="Beginnings besides those known in eight languages.",
    )


class PersonalDataRule(Strict):
    """Texts that hold what has the form of personal data are flagged."""

    column: Column = Field(description=_TEXT)
    kinds: list[PersonalData] = Field(
        default=["email", "phone", "credit_card", "iban"],
        min_length=1,
        max_length=10,
        description="email, phone (with its country), credit_card and iban (with right check digits), ip_address.",
    )


class OverlapRule(Strict):
    """Texts that have a passage in common with a file of evaluations are flagged."""

    column: Column = Field(description=_TEXT)
    files: SourcePath = Field(description="Files of evaluations, as `source.path`; relative to this one.")
    text: Column = Field(description="Their column of texts.")
    words: int = Field(default=13, ge=3, le=100, description="Words of a passage.")


class RowRule(Strict):
    """One rule: exactly one key beside `remove` says what it looks for."""

    where: Condition | None = Field(
        default=None,
        description="SQL condition over the columns of the table. Rows that do not meet it are flagged, and so are "
        "those for which it is null.",
    )
    length: LengthRule | None = Field(default=None, description="A band of lengths.")
    ratio: RatioRule | None = Field(default=None, description="A band of lengths beside another column's.")
    duplicates: DuplicatesRule | None = Field(default=None, description="Equal texts: the first row stays.")
    near_duplicates: NearDuplicatesRule | None = Field(default=None, description="Similar texts: the first row stays.")
    semantic_duplicates: SemanticDuplicatesRule | None = Field(
        default=None, description="Vectors that are near each other: the first row stays."
    )
    language: LanguageRule | None = Field(default=None, description="Languages that pass.")
    refusals: RefusalsRule | None = Field(default=None, description="Beginnings of refusals, and of one's own.")
    personal_data: PersonalDataRule | None = Field(default=None, description="Addresses and numbers of persons.")
    overlap: OverlapRule | None = Field(default=None, description="Passages of evaluations.")
    remove: Flag = Field(default=False, description="Whether rows that it flags fall out. Else they are marked.")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if len(self.kinds) != 1:
            kinds = [key for key in type(self).model_fields if key != "remove"]
            raise Unusable(f"exactly one of {', '.join(kinds)}", " and ".join(self.kinds) or "none")
        return self

    @property
    def kinds(self) -> list[str]:
        """The keys that say what it looks for: one of them."""
        return [key for key in type(self).model_fields if key != "remove" and getattr(self, key) is not None]

    def columns(self) -> Iterator[tuple[str, str]]:
        """Columns that it reads, each with the key that names it."""
        (kind,) = self.kinds
        if self.where is not None:
            import polars as pl

            yield from (("where", name) for name in pl.sql_expr(self.where).meta.root_names())
            return
        found = getattr(self, kind)
        yield from ((f"{kind}.{key}", getattr(found, key)) for key in COLUMN_KEYS if hasattr(found, key))


def _rules(rules: dict[str, RowRule]) -> dict[str, RowRule]:
    if NO_ANSWER in rules:
        raise Unusable("another name for a rule", show(NO_ANSWER), "It is the flag of rows without an answer.")
    return rules


RowRules = Annotated[dict[Name, RowRule], Field(min_length=1, max_length=MOST_RULES), AfterValidator(_rules)]


class WantSpec(Strict):
    """How many rows are to be accepted. Rows of the source are asked until they are."""

    rows: int = Field(ge=1, le=1 << 40, description="Accepted rows; with `per`, of each of its values.")
    accepted_by: Name = Field(
        default=OWN_RULES,
        description="passed: rows that pass the dataset's own `filter` are accepted. Or the name of a dataset below, "
        "which reads it or what is made of it: those that pass its `filter`, or its `judge.accept`.",
    )
    per: Column | None = Field(
        default=None, description="One of `keep_columns`: so many rows of each of its values, of which 1,000 may be."
    )
    expected_rate: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of rows that are likely to be accepted: what `plan` counts on before there are any. "
        "Default: 0.5.",
    )


def rules_digest(rules: Mapping[str, RowRule], want: WantSpec | None = None) -> str:
    """16 hex digits that change with every rule and with their order, and with how many rows are wanted."""
    digest = hashlib.sha256()
    for name, rule in rules.items():
        digest.update(f"{name} {rule.model_dump_json(exclude_none=True)}\n".encode())
    if want is not None:
        digest.update(f"want {want.rows} {want.per or ''}\n".encode())
    return digest.hexdigest()[:16]
