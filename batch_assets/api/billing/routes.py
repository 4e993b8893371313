"""`/v1/organization/usage/…` and `/v1/organization/costs`: what the caller's tenant used, and what it is charged.

Shapes as in the stock client (openai-python 3.54, `types/admin/organization`): pages of buckets of a day, each with one
result per group. The organization is the tenant; what we do not keep (projects, users, keys) is null.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from batch_assets.api.billing.usage import INTERACTIVE, Kind, Used, day_of, midnight
from batch_assets.api.billing.usage_ledger import UsageLedger, UsageLine
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.callers import Caller, Scope, caller_with

DAY = 86_400
USAGE_DAYS, COST_DAYS, DEFAULT_DAYS = 31, 180, 7
LAST_MOMENT = 4_102_444_800  # 2100
MOST_VALUES = 100

router = APIRouter(prefix="/v1/organization", tags=["usage"])
Reader = Annotated[Caller, Depends(caller_with(Scope.USAGE_READ))]
Moment = Annotated[int, Query(ge=0, le=LAST_MOMENT)]


@dataclass(frozen=True, slots=True)
class _Asked:
    """The days of a page, `after`: the first day behind them that was asked for, too."""

    days: Sequence[datetime.date]
    after: datetime.date | None


@router.get("/usage/completions")
async def completions_usage(
    request: Request, caller: Reader, start_time: Moment, end_time: Moment | None = None, page: str | None = None
) -> dict[str, Any]:
    """Tokens of chat completions, completions and responses by day."""
    return await _usage(request, caller, Kind.COMPLETIONS, start_time, end_time, page)


@router.get("/usage/embeddings")
async def embeddings_usage(
    request: Request, caller: Reader, start_time: Moment, end_time: Moment | None = None, page: str | None = None
) -> dict[str, Any]:
    """Tokens of embeddings by day."""
    return await _usage(request, caller, Kind.EMBEDDINGS, start_time, end_time, page)


@router.get("/costs")
async def costs(
    request: Request, caller: Reader, start_time: Moment, end_time: Moment | None = None, page: str | None = None
) -> dict[str, Any]:
    """US dollars by day; grouped by `line_item`: by model and class."""
    groups = _values(request, "group_by", ("line_item",))
    asked = _days(request, start_time, end_time, page, COST_DAYS)
    lines = await _lines(request, caller, asked)

    def group(line: UsageLine) -> tuple[str | None, ...]:
        return (f"{line.key.model}, {line.key.service_class}" if "line_item" in groups else None,)

    return _page(asked, lines, group, _cost)


async def _usage(
    request: Request, caller: Caller, kind: Kind, start: int, end: int | None, page: str | None
) -> dict[str, Any]:
    groups = _values(request, "group_by", ("model", "batch", "service_tier"))
    models = _values(request, "models", None)
    batch = _flag(request, "batch")
    asked = _days(request, start, end, page, USAGE_DAYS)
    found = [
        line
        for line in await _lines(request, caller, asked)
        if line.key.kind is kind
        and (not models or line.key.model in models)
        and (batch is None or batch == (line.key.service_class != INTERACTIVE))
    ]

    def group(line: UsageLine) -> tuple[str | bool | None, ...]:
        return (
            line.key.model if "model" in groups else None,
            line.key.service_class != INTERACTIVE if "batch" in groups else None,
            line.key.service_class if "service_tier" in groups else None,
        )

    shown = _completions if kind is Kind.COMPLETIONS else _embeddings
    return _page(asked, found, group, shown)


async def _lines(request: Request, caller: Caller, asked: _Asked) -> list[UsageLine]:
    ledger: UsageLedger = request.app.state.ledger
    if not asked.days:
        return []
    until = asked.days[-1] + datetime.timedelta(days=1)
    return await asyncio.to_thread(ledger.lines, caller.tenant, asked.days[0], until)


def _page(
    asked: _Asked,
    lines: Sequence[UsageLine],
    group: Callable[[UsageLine], tuple[Any, ...]],
    shown: Callable[[tuple[Any, ...], Used], Mapping[str, Any]],
) -> dict[str, Any]:
    by_day: dict[datetime.date, dict[tuple[Any, ...], Used]] = {day: {} for day in asked.days}
    for line in lines:
        groups = by_day[line.key.day]
        key = group(line)
        groups[key] = groups.get(key, Used()).plus(line.used)
    data = [
        {
            "object": "bucket",
            "start_time": midnight(day),
            "end_time": midnight(day) + DAY,
            "results": [shown(key, groups[key]) for key in sorted(groups, key=str)],
        }
        for day, groups in by_day.items()
    ]
    after = None if asked.after is None else str(midnight(asked.after))
    return {"object": "page", "data": data, "has_more": after is not None, "next_page": after}


def _completions(key: tuple[Any, ...], used: Used) -> dict[str, Any]:
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": used.input_tokens,
        "output_tokens": used.output_tokens,
        "input_cached_tokens": used.cached_tokens,
        "num_model_requests": used.requests,
        **_labels(key),
        "batch": key[1],
        "service_tier": key[2],
    }


def _embeddings(key: tuple[Any, ...], used: Used) -> dict[str, Any]:
    return {
        "object": "organization.usage.embeddings.result",
        "input_tokens": used.input_tokens,
        "num_model_requests": used.requests,
        **_labels(key),
    }


def _labels(key: tuple[Any, ...]) -> dict[str, Any]:
    return {"project_id": None, "user_id": None, "api_key_id": None, "model": key[0]}


def _cost(key: tuple[Any, ...], used: Used) -> dict[str, Any]:
    return {
        "object": "organization.costs.result",
        "amount": {"value": used.usd, "currency": "usd"},
        "line_item": key[0],
        "project_id": None,
    }


def _days(request: Request, start: int, end: int | None, page: str | None, most: int) -> _Asked:
    """The days of this page. Raises ApiError 400."""
    width = request.query_params.get("bucket_width", "1d")
    if width != "1d":
        raise _invalid("bucket_width", "'1d': usage is kept by day")
    text = request.query_params.get("limit", str(DEFAULT_DAYS))
    if not text.isdecimal() or len(text) > 5 or not 1 <= int(text) <= most:
        raise _invalid("limit", f"a whole number from 1 to {most}")
    until = int(time.time()) + 1 if end is None else end
    if until <= start:
        raise _invalid("end_time", "a time after start_time")
    first = start
    if page is not None:
        if not page.isdecimal() or len(page) > 11 or not start <= int(page) < until:
            raise _invalid("page", "the `next_page` of an answer before")
        first = int(page)
    begin, last = day_of(first), day_of(until - 1)
    count = min(int(text), (last - begin).days + 1)
    days = [begin + datetime.timedelta(days=number) for number in range(count)]
    after = days[-1] + datetime.timedelta(days=1)
    return _Asked(days, after if after <= last else None)


def _values(request: Request, name: str, known: Sequence[str] | None) -> list[str]:
    """Values of a parameter that may come several times, as `name` or `name[]`. Raises ApiError 400."""
    query = request.query_params
    found = [*query.getlist(name), *query.getlist(f"{name}[]")]
    if len(found) > MOST_VALUES:
        raise _invalid(name, f"at most {MOST_VALUES} values")
    if known is not None and (unknown := set(found) - set(known)):
        raise _invalid(name, f"one of {', '.join(known)}, found '{min(unknown)[:40]}'")
    return found


def _flag(request: Request, name: str) -> bool | None:
    text = request.query_params.get(name)
    if text not in (None, "true", "false"):
        raise _invalid(name, "true or false")
    return None if text is None else text == "true"


def _invalid(name: str, expected: str) -> ApiError:
    return ApiError(400, f"Invalid value for '{name}': expected {expected}.", param=name, code="invalid_value")
