"""Rules that look at the text of one row at a time: its length, its language, refusals, personal data, and passages of
texts that a model is judged by.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batch_assets.gates.refusals import is_refusal
from batch_assets.gates.text_features import language_of, words_of
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.files import find_files
from batch_assets.snapshot.source.reader import read_source
from batch_assets.spec.row_rules import (
    LanguageRule,
    LengthRule,
    OverlapRule,
    PersonalData,
    PersonalDataRule,
    RatioRule,
    RefusalsRule,
)
from batch_assets.spec.source import SourceSpec
from resources.store.object_integrity import READ_BYTES
from resources.store.row_condition import BadCondition

if TYPE_CHECKING:
    import polars as pl


MOST_PASSAGES = 5_000_000  # of evaluation sets: 500 MB of memory
SHORTEST_PASSAGE = 5  # words of an evaluation text that is shorter than a passage
_PERSONAL: dict[PersonalData, str] = {
    "email": r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*\.[A-Za-z]{2,24}\b",
    "phone": r"(?:\+|\b00)[1-9](?:[ ()./-]{0,2}[0-9]){7,13}\b",
    "ip_address": r"\b(?:(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\b",
    "credit_card": r"\b[0-9](?:[ -]?[0-9]){12,18}\b",
    "iban": r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,30}\b",
}


def texts_of(rows: pl.DataFrame, column: str) -> pl.Series:
    """A column as texts: of a conversation the contents of its messages; null stays null. Raises BadCondition."""
    import polars as pl

    found = rows[column]
    if found.dtype == pl.String:
        return found
    inner = found.dtype.inner if isinstance(found.dtype, pl.List) else None
    if isinstance(inner, pl.Struct) and any(field.name == "content" for field in inner.fields):
        contents = pl.element().struct.field("content")
        return rows.select(pl.col(column).list.eval(contents).list.join("\n", ignore_nulls=True)).to_series()
    if found.dtype.is_nested():
        raise BadCondition(f"expected a column of texts, found {column} of type {found.dtype}")
    return found.cast(pl.String)


@dataclass(frozen=True)
class LengthMark:
    """Flags texts outside a band of lengths; null is a text of length 0."""

    rule: LengthRule

    @property
    def columns(self) -> Sequence[str]:
        return [self.rule.column]

    def flagged(self, rows: pl.DataFrame) -> pl.Series:
        import polars as pl

        texts = texts_of(rows, self.rule.column).fill_null("")
        if self.rule.unit == "words":
            lengths = pl.Series([len(words_of(text)) for text in texts], dtype=pl.Int64)
        else:
            lengths = texts.str.len_chars()
        return _outside(lengths, self.rule.min, self.rule.max)


@dataclass(frozen=True)
class RatioMark:
    """Flags rows in which a text is too short or too long beside another one; no text beside it is none at all."""

    rule: RatioRule

    @property
    def columns(self) -> Sequence[str]:
        return [self.rule.column, self.rule.over]

    def flagged(self, rows: pl.DataFrame) -> pl.Series:
        one, other = (texts_of(rows, name).fill_null("").str.len_chars() for name in self.columns)
        return _outside((one / other).fill_nan(math.inf), self.rule.min, self.rule.max)


def _outside(found: pl.Series, low: float | None, high: float | None) -> pl.Series:
    import polars as pl

    flagged = pl.repeat(False, len(found), eager=True)
    if low is not None:
        flagged |= found < low
    return flagged | (found > high) if high is not None else flagged


@dataclass(frozen=True)
class RefusalsMark:
    """Flags texts that begin as a refusal: the same ones that the gate `refused` counts. `beside`: a column that has
    the words in which the engine says that the model refused, where there is one."""

    rule: RefusalsRule
    beside: str | None = None

    @property
    def columns(self) -> Sequence[str]:
        return [self.rule.column, *([] if self.beside is None else [self.beside])]

    def flagged(self, rows: pl.DataFrame) -> pl.Series:
        import polars as pl

        texts = texts_of(rows, self.rule.column).fill_null("")
        found = pl.Series([is_refusal(text, self.rule.also) for text in texts], dtype=pl.Boolean)
        return found if self.beside is None else found | (rows[self.beside].fill_null("") != "")


@dataclass(frozen=True)
class LanguageMark:
    """Flags texts that are in another language than these, by py3langid."""

    rule: LanguageRule

    @property
    def columns(self) -> Sequence[str]:
        return [self.rule.column]

    def flagged(self, rows: pl.DataFrame) -> pl.Series:
        import polars as pl

        allowed, least = set(self.rule.allowed), self.rule.min_characters
        texts = texts_of(rows, self.rule.column).fill_null("")
        return pl.Series([len(one) >= least and language_of(one) not in allowed for one in texts], dtype=pl.Boolean)


@dataclass(frozen=True)
class PersonalDataMark:
    """Flags texts in which something has the form of an address or a number of a person."""

    rule: PersonalDataRule

    @property
    def columns(self) -> Sequence[str]:
        return [self.rule.column]

    def flagged(self, rows: pl.DataFrame) -> pl.Series:
        import polars as pl

        texts = texts_of(rows, self.rule.column).fill_null("")
        flagged = pl.repeat(False, len(texts), eager=True)
        for kind in self.rule.kinds:
            found = texts.str.contains(_PERSONAL[kind])
            if (check := _CHECKED.get(kind)) is not None:
                pattern = re.compile(_PERSONAL[kind])
                hits = [
                    hit and any(check(one) for one in pattern.findall(text))
                    for hit, text in zip(found, texts, strict=True)
                ]
                found = pl.Series(hits, dtype=pl.Boolean)
            flagged |= found
        return flagged


def _luhn(text: str) -> bool:
    """Whether the check digit of a card's number is right (ISO/IEC 7812-1)."""
    digits = [int(sign) for sign in reversed(text) if sign.isdigit()]
    return sum(digit if place % 2 == 0 else sum(divmod(2 * digit, 10)) for place, digit in enumerate(digits)) % 10 == 0


