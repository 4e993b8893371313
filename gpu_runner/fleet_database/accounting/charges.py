"""The payer of each second of an instance: bills cut by lease, dataset and day. Pure: the time is an argument.

An instance's life is cut where leases begin: from the start of one to the start of the next it is the first one's
dataset's, with the boot before the first lease's start and the idle time after its end. So the charges of all datasets
add up to the bills, and their parts to those of `split_bill`.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gpu_runner.fleet_database.accounting.bill_split import Split, Timeline, bill_end, lease_parts, usd_per_second


@dataclass(frozen=True, slots=True)
class Work:
    """What a lease did, and for whom."""

    dataset: str
    rows: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Bill:
    """One instance: what it is, when it ran, and the work of each of its leases. `dataset`: who ordered it."""

    instance: str
    provider: str
    instance_type: str
    gpu: str
    gpus: int
    spot: bool
    price_per_hour: float
    clock: float
    dataset: str
    line: Timeline
    work: Sequence[Work]


@dataclass(frozen=True, slots=True)
class Charge:
    """A stretch of an instance's life that one dataset pays for, of even use: a boot, a lease, or what came after it.

    `began` and `ended` in Unix seconds of the database's clock; `seconds` are real ones and add up to its length.
    `by_tokens`: a lease of an engine that is paid by the token, and what that cost. Such a charge is never cut: all of
    it belongs to the moment at which it began.
    """

    dataset: str
    instance: str
    provider: str
    instance_type: str
    gpu: str
    gpus: int
    spot: bool
    usd_per_second: float
    began: float
    ended: float
    seconds: Split
    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    by_tokens: Split | None = None

    @property
    def usd(self) -> Split:
        """US dollars by what they went into."""
        if self.by_tokens is not None:
            return self.by_tokens
        return self.seconds.times(self.usd_per_second)

    def between(self, since: float, until: float) -> Charge | None:
        """The part of the charge in `since` ≤ time < `until`, its rows and tokens by time; None when there is none."""
        if self.by_tokens is not None:
            return self if since <= self.began < until else None
        began, ended = max(self.began, since), min(self.ended, until)
        if (began, ended) == (self.began, self.ended) and began < until:
            return self
        if began >= ended:
            return None
        length = self.ended - self.began
        first, last = (began - self.began) / length, (ended - self.began) / length

        def share(count: int) -> int:
            return round(count * last) - round(count * first)

        return replace(
            self,
            began=began,
            ended=ended,
            seconds=self.seconds.times((ended - began) / length),
            rows=share(self.rows),
            prompt_tokens=share(self.prompt_tokens),
            completion_tokens=share(self.completion_tokens),
        )


@dataclass(slots=True)
class _Stretch:
    """Part of an instance's life; `lease` is the place of the lease whose dataset pays, -1 where there was none."""

    lease: int
    began: float
    ended: float
    booting: bool = False
    works: bool = False
    useful: float = 0.0
    wasted: float = 0.0

    def take(self, useful: float, wasted: float) -> tuple[float, float]:
        """Fill in as much as there is room for; returns what is left."""
        room = 0.0 if self.booting else self.ended - self.began - self.useful - self.wasted
        more_useful = max(0.0, min(useful, room))
        more_wasted = max(0.0, min(wasted, room - more_useful))
        self.useful += more_useful
        self.wasted += more_wasted
        return useful - more_useful, wasted - more_wasted


def charges(bills: Iterable[Bill], now: float, since: float | None = None) -> list[Charge]:
    """Charges of all bills, those of an instance in the order of time; with `since` only what accrued from then on."""
    found = (charge for bill in bills for charge in _charges(bill, now))
    if since is None:
        return list(found)
    return [part for charge in found if (part := charge.between(since, math.inf)) is not None]


def _charges(bill: Bill, now: float) -> Iterator[Charge]:
    stretches = _stretches(bill.line, now)
    _fill(stretches, lease_parts(bill.line, now))
    never_ready = bill.line.ready_at is None and bill.line.failed
    price = usd_per_second(bill.price_per_hour, bill.clock)
    for one in stretches:
        length = one.ended - one.began
        if not one.booting:
            seconds = Split(0.0, one.useful, max(0.0, length - one.useful - one.wasted), one.wasted)
        else:
            seconds = Split(wasted=length) if never_ready else Split(booting=length)
        done = bill.work[one.lease] if one.works else Work("", 0, 0, 0)
        if length > 0 or done.rows or done.prompt_tokens or done.completion_tokens:
            yield Charge(
                dataset=bill.dataset if one.lease < 0 else bill.work[one.lease].dataset,
                instance=bill.instance,
                provider=bill.provider,
                instance_type=bill.instance_type,
                gpu=bill.gpu,
                gpus=bill.gpus,
                spot=bill.spot,
                usd_per_second=price,
                began=one.began,
                ended=one.ended,
                seconds=seconds,
                rows=done.rows,
                prompt_tokens=done.prompt_tokens,
                completion_tokens=done.completion_tokens,
            )


