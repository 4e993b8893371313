"""What a run may ask of its endpoint: tags of the run, which options of `batch-assets run` write."""

from __future__ import annotations

import math
from collections.abc import Mapping

from batch_assets.spec.request_options import InvalidTag
from batch_assets.tags import CONCURRENCY_TAG, REQUESTS_PER_MINUTE_TAG, TIMEOUT_TAG, TOKENS_PER_MINUTE_TAG
from gpu_runner.request_limits import RequestLimits

LIMIT_TAGS = (TIMEOUT_TAG, CONCURRENCY_TAG, REQUESTS_PER_MINUTE_TAG, TOKENS_PER_MINUTE_TAG)
LARGEST = 10**12


def endpoint_limits(tags: Mapping[str, str]) -> RequestLimits:
    """What the tags say. Raises InvalidTag."""
    concurrency, requests, tokens = (_count(tag, tags.get(tag)) for tag in LIMIT_TAGS[1:])
    return RequestLimits(_seconds(tags.get(TIMEOUT_TAG)), concurrency, requests, tokens)


def limit_tags(limits: RequestLimits) -> dict[str, str]:
    """The tags that say this."""
    said = (limits.timeout, limits.concurrency, limits.requests_per_minute, limits.tokens_per_minute)
    return {tag: f"{value}" for tag, value in zip(LIMIT_TAGS, said, strict=True) if value is not None}


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LARGEST:
        raise InvalidTag(TIMEOUT_TAG, f"expected seconds above 0, found {text[:80]!r}")
    return seconds


def _count(tag: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 12 and int(text) >= 1):
        raise InvalidTag(tag, f"expected a whole number from 1 to {LARGEST - 1}, found {text[:80]!r}")
    return int(text)
