"""Which requests of an engine are late, and for which of them an engine is to be asked once more. Pure.

second_requests.py asks. Rows of a trial of suspects are never late: nothing else may be in flight beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpu_runner.inference.hedging.request_durations import HedgePolicy, RequestDurations
from gpu_runner.inference.row_request import Request
from gpu_runner.inference.row_state import Item, RowState


@dataclass(frozen=True, slots=True)
class LateRequest:
    """A request whose answer is late. `asks`: its rows are to be asked for once more."""

    request: Request
    rows: tuple[Item, ...]
    asks: bool


def late_requests(
    in_flight: Mapping[Item, Request], durations: RequestDurations, policy: HedgePolicy, now: float
) -> list[LateRequest]:
    """The late ones of an engine. `in_flight`: its rows, in the order in which they were sent."""
    limits: dict[int, float | None] = {}
    found = []
    for request, rows in _old(in_flight, policy, now).items():
        size = sum(len(item.row.prompt) for item in rows)
        if size.bit_length() not in limits:
            limits[size.bit_length()] = durations.limit(size, len(in_flight))
        limit, repeats = limits[size.bit_length()], rows[0].repeats
        age = now - rows[0].sent
        if limit is not None and age >= limit:
            again = repeats < policy.most and age >= limit * 2**repeats
            found.append(LateRequest(request, tuple(rows), again and request.second is None))
    return found


def _old(in_flight: Mapping[Item, Request], policy: HedgePolicy, now: float) -> dict[Request, list[Item]]:
    """Rows that wait for their answer for the shortest time after which one may be late, by request."""
    found: dict[Request, list[Item]] = {}
    for item, request in in_flight.items():
        if now - item.sent < policy.floor_seconds:
            break
        if item.state is RowState.IN_FLIGHT and item.group is None:
            found.setdefault(request, []).append(item)
    return found
