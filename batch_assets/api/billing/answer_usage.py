"""What the answer to one line of a batch used, by its own words. Pure.

The engine's counts of prompt and completion stand beside the answer; what was cached or reasoned stands only in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from batch_assets.api.billing.usage import Tokens
from gpu_runner.rows import Outcome
from resources.store.dataset_store import BatchFooter

_DETAILS = ('"cached_tokens"', '"reasoning_tokens"')


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens of one answer. `reasoning_tokens` are among its output tokens."""

    tokens: Tokens
    reasoning_tokens: int = 0


NOTHING = AnswerUsage(Tokens())


def answer_usage(outcome: Outcome) -> AnswerUsage:
    """What a line is charged for. A line without an answer is charged nothing."""
    if not outcome.ok:
        return NOTHING
    cached = reasoning = 0
    text = outcome.output if isinstance(outcome.output, str) else ""
    if any(name in text for name in _DETAILS):
        usage = _object(_object(orjson.loads(text)).get("usage"))
        cached = _whole(_object(usage.get("prompt_tokens_details")).get("cached_tokens"))
        reasoning = _whole(_object(usage.get("completion_tokens_details")).get("reasoning_tokens"))
    prompt = outcome.prompt_tokens
    return AnswerUsage(Tokens(prompt, min(cached, prompt), outcome.completion_tokens), reasoning)


def tokens_of(outcomes: Iterable[Outcome]) -> Tokens:
    """Those of several lines together."""
    found = [answer_usage(outcome).tokens for outcome in outcomes]
    return Tokens(
        sum(one.input_tokens for one in found),
        sum(one.cached_tokens for one in found),
        sum(one.output_tokens for one in found),
    )


def object_tokens(footer: BatchFooter) -> Tokens | None:
    """What the lines of a part are charged for, as `tokens_of` its outcomes; None: only those say it."""
    prompt, completion = footer.answered_prompt_tokens, footer.answered_completion_tokens
    if footer.cached_tokens is None:  # an earlier version has written it
        return None
    if prompt is None or completion is None:  # an earlier version, which counted lines without an answer, too
        return None if footer.dead else Tokens(footer.prompt_tokens, footer.cached_tokens, footer.completion_tokens)
    return Tokens(prompt, footer.cached_tokens, completion)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
