"""How large the answer to one row may be, from what its request asks for at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_runner.bounded_http.bounded_read import KIB, MIB
from gpu_runner.rows import POOLED, Generation

# An answer's frame: ids, usage, and what gateways add.
FRAME_BYTES = 256 * KIB
# The longest usual tokens are 128 spaces. Text has 4 to 5 bytes per token.
TOKEN_BYTES = 128
# One alternative of one token in `logprobs`: its text, its bytes as a list of numbers, a figure.
LOGPROB_BYTES = 512
NUMBER_BYTES = 32
DEFAULT_TOKENS, DEFAULT_DIMENSIONS = 32_768, 65_536
LARGEST_ANSWER = 256 * MIB
LARGEST_RANKING = 8 * MIB  # a prompt has 1 MiB; JSON may need six letters for one


def answer_limit(generation: Generation, context: int | None = None) -> int:
    """Bytes that the answer to one row may have, from what its request asks for at most.

    `context` is the engine's, in tokens, where it is known.
    """
    sampling = generation.sampling
    if generation.task == "pooling":  # a vector of each token, where the model gives them
        return LARGEST_ANSWER
    if generation.task == "rerank":  # its documents come back
        return FRAME_BYTES + LARGEST_RANKING
    if generation.task in POOLED:
        return FRAME_BYTES + NUMBER_BYTES * _whole(sampling, ("dimensions",), DEFAULT_DIMENSIONS)
    whole = context or 4 * DEFAULT_TOKENS
    most = generation.longest_answer
    tokens = most if most is not None else context or DEFAULT_TOKENS
    if sampling.get("echo") or sampling.get("return_token_ids"):
        tokens += whole
    each = TOKEN_BYTES
    asked = sampling.get("logprobs")
    if asked or (asked == 0 and asked is not False):
        each += LOGPROB_BYTES * (2 + _whole(sampling, ("top_logprobs", "logprobs"), 0))
    wanted = FRAME_BYTES + tokens * each
    if sampling.get("prompt_logprobs") is not None:
        wanted += whole * LOGPROB_BYTES * (2 + _whole(sampling, ("prompt_logprobs",), 0))
    return min(wanted, LARGEST_ANSWER)


def list_limit(one: int, inputs: int) -> int:
    """Bytes that the answer to so many inputs may have, where that to one may have `one`."""
    return min(max(one, LARGEST_ANSWER), one * inputs)


def _whole(sampling: Mapping[str, Any], names: tuple[str, ...], otherwise: int) -> int:
    """The largest of these request fields that is a whole number of 0 or more."""
    found = [value for name in names if type(value := sampling.get(name)) is int and value >= 0]
    return max(found, default=otherwise)