def _stretches(line: Timeline, now: float) -> list[_Stretch]:
    """The life of an instance without a gap: for each lease its boot, its time, and the time after it."""
    end = bill_end(line, now)
    ready = end if line.ready_at is None else min(max(line.ready_at, line.created_at), end)
    borders = [line.created_at]
    for lease in line.leases[1:]:
        borders.append(max(borders[-1], min(lease.acquired_at, end)))
    found: list[_Stretch] = []
    for number, (began, ended) in enumerate(pairwise([*borders, end])):
        serves = min(max(began, ready), ended)
        if not line.leases:
            return [_Stretch(-1, began, serves, booting=True), _Stretch(-1, serves, ended)]
        released = line.leases[number].ended_at
        works_until = min(max(serves, now if released is None else released), ended)
        found.append(_Stretch(number, began, serves, booting=True))
        found.append(_Stretch(number, serves, works_until, works=True))
        found.append(_Stretch(number, works_until, ended))
    return found


def _fill(stretches: Sequence[_Stretch], parts: Sequence[Split]) -> None:
    """Put each lease's seconds into its own stretch.

    The last rows of a draining lease may end in the next one's time: what has no room goes to the stretches behind it,
    or before it when those are full. There is room for all: the parts of all leases never exceed the bill.
    """
    own = [place for place, one in enumerate(stretches) if one.works]
    left = [stretches[place].take(part.useful, part.wasted) for place, part in zip(own, parts, strict=True)]
    for place, (useful, wasted) in zip(own, left, strict=True):
        for one in [*stretches[place + 1 :], *reversed(stretches[:place])]:
            if useful <= 0 and wasted <= 0:
                break
            useful, wasted = one.take(useful, wasted)


@dataclass(frozen=True, slots=True)
class SpendLine:
    """What a dataset cost on one day on one kind of instance, in US dollars. `gpus`: of each of its `instances`."""

    day: datetime.date
    provider: str
    gpu: str
    gpus: int
    spot: bool
    dataset: str
    useful_usd: float
    booting_usd: float
    idle_usd: float
    wasted_usd: float
    rows: int
    prompt_tokens: int
    completion_tokens: int
    instances: int

    @property
    def usd(self) -> float:
        """All four together."""
        return self.useful_usd + self.booting_usd + self.idle_usd + self.wasted_usd

    @property
    def tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def usd_per_1k_rows(self) -> float | None:
        """Everything included; None without a row."""
        return self.usd / self.rows * 1e3 if self.rows else None

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Everything included; None without a token."""
        return self.usd / self.tokens * 1e6 if self.tokens else None


def by_day(charges: Iterable[Charge], tz: datetime.tzinfo = datetime.UTC) -> list[SpendLine]:
    """Charges by day (of `tz`), provider, GPU, spot and dataset, in this order; they add up to all charges."""
    groups: dict[tuple[datetime.date, str, str, int, bool, str], list[Charge]] = {}
    for charge in charges:
        for day, part in _days(charge, tz):
            key = (day, part.provider, part.gpu, part.gpus, part.spot, part.dataset)
            groups.setdefault(key, []).append(part)
    return [_line(key, groups[key]) for key in sorted(groups)]


def _days(charge: Charge, tz: datetime.tzinfo) -> Iterator[tuple[datetime.date, Charge]]:
    """The charge cut at midnights. Works on days of 23 and 25 hours."""
    day = datetime.datetime.fromtimestamp(charge.began, tz).date()
    began = charge.began
    while True:
        following = day + datetime.timedelta(days=1)
        midnight = datetime.datetime.combine(following, datetime.time(), tz).timestamp()
        part = charge.between(began, midnight)
        if part is not None:
            yield day, part
        if midnight >= charge.ended:
            return
        day, began = following, midnight


def _line(key: tuple[datetime.date, str, str, int, bool, str], group: Sequence[Charge]) -> SpendLine:
    usd = [charge.usd for charge in group]
    return SpendLine(
        *key,
        useful_usd=sum(part.useful for part in usd),
        booting_usd=sum(part.booting for part in usd),
        idle_usd=sum(part.idle for part in usd),
        wasted_usd=sum(part.wasted for part in usd),
        rows=sum(charge.rows for charge in group),
        prompt_tokens=sum(charge.prompt_tokens for charge in group),
        completion_tokens=sum(charge.completion_tokens for charge in group),
        instances=len({charge.instance for charge in group}),
    )
