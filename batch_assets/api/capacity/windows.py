"""The windows of open batches as one question to the planner, which takes one amount of work and one deadline. Pure.

Lines are sent in the order of `execution.batch_queue`: higher priority first, tenants in equal shares counted in rows,
within a tenant the window that ends first. So a window is kept when an amount of work is done by its end: its own lines
and all that may go before the last of them (`demands_of`). A fleet keeps all windows when it has done each amount by
each end. That is the processor demand criterion (Baruah, Rosier, Howell, Real-Time Systems 1990) for work that is there
from the start, with what fair queueing sends first in place of "what ends first".

`binding_demand` names the one amount that the others follow from. Let C(t) be what a fleet has done after t seconds.

- Instances that answer already: C(t) = s × t. C(d) ≥ w for the greatest w / d gives C(t) ≥ w / d × t, which is enough
  for all. This is the critical interval of Yao, Demers and Shenker (FOCS 1995) for jobs that all arrive now.
- New instances answer after b seconds, beside held ones that do H(t): C(t) = H(t) + s × (t - b). By the same argument
  for w - H(d) and d - b, the greatest (w - H(d)) / (d - b) is enough for all that end after b. What ends before b no
  new instance can help.

Both are exact. With offers of different boots b is the shortest one: then ends after the binding one are kept all the
same, because (t - b') / (t - b) rises with t for each longer boot b'; one before it is seen at the next look, when the
boots that were ordered are part of H.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpu_runner.planner.types import HeldInstance


@dataclass(frozen=True, slots=True)
class WindowWork:
    """Lines left of a tenant's batches of one priority, `seconds` before their window ends, and their tokens."""

    tenant: str
    priority: int
    seconds: float
    rows: int
    tokens: float


@dataclass(frozen=True, slots=True)
class Demand:
    """`tokens` of `rows` lines are to be done in `seconds`. `helped`: a new instance would answer before that."""

    seconds: float
    rows: int
    tokens: float
    helped: bool = True


@dataclass(frozen=True, slots=True)
class _Line:
    """One tenant's windows in the order in which they end: sums of rows and of tokens up to each."""

    rows: Sequence[int]
    tokens: Sequence[float]

    def first(self, rows: int) -> tuple[int, float]:
        """(rows, tokens) of at most so many of its first rows."""
        at = bisect.bisect_left(self.rows, rows)
        if at == len(self.rows):
            return self.rows[-1], self.tokens[-1]
        before = (0, 0.0) if at == 0 else (self.rows[at - 1], self.tokens[at - 1])
        share = (rows - before[0]) / (self.rows[at] - before[0])
        return rows, before[1] + share * (self.tokens[at] - before[1])


def demands_of(windows: Iterable[WindowWork]) -> list[Demand]:
    """For each window what is to be done by its end, in the order of the queue, the earliest end first.

    Tenants are taken to begin with equal shares. Of two demands with one end the greater stays.
    """
    by_priority: defaultdict[int, defaultdict[str, list[WindowWork]]] = defaultdict(lambda: defaultdict(list))
    for window in windows:
        if window.rows > 0:
            by_priority[window.priority][window.tenant].append(window)
    found: dict[float, Demand] = {}
    above = Demand(0.0, 0, 0.0)
    for priority in sorted(by_priority, reverse=True):
        tenants = {name: sorted(own, key=lambda one: one.seconds) for name, own in by_priority[priority].items()}
        lines = {name: _line(own) for name, own in tenants.items()}
        for name, own in tenants.items():
            for number, window in enumerate(own):
                rows, tokens = _before(lines, lines[name].rows[number])
                demand = Demand(window.seconds, above.rows + rows, above.tokens + tokens)
                if (known := found.get(window.seconds)) is None or known.tokens < demand.tokens:
                    found[window.seconds] = demand
        every = [(line.rows[-1], line.tokens[-1]) for line in lines.values()]
        above = Demand(0.0, above.rows + sum(rows for rows, _ in every), above.tokens + sum(one for _, one in every))
    return [found[seconds] for seconds in sorted(found)]


def _line(windows: Sequence[WindowWork]) -> _Line:
    rows = list(itertools.accumulate(window.rows for window in windows))
    return _Line(rows, list(itertools.accumulate(window.tokens for window in windows)))


def _before(lines: Mapping[str, _Line], rows: int) -> tuple[int, float]:
    """What equal shares send until a tenant has had so many rows: as many of each other one, if it has them."""
    parts = [line.first(rows) for line in lines.values()]
    return sum(part for part, _ in parts), sum(tokens for _, tokens in parts)


def done_by(held: Iterable[HeldInstance], seconds: float) -> float:
    """Tokens that these instances do within so many seconds, at the speeds that are expected of them."""
    return sum(one.option.tokens_per_second * max(0.0, seconds - one.ready_in) for one in held)


def binding_demand(demands: Sequence[Demand], held: Sequence[HeldInstance], boot_seconds: float) -> Demand | None:
    """The demand that all others follow from, for a fleet that may grow, or may be enough; None: there is none.

    `boot_seconds`: the shortest of what can be rented now.
    """
    open_ones = [one for one in demands if one.seconds > 0]
    if not open_ones:
        return None
    helped = [one for one in open_ones if one.seconds > boot_seconds]
    if helped:
        most = max(helped, key=lambda one: _lack(one, held, boot_seconds))
        if _lack(most, held, boot_seconds) > 0 or any(one.ready_in > 0 for one in held):
            return most
    densest = max(open_ones, key=lambda one: one.tokens / one.seconds)
    return densest if densest in helped else Demand(densest.seconds, densest.rows, densest.tokens, helped=False)


def _lack(one: Demand, held: Sequence[HeldInstance], boot_seconds: float) -> float:
    """Tokens per second that new instances would have to do."""
    return (one.tokens - done_by(held, one.seconds)) / (one.seconds - boot_seconds)
