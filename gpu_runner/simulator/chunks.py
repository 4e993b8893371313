"""The server-sent events of streamed chats and completions, in vLLM's shape: one choice, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from gpu_runner.simulator.pieces import Piece, PieceKind, Pieces
from gpu_runner.simulator.replies import Answer, usage
from gpu_runner.simulator.request_bodies import Request


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