def _iban(text: str) -> bool:
    """Whether the check digits of an account's number are right (ISO 13616)."""
    plain = text.replace(" ", "")
    return int("".join(str(int(sign, 36)) for sign in plain[4:] + plain[:4])) % 97 == 1


_CHECKED: dict[PersonalData, Callable[[str], bool]] = {"credit_card": _luhn, "iban": _iban}


class OverlapMark:
    """Flags texts that have a passage of so many words in common with texts that a model is judged by: the rule of
    "Language Models are Few-Shot Learners" (Brown et al., 2020), appendix C, whose passages have 13 words.
    """

    def __init__(self, rule: OverlapRule, base: Path) -> None:
        self.columns: Sequence[str] = [rule.column]
        self._rule = rule
        self._passages: set[int] = set()
        self._lengths: set[int] = set()
        for text in _evaluation_texts(rule, base):
            words = words_of(text)
            length = min(rule.words, len(words))
            if length >= min(SHORTEST_PASSAGE, rule.words):
                self._lengths.add(length)
                self._passages.update(_passages(words, length))
            if len(self._passages) > MOST_PASSAGES:
                raise BadCondition(f"expected at most {MOST_PASSAGES:,} passages in {rule.files}, found more")
        if not self._passages:
            raise BadCondition(f"expected texts of {SHORTEST_PASSAGE} words or more in {rule.files}, found none")

    def flagged(self, rows: pl.DataFrame) -> pl.Series:
        import polars as pl

        texts = texts_of(rows, self._rule.column).fill_null("")
        return pl.Series([self._overlaps(words_of(text)) for text in texts], dtype=pl.Boolean)

    def _overlaps(self, words: Sequence[str]) -> bool:
        return any(not self._passages.isdisjoint(_passages(words, length)) for length in self._lengths)


def _passages(words: Sequence[str], length: int) -> Iterable[int]:
    """A hash of each run of so many words: 64 bits, so that one false match in 10^12 comparisons is not expected."""
    return (hash(" ".join(words[first : first + length])) for first in range(len(words) - length + 1))


def _evaluation_texts(rule: OverlapRule, base: Path) -> Iterable[str]:
    try:
        for block in read_source(SourceSpec(path=rule.files), [rule.text], base):
            yield from (_text_of(value) for value in block.columns[rule.text] if value is not None)
    except SourceError as error:
        raise BadCondition(str(error)) from None


def _text_of(value: Any) -> str:
    """A text; of messages their contents, of other lists and objects the texts in them."""
    if isinstance(value, Mapping):
        value = [value["content"]] if "content" in value else list(value.values())
    if isinstance(value, list):
        return "\n".join(_text_of(one) for one in value if one is not None)
    return str(value)


def files_digest(rule: OverlapRule, base: Path) -> str:
    """Digest of the bytes of the files. Raises BadCondition."""
    digest = hashlib.sha256()
    try:
        for file in find_files(rule.files, base):
            with file.open() as opened:
                while data := opened.read(READ_BYTES):
                    digest.update(data)
    except (SourceError, OSError) as error:
        raise BadCondition(str(error)) from None
    return digest.hexdigest()
