"""What an answer holds besides its text: tool calls, reasoning, a refusal, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asks for. `arguments` is text as the model wrote it: JSON, or what was meant to be."""

    id: str | None
    type: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have stood in a place. `logprob` is natural; None where the server gave none."""

    token: str
    logprob: float | None
    bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of the answer, and the likeliest tokens of its place. `text_offset`: text completions only."""

    token: str
    logprob: float | None
    bytes: bytes | None = None
    text_offset: int | None = None
    top_logprobs: tuple[Alternative, ...] = ()


@dataclass(slots=True)
class EntryColumns:
    """Tokens with their log-probabilities and bytes, a list of each."""

    token: list[str] = field(default_factory=list)
    logprob: list[float | None] = field(default_factory=list)
    bytes: list[bytes | None] = field(default_factory=list)

    def add(self, token: str, logprob: float | None, raw: list[int] | None) -> None:
        """One more, as it was packed."""
        self.token.append(token)
        self.logprob.append(logprob)
        self.bytes.append(token_bytes(raw))


@dataclass(slots=True)
class TokenColumns(EntryColumns):
    """The tokens of an answer; `alternatives` counts those of `top` that belong to each."""

    text_offset: list[int | None] = field(default_factory=list)
    alternatives: list[int] = field(default_factory=list)
    top: EntryColumns = field(default_factory=EntryColumns)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The tokens of an answer, packed as JSON: twenty alternatives of a thousand tokens are 8 MB as objects."""

    packed: bytes

    @classmethod
    def of(cls, tokens: Sequence[TokenLogprob]) -> Logprobs:
        """Pack them."""
        return cls(orjson.dumps([_packed(token) for token in tokens]))

    def columns(self) -> TokenColumns:
        """The same, column by column: what a table is made of."""
        found = TokenColumns()
        for token, logprob, raw, offset, top in orjson.loads(self.packed):
            found.add(token, logprob, raw)
            found.text_offset.append(offset)
            found.alternatives.append(len(top))
            for other in top:
                found.top.add(*other)
        return found

    def __iter__(self) -> Iterator[TokenLogprob]:
        for token, logprob, raw, offset, top in orjson.loads(self.packed):
            others = tuple([Alternative(word, number, token_bytes(part)) for word, number, part in top])
            yield TokenLogprob(token, logprob, token_bytes(raw), offset, others)


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """What an answer holds besides its text; None: it has no such part."""

    tool_calls: tuple[ToolCall, ...] | None = None
    reasoning: str | None = None
    refusal: str | None = None
    logprobs: Logprobs | None = None

    @property
    def bytes(self) -> int:
        """About how much memory they take."""
        texts = [self.reasoning, self.refusal]
        texts += [text for call in self.tool_calls or () for text in (call.id, call.type, call.name, call.arguments)]
        return sum(getsizeof(text) for text in texts if text) + (len(self.logprobs.packed) if self.logprobs else 0)


NO_PARTS = AnswerParts()


def _packed(token: TokenLogprob) -> list[Any]:
    top = [[other.token, other.logprob, _numbers(other.bytes)] for other in token.top_logprobs]
    return [token.token, token.logprob, _numbers(token.bytes), token.text_offset, top]


def token_bytes(value: Any) -> bytes | None:
    """A token's UTF-8 bytes, which JSON carries as numbers; a token may be a part of a character."""
    if not isinstance(value, list | None):
        raise TypeError("expected a list")
    return None if value is None else bytes(value)


def _numbers(value: bytes | None) -> list[int] | None:
    return None if value is None else list(value)
