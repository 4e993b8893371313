"""Parts of simulated answers besides the text, in vLLM's shapes: tool calls, reasoning, log-probabilities.

They grow from the request's key, as the text does: the same request always gets the same parts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from gpu_runner.simulator import generated_text
from gpu_runner.simulator.schema import instance

MOST_LOGPROBS = 20
REASONING_WORDS = 12


@dataclass(frozen=True, slots=True)
class Asked:
    """Which parts a request asks for. `logprobs`: how many alternatives of each token; None: no log-probabilities.

    `tools`: those of which one may be called. `must_call`: the answer is a call. `thinks`: it begins with reasoning.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    must_call: bool = False
    logprobs: int | None = None
    thinks: bool = False


NOTHING = Asked()


def tool_call(asked: Asked, key: bytes) -> dict[str, Any] | None:
    """A call of one of the tools; with a free choice, every second request is answered by one."""
    rng = Random(key)
    if not asked.tools or not (asked.must_call or rng.random() < 0.5):
        return None
    function = rng.choice(asked.tools)["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    arguments = orjson.dumps(instance(parameters, rng)).decode()
    name = f"chatcmpl-tool-{hashlib.sha256(key).hexdigest()[:16]}"
    return {"id": name, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def reasoning(asked: Asked, key: bytes) -> str | None:
    """What the model thinks first."""
    return generated_text.words(hashlib.sha256(b"reasoning" + key).digest(), REASONING_WORDS) if asked.thinks else None


def chat_logprobs(asked: Asked, answered: str) -> dict[str, Any] | None:
    """The `logprobs` of a chat choice."""
    if asked.logprobs is None:
        return None
    content = []
    for token, logprob, others in _tokens(answered, asked.logprobs):
        top = [_entry(word, number) for word, number in others]
        content.append({**_entry(token, logprob), "top_logprobs": top})
    return {"content": content}


def completion_logprobs(asked: Asked, answered: str) -> dict[str, Any] | None:
    """The `logprobs` of a text completion's choice."""
    if asked.logprobs is None:
        return None
    found = list(_tokens(answered, asked.logprobs))
    tokens = [token for token, _, _ in found]
    return {
        "text_offset": [sum(map(len, tokens[:at])) for at in range(len(tokens))],
        "token_logprobs": [logprob for _, logprob, _ in found],
        "tokens": tokens,
        "top_logprobs": [dict(others) for _, _, others in found],
    }


def _tokens(answered: str, alternatives: int) -> Sequence[tuple[str, float, list[tuple[str, float]]]]:
    """A token is a word with the space before it. The answer's own token is the likeliest."""
    found = []
    for token in re.findall(r"\s*\S+|\s+$", answered):
        rng = Random(token)
        logprob = -rng.random()
        others = [(token, logprob)]
        words = [f" {word}" for word in generated_text.WORDS[: MOST_LOGPROBS + 1] if f" {word}" != token]
        for number in range(1, alternatives):
            # The last of many is impossible: vLLM writes -9999 for it.
            others.append((words[number], -9999.0 if number == MOST_LOGPROBS - 1 else logprob - number))
        found.append((token, logprob, others[:alternatives]))
    return found


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
