"""Numbers and short words in what a server sends, checked before anything is built on them. Pure functions.

A server is outside data: one count of 1e30 must cost one row, not the batch that it would be stored with. What is not
as expected is a ValueError; the caller decides what that means. JSON itself brings no NaN, no infinity and no lone
surrogate: orjson refuses those.
"""

from __future__ import annotations

from array import array
from math import hypot, isfinite
from typing import Any

# Tokens of one answer. Sums of these over any dataset fit the int64 columns they are stored in.
MOST_TOKENS = (1 << 31) - 1
# Vectors are stored as float32; a larger number would become infinite there.
LARGEST_FLOAT32 = 3.4028234663852886e38
LONGEST_VECTOR = 65_536
# vLLM's and OpenAI's reasons have at most 14 letters.
LONGEST_REASON = 64
LONGEST_NAME = 512
# Figures of a metrics page: beyond 2^53 a counter of floats no longer counts.
MOST_COUNTED = float(1 << 53)
LATEST_SECONDS = 1e11
MOST_RETRY_SECONDS = 3600.0


def token_count(value: Any) -> int:
    """Tokens as `usage` tells them; None, where a server tells nothing, is 0."""
    if value is None:
        return 0
    if type(value) is float and value.is_integer():  # as some servers in JavaScript write it
        value = int(value)
    if type(value) is not int or not 0 <= value <= MOST_TOKENS:
        raise ValueError("expected a number of tokens")
    return value


def cached_count(usage: Any, prompt_tokens: int) -> int:
    """Of the tokens of a prompt those that the engine had in its cache, as `usage` tells them; 0 where it does not.

    Only a price hangs on it: what is no number, or more than the prompt, makes no answer unusable.
    """
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return min(cached, prompt_tokens) if type(cached) is int and cached > 0 else 0


def finish_word(value: Any) -> str:
    """A finish_reason."""
    if not isinstance(value, str) or len(value) > LONGEST_REASON:
        raise ValueError("expected a finish_reason")
    return value


def vector_of(numbers: Any) -> tuple[float, ...]:
    """An embedding: 1 to 65,536 numbers that float32 can hold, as their norm. Raises TypeError for other things."""
    if type(numbers) is not list or not 0 < len(numbers) <= LONGEST_VECTOR:
        raise ValueError("expected a vector")
    if not hypot(*numbers) <= LARGEST_FLOAT32:  # the fastest look at every number
        raise ValueError("expected numbers that float32 can hold")
    return tuple(numbers) if set(map(type, numbers)) == {float} else tuple(array("d", numbers))


def context_length(value: Any) -> int | None:
    """A model's `max_model_len`; None where it is not told, or is no number of tokens."""
    return value if type(value) is int and 0 < value <= MOST_TOKENS else None


def short_name(value: Any) -> str:
    """A name or version as a server tells it; empty when it is none that could be shown and stored."""
    return value if isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable() else ""


def metric(text: bytes) -> float:
    """A figure of a Prometheus page that counts or measures something: finite, 0 or more."""
    value = float(text)
    if not 0.0 <= value <= MOST_COUNTED:
        raise ValueError("expected a figure of 0 or more")
    return value


def unix_seconds(text: bytes) -> float | None:
    """A moment in Unix seconds, or None when it cannot be one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 < value <= LATEST_SECONDS else None


def wait_seconds(value: float) -> float | None:
    """How long a server wants to be left alone: an hour at most. None when it is no number."""
    return min(max(0.0, value), MOST_RETRY_SECONDS) if isfinite(value) else None
