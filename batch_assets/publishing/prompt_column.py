"""The column `prompt` of a published table: what each row asked, as rendered.

For chat it is a list of messages, each with `role` and `content`, as `datasets`, TRL and chat templates take it; where
the messages come from a column (`prompt.messages_from`), with what else OpenAI's messages have, and a list of content
parts is the JSON text of that list. Of a conversation of several turns it is the last request, with all answers but
the last. For completions and embeddings it is the text; of a pair to score, and of documents to rank, the JSON text of
both. It is not called `messages`: trainers take a column of that name for whole conversations, with their answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from batch_assets.snapshot.prompts.messages import without_media_bytes
from gpu_runner.rows import Task
from resources.store.table_types import prompt_type

PROMPT = "prompt"
Message = dict[str, Any]


def decoded_prompts(
    stored: pa.ChunkedArray, task: Task, *, conversations: bool = False, images: bool = False
) -> pa.ChunkedArray:
    """Prompts as a table has them, from the JSON that a snapshot holds. Decoded outside of Python: 10 µs a row.
    `conversations` as in `prompt_type`: these are decoded in Python. `images`: of data URLs only the digest is kept.
    """
    import polars as pl

    if conversations and task == "chat":
        messages = map(orjson.loads, stored.to_pylist())
        return _written(map(without_media_bytes, messages) if images else messages, conversations=True)
    if task in ("score", "rerank"):
        return stored.cast(pa.string())
    text = pl.Series(pl.from_arrow(stored.cast(pa.large_string())))
    messages_type = pl.List(pl.Struct({"role": pl.String, "content": pl.String}))
    decoded = text.str.json_decode(messages_type if task == "chat" else pl.String)
    return pa.chunked_array([decoded.to_arrow().cast(prompt_type(task))], prompt_type(task))


def last_requests(
    stored: pa.ChunkedArray, said: pa.ChunkedArray, turns: pa.ChunkedArray, *, conversations: bool, images: bool = False
) -> pa.ChunkedArray:
    """Prompts as a table has them, of conversations: each with the answers before the last, and what the user said to
    them. `said`: all that the user says, as a snapshot holds it; `turns`: the column of outcomes. `images` as in
    `decoded_prompts`.
    """
    requests = (
        last_request(orjson.loads(prompt), orjson.loads(texts), [(one["user"], one["output"]) for one in found or ()])
        for prompt, texts, found in zip(stored.to_pylist(), said.to_pylist(), turns.to_pylist(), strict=True)
    )
    return _written(map(without_media_bytes, requests) if images else requests, conversations=conversations)


def last_request(prompt: list[Message], said: Sequence[str], turns: Sequence[tuple[str, str | None]]) -> list[Message]:
    """The messages of the last request of a conversation. `said`: what the user says, of which `prompt` ends with the
    first, as far as that was known before; `turns`: what the user said, and the answer, if it came.
    """
    messages = list(prompt)
    texts = [*(text for text, _ in turns), *said[len(turns) :]]
    for (_, answer), text in zip(turns, texts[1:], strict=False):
        messages += ({"role": "assistant", "content": answer}, {"role": "user", "content": text})
    return messages


def _written(prompts: Iterable[list[Message]], *, conversations: bool) -> pa.ChunkedArray:
    kind = prompt_type("chat", conversations=conversations)
    return pa.chunked_array([pa.array(map(_texts, prompts), kind)], kind)


def _texts(messages: list[Message]) -> list[Message]:
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = orjson.dumps(message["content"]).decode()
    return messages


def prompt_bytes(prompts: pa.ChunkedArray) -> Any:
    """Bytes of each prompt's texts, as a NumPy array of 64-bit integers."""
    found = [_array_bytes(chunk) for chunk in prompts.chunks]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _array_bytes(prompts: pa.Array) -> Any:
    if not pa.types.is_list(prompts.type):
        return _lengths(prompts)
    ends = np.cumsum(_lengths(prompts.flatten().field("content")))
    before = np.concatenate([[0], ends])
    counts = np.asarray(pc.fill_null(pc.list_value_length(prompts), 0))
    lasts = np.cumsum(counts)
    return before[lasts] - before[lasts - counts]


def _lengths(texts: pa.Array) -> Any:
    return np.asarray(pc.fill_null(pc.binary_length(texts), 0)).astype(np.int64)
