"""What of an answer a stream has sent already: its reasoning, its text or its tool call, piece by piece."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gpu_runner.simulator.replies import Answer


class PieceKind(enum.Enum):
    """A part of an answer."""

    REASONING = "reasoning"
    TEXT = "text"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class Piece:
    """Characters of a part; `begins`: the first of them."""

    part: PieceKind
    text: str
    begins: bool


class Pieces:
    """The pieces of one answer. Its characters come evenly with its tokens."""

    def __init__(self, answer: Answer) -> None:
        self._left: list[tuple[PieceKind, str]] = []
        if answer.reasoning:
            self._left.append((PieceKind.REASONING, answer.reasoning))
        if answer.tool_call is not None:
            self._left.append((PieceKind.TOOL_CALL, answer.tool_call["function"]["arguments"]))
        else:
            self._left.append((PieceKind.TEXT, answer.text))
        self._characters = sum([len(text) for _, text in self._left])
        self._tokens = max(1, answer.tokens)
        self._sent, self._begun = 0, False

    def until(self, generated: int) -> list[Piece]:
        """What comes with the first `generated` tokens and was not taken yet."""
        return self._until(self._characters * generated // self._tokens, whole=False)

    def rest(self) -> list[Piece]:
        """All that was not taken yet; a part without a character begins all the same."""
        return self._until(self._characters, whole=True)

    def _until(self, end: int, *, whole: bool) -> list[Piece]:
        found: list[Piece] = []
        while self._left:
            part, left = self._left[0]
            text = left[: max(0, end - self._sent)]
            if not text and not whole:
                break
            if text or not self._begun:
                found.append(Piece(part, text, not self._begun))
            self._sent, self._begun = self._sent + len(text), True
            if len(text) < len(left):
                self._left[0] = part, left[len(text) :]
                break
            self._left.pop(0)
            self._begun = False
        return found
