"""`/v1/responses`: a request read as a chat, its answer as a response object, whole or as typed events.

Shapes: OpenAI's Responses API as the stock client has it (openai-python 3.54, `types/responses`). Nothing is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from gpu_runner.simulator.pieces import Piece, PieceKind, Pieces
from gpu_runner.simulator.replies import Answer
from gpu_runner.simulator.request_bodies import Request

_DEFAULTS: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}


def response_body(
    request: Request, answer: Answer, model: str, name: str, created: int, *, finished: bool = True
) -> bytes:
    """The whole response. `finished` False: it does not say that it is complete."""
    return orjson.dumps(_response(request, model, name, created, answer, finished=finished))


def _response(
    request: Request, model: str, name: str, created: int, answer: Answer | None, *, finished: bool = True
) -> dict[str, Any]:
    """`answer` None: the response is in progress."""
    cut = answer is not None and answer.finish_reason == "length"
    said = {key: request.shown.get(key) for key in _DEFAULTS}
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "status": "in_progress" if answer is None or not finished else "incomplete" if cut else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": model,
        "output": [] if answer is None else output_items(answer, name),
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "usage": None if answer is None else _usage(request.prompt_tokens, answer),
        **{key: _DEFAULTS[key] if value is None else value for key, value in said.items()},
    }


def _usage(prompt_tokens: int, answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + answer.tokens,
    }


def output_items(answer: Answer, name: str) -> list[dict[str, Any]]:
    """Reasoning, then the message or the call of a function."""
    found = [_item(PieceKind.REASONING, answer, name, answer.reasoning)] if answer.reasoning else []
    if answer.tool_call is not None:
        return [*found, _item(PieceKind.TOOL_CALL, answer, name, answer.tool_call["function"]["arguments"])]
    return [*found, _item(PieceKind.TEXT, answer, name, answer.text)]


_PREFIXES = {PieceKind.REASONING: "rs", PieceKind.TEXT: "msg", PieceKind.TOOL_CALL: "fc"}


def _item(part: PieceKind, answer: Answer, name: str, text: str | None) -> dict[str, Any]:
    """An item of the output. `text` None: it is in progress, and empty."""
    head = {"id": _PREFIXES[part] + name[name.index("_") :], "status": "in_progress" if text is None else "completed"}
    if part is PieceKind.REASONING:
        content = [] if text is None else [{"type": "reasoning_text", "text": text}]
        return {**head, "type": "reasoning", "summary": [], "content": content}
    if part is PieceKind.TEXT:
        content = [] if text is None else [_text_part(text)]
        return {**head, "type": "message", "role": "assistant", "content": content}
    assert answer.tool_call is not None
    called = answer.tool_call["function"]["name"]
    return {
        **head,
        "type": "function_call",
        "call_id": answer.tool_call["id"],
        "name": called,
        "arguments": text or "",
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseEvents:
    """The typed events of one response. Implements Stream."""

    def __init__(self, request: Request, answer: Answer, model: str, name: str, created: int) -> None:
        self._request, self._answer, self._name = request, answer, name
        self._of = (request, model, name, created)
        self._pieces = Pieces(answer)
        self._numbers, self._output = 0, -1
        self._open: tuple[PieceKind, str] | None = None  # the item under way, and its text so far

    def first(self) -> bytes:
        """The response, in progress."""
        started = _response(*self._of, None)
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def progress(self, index: int, generated: int) -> bytes:
        """Deltas up to these tokens; items begin and end with them."""
        return b"".join([self._piece(piece) for piece in self._pieces.until(generated)])

    def end(self, index: int, *, finished: bool) -> bytes:
        """The rest, and the end of the last item."""
        events = [self._piece(piece) for piece in self._pieces.rest()]
        return b"".join([*events, self._close()])

    def last(self, *, finished: bool) -> bytes:
        """The whole response. Nothing where it is not to say how it ended."""
        if not finished:
            return b""
        whole = _response(*self._of, self._answer)
        return self._event(f"response.{whole['status']}", response=whole)

    def _piece(self, piece: Piece) -> bytes:
        opening = self._begin(piece.part) if piece.begins else b""
        assert self._open is not None
        self._open = piece.part, self._open[1] + piece.text
        if not piece.text:
            return opening
        if piece.part is PieceKind.TEXT:
            return opening + self._in_text("response.output_text.delta", delta=piece.text, logprobs=[])
        if piece.part is PieceKind.REASONING:
            return opening + self._in_text("response.reasoning_text.delta", delta=piece.text)
        return opening + self._in_item("response.function_call_arguments.delta", delta=piece.text)

    def _begin(self, part: PieceKind) -> bytes:
        before = self._close()
        self._open, self._output = (part, ""), self._output + 1
        item = _item(part, self._answer, self._name, None)
        added = self._event("response.output_item.added", output_index=self._output, item=item)
        if part is not PieceKind.TEXT:
            return before + added
        return before + added + self._in_text("response.content_part.added", part=_text_part(""))

    def _close(self) -> bytes:
        """The end of the item that is under way."""
        if self._open is None:
            return b""
        part, text = self._open
        item = _item(part, self._answer, self._name, text)
        events = self._done(part, text)
        self._open = None
        return events + self._event("response.output_item.done", output_index=self._output, item=item)

    def _done(self, part: PieceKind, text: str) -> bytes:
        if part is PieceKind.TOOL_CALL:
            assert self._answer.tool_call is not None
            name = self._answer.tool_call["function"]["name"]
            return self._in_item("response.function_call_arguments.done", name=name, arguments=text)
        if part is PieceKind.REASONING:
            return self._in_text("response.reasoning_text.done", text=text)
        ended = self._in_text("response.output_text.done", text=text, logprobs=[])
        return ended + self._in_text("response.content_part.done", part=_text_part(text))

    def _in_text(self, kind: str, **fields: Any) -> bytes:
        return self._in_item(kind, content_index=0, **fields)

    def _in_item(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        item = _PREFIXES[self._open[0]] + self._name[self._name.index("_") :]
        return self._event(kind, item_id=item, output_index=self._output, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._numbers = self._numbers, self._numbers + 1
        body = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
