"""What of an answer a stream has sent already: its reasoning, its text or its tool call, piece by piece."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from gpu_runner.simulator.replies import Answer, usage
from gpu_runner.simulator.request_bodies import Request


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


class Stream(Protocol):
    """The events of one request, as its choices are generated."""

    def first(self) -> bytes:
        """What comes before the first token."""

    def progress(self, index: int, generated: int) -> bytes:
        """What comes with the first tokens of a choice and was not sent yet."""

    def end(self, index: int, *, finished: bool) -> bytes:
        """The rest of a choice. `finished` False: without saying why it ends."""

    def last(self, *, finished: bool) -> bytes:
        """What comes after all choices."""


class Chunks:
    """Implements Stream for chats and completions."""

    def __init__(self, request: Request, answers: Sequence[Answer], model: str, name: str, created: int) -> None:
        self._request, self._answers = request, answers
        self._pieces = [Pieces(answer) for answer in answers]
        self._chat = request.endpoint == "chat"
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        self._head = {"id": name, "object": kind, "created": created, "model": model}

    def first(self) -> bytes:
        """The events that open the choices of a chat; nothing for a text completion."""
        if not self._chat:
            return b""
        opening = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return b"".join(self._event({"index": index, **opening}) for index in range(len(self._answers)))

    def progress(self, index: int, generated: int) -> bytes:
        """Text, reasoning and arguments up to these tokens."""
        return b"".join(self._of(index, piece) for piece in self._pieces[index].until(generated))

    def end(self, index: int, *, finished: bool) -> bytes:
        """The rest; the last text stands beside the finish reason."""
        rest, answer = self._pieces[index].rest(), self._answers[index]
        text = rest.pop().text if rest and rest[-1].part is PieceKind.TEXT else ""
        events = [self._of(index, piece) for piece in rest]
        body: dict[str, Any] = {"text": text} if not self._chat else {"delta": {"content": text}}
        if answer.tool_call is not None:
            body = {"delta": {}}
        reason = answer.finish_reason if finished else None
        return b"".join([*events, self._event({"index": index, **body, "logprobs": None, "finish_reason": reason})])

    def last(self, *, finished: bool) -> bytes:
        """The usage if asked for, and [DONE]."""
        done = b"data: [DONE]\n\n"
        if not self._request.include_usage:
            return done
        tokens = usage(self._request.prompt_tokens, sum([answer.tokens for answer in self._answers]))
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": tokens}) + b"\n\n" + done

    def _of(self, index: int, piece: Piece) -> bytes:
        if not self._chat:
            return self._choice(index, {"text": piece.text})
        if piece.part is not PieceKind.TOOL_CALL:
            name = "content" if piece.part is PieceKind.TEXT else "reasoning"
            return self._choice(index, {"delta": {name: piece.text}})
        call: dict[str, Any] = {"index": 0, "function": {"arguments": piece.text}}
        event = self._choice(index, {"delta": {"tool_calls": [call]}})
        return self._call(index) + event if piece.begins else event

    def _call(self, index: int) -> bytes:
        """The event that opens a tool call: its name, without arguments."""
        said = self._answers[index].tool_call
        assert said is not None
        opening = {"index": 0, **said, "function": {**said["function"], "arguments": ""}}
        return self._choice(index, {"delta": {"tool_calls": [opening]}})

    def _choice(self, index: int, body: dict[str, Any]) -> bytes:
        return self._event({"index": index, **body, "logprobs": None, "finish_reason": None})

    def _event(self, choice: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps({**self._head, "choices": [choice]}) + b"\n\n"
