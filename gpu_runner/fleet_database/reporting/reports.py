"""What the fleet's tables say: instances with their ages and holders, what each cost, how fast each was."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from gpu_runner.fleet_database.accounting.bill_end import bill_end, ended_at, existed
from gpu_runner.fleet_database.accounting.bill_split import (
    InstanceCost,
    LeaseSpan,
    Split,
    Timeline,
    shared_seconds,
    split_bill,
    usd_per_second,
)
from gpu_runner.fleet_database.accounting.charges import Bill, Charge, Work, charges
from gpu_runner.fleet_database.accounting.request_budget import payer
from gpu_runner.fleet_database.connection import INSTANCES, LEASES, Tables
from gpu_runner.fleet_database.instances import InstanceState
from gpu_runner.fleet_database.leases import NOT_ENDED, Lease
from gpu_runner.offers.speed import LengthMix, Measurement, Speed

MANY = 500  # names that go into one query
MEASURED = 100
OWN_ROWS = 250  # fewer do not fill an engine: it looks slower than it is


@dataclass(frozen=True, slots=True)
class Instance:
    """A rented instance. Ages in real seconds by the database's clock; None: it has not happened.

    `reason`: why it ends. `run_id`, `dataset`: who ordered it. `payer`: the dataset that pays for it now, idle or not.
    `seen`: the provider listed it once. `end_unproven`: it was taken for ended because it is not listed. `retiring`: it
    ends with its last lease. `notice_seconds`: until it is taken away. `idle_seconds`: since its last lease ended or it
    was ready, None while one stands on it. `lease`: the live one that does not drain, with its age; `draining`: live
    ones that do. `epoch`: of the latest lease. `usd`: the bill so far.
    """

    name: str
    provider: str
    region: str
    instance_type: str
    gpu: str
    gpus: int
    gpu_memory_gib: float
    spot: bool
    price_per_hour: float
    clock: float
    boot_seconds: float
    engine_key: str
    model: str
    max_num_seqs: int | None
    state: InstanceState
    endpoint: str | None
    machine_id: str | None
    reason: str
    run_id: str
    dataset: str
    payer: str
    seen: bool
    end_unproven: bool
    retiring: bool
    age: float
    ready_age: float | None
    ended_age: float | None
    missing_seconds: float | None
    notice_seconds: float | None
    idle_seconds: float | None
    lease: Lease | None
    lease_age: float | None
    draining: tuple[Lease, ...]
    epoch: int
    usd: float

    @property
    def leased(self) -> bool:
        """A live lease stands on it, draining or not."""
        return self.lease is not None or bool(self.draining)

    @property
    def works_for(self) -> str | None:
        """The dataset of its latest live lease, draining or not; None: nobody works on it."""
        found = [*((self.lease,) if self.lease is not None else ()), *self.draining]
        return max(found, key=lambda lease: lease.epoch).dataset if found else None


@dataclass(frozen=True, slots=True)
class Billed:
    """How much was billed so far, without saying for what. `seconds` are real ones of all instances there ever were,
    and those of use of engines that are paid by the token.

    `now`: Unix seconds by the database's clock. `standing`: instances that have not ended.
    """

    now: float
    seconds: float
    standing: int


class Reports(Tables):
    """Reads of the fleet's tables."""

    def fleet(self, *, ended: bool = False) -> list[Instance]:
        """Every instance that has not ended, or every one; oldest first."""
        return self._instances(_EVERY if ended else _NOT_ENDED)

    def fleet_of(self, provider: str, names: Collection[str] = ()) -> list[Instance]:
        """A provider's instances that have not ended, and those of its `names` that have; oldest first."""
        found = self._instances(_OF_PROVIDER, provider=provider)
        more = sorted(set(names) - {one.name for one in found})
        for start in range(0, len(more), MANY):
            found += self._instances(_OF_NAMES, provider=provider, names=more[start : start + MANY])
        return sorted(found, key=lambda one: (-one.age, one.name))

    def instance(self, name: str) -> Instance | None:
        """The instance of that name."""
        return next(iter(self._instances(_OF_NAME, name=name)), None)

    def warm(self, engine_key: str) -> list[Instance]:
        """Instances that serve `engine_key` and that a run may lease at once; cheapest first.

        One that a run is draining is among them.
        """
        found = [one for one in self._instances(_READY, engine_key=engine_key) if one.lease is None]
        return sorted(found, key=lambda one: (one.price_per_hour, one.age, one.name))

    def costs(self) -> list[InstanceCost]:
        """The bill of every instance there ever was, split; oldest first. Then those that are paid by the token."""
        with self._reading() as (connection, now):
            rows, leases = _load(connection, sa.true())
            engines = connection.execute(_BY_TOKENS).mappings().all()
        of_engines: dict[str, list[Row]] = defaultdict(list)
        for lease in engines:
            of_engines[lease["instance"]].append(lease)
        costs = [_cost(row, leases[row["name"]], now) for row in rows]
        return [*costs, *(_engine_cost(name, each) for name, each in of_engines.items())]

    def charges_of(self, dataset: str) -> list[Charge]:
        """What one dataset was ever charged. Read are only the instances that it ordered or had a lease on, and its
        leases of engines that are paid by the token.
        """
        leased = sa.select(LEASES.c.instance).where(LEASES.c.dataset == dataset)
        with self._reading() as (connection, now):
            rows, leases = _load(connection, (INSTANCES.c.dataset == dataset) | INSTANCES.c.name.in_(leased))
            engines = connection.execute(_BY_TOKENS.where(LEASES.c.dataset == dataset)).mappings().all()
        found = charges((_bill(row, leases[row["name"]], now) for row in rows), now)
        return [one for one in found if one.dataset == dataset] + [_engine_charge(lease, now) for lease in engines]

    def provider_clocks(self) -> dict[str, float]:
        """By provider of which something was ever rented: the clock of its newest instance, 1.0 where it is ours."""
        newest = sa.func.max(INSTANCES.c.created_at)
        query = sa.select(INSTANCES.c.provider, INSTANCES.c.clock).group_by(INSTANCES.c.provider, INSTANCES.c.clock)
        with self._reading() as (connection, _):
            return dict(connection.execute(query.order_by(newest)).tuples().all())

    def charges(self, since: float | None = None) -> list[Charge]:
        """Every bill, cut by dataset and use; with `since` (database's clock) only what accrued from then on."""
        which = sa.true() if since is None else INSTANCES.c.ended_at.is_(None) | (INSTANCES.c.ended_at >= since)
        with self._reading() as (connection, now):
            rows, leases = _load(connection, which)
            engines = connection.execute(_BY_TOKENS).mappings().all()
        found = charges((_bill(row, leases[row["name"]], now) for row in rows), now, since)
        by_tokens = [_engine_charge(lease, now) for lease in engines]
        return [*found, *(one for one in by_tokens if since is None or one.between(since, math.inf))]

    def engine_speeds(self, names: Collection[str], dataset: str) -> dict[str, Speed]:
        """How fast engines of fleet.yaml were while rows were in flight there, by name; those that were not used are
        left out. On rows of the dataset where there are OWN_ROWS, else on all; of the MEASURED newest leases of an
        engine.
        """
        c, found = LEASES.c, dict[str, Speed]()
        columns = (c.dataset, c.rows, c.prompt_tokens + c.completion_tokens, c.useful_seconds)
        with self._reading() as (connection, _):
            for name in names:
                used = (c.instance == name) & (c.rows > 0) & (c.useful_seconds > 0)
                newest = sa.select(*columns).where(used).order_by(c.epoch.desc()).limit(MEASURED)
                leases = connection.execute(newest).tuples().all()
                own = [lease for lease in leases if lease[0] == dataset]
                if counted := own if sum(lease[1] for lease in own) >= OWN_ROWS else leases:
                    _, rows, tokens, seconds = zip(*counted, strict=True)
                    found[name] = Speed(sum(tokens) / sum(seconds), "measured", sum(rows))
        return found

    def billed(self) -> Billed:
        """What was billed so far, added up by the database: cheap, however long the fleet's database is."""
        with self._reading() as (connection, now):
            lengths = bill_end(now) - INSTANCES.c.created_at
            standing = sa.func.count().filter(INSTANCES.c.state != "ended")
            seconds, count = connection.execute(sa.select(sa.func.sum(lengths), standing)).one()
            used = sa.func.sum(LEASES.c.useful_seconds + LEASES.c.wasted_seconds)
            engines = connection.execute(sa.select(used).where(_PAID_BY_TOKENS)).scalar()
        return Billed(now, max(0.0, seconds or 0.0) + float(engines or 0.0), count)

    def measurements(self) -> list[Measurement]:
        """How fast each model was on each kind of instance: one measurement per dataset, and so per length mix. Of the
        MEASURED newest instances of a kind: this is read all the time, and bills are kept for ever.
        """
        with self._reading() as (connection, now):
            rows, leases = _load(connection, INSTANCES.c.name.in_(_NEWEST))
        sums: dict[tuple[str, str, float, int, str], list[float]] = defaultdict(lambda: [0.0] * 4)
        for row in rows:
            line = _timeline(row, leases[row["name"]], now)
            parts = zip(leases[row["name"]], split_bill(line, now)[1], shared_seconds(line, now), strict=True)
            for lease, useful, shared in parts:
                kind = (row["model"], row["gpu"], row["gpu_memory_gib"], row["gpus"], lease["dataset"])
                seconds = (useful + shared) * row["clock"]
                added = (seconds, lease["rows"], lease["prompt_tokens"], lease["completion_tokens"])
                sums[kind] = [total + more for total, more in zip(sums[kind], added, strict=True)]
        found: list[Measurement] = []
        for (model, gpu, memory, gpus, _), (seconds, count, prompt, completion) in sums.items():
            if seconds > 0 and count > 0 and prompt + completion >= count:
                mix = LengthMix(prompt / count, completion / count)
                found.append(Measurement(model, gpu, memory, gpus, mix, prompt + completion, seconds))
        return found

    def _instances(self, query: sa.Select[Any], **parameters: str | Sequence[str]) -> list[Instance]:
        with self._reading() as (connection, now):
            rows = connection.execute(query, parameters).mappings().all()
            standing = _standing(connection, [row["name"] for row in rows], now)
        return [_instance(row, standing[row["name"]], now) for row in rows]


Row = sa.RowMapping


@dataclass(slots=True)
class _Standing:
    """An instance's live leases, and of all its leases the newest epoch and the last end."""

    live: list[Row] = field(default_factory=list)
    epoch: int = 0
    last_end: float = 0.0


def _in_order(which: sa.ColumnElement[bool]) -> sa.Select[Any]:
    return sa.select(INSTANCES).where(which).order_by(INSTANCES.c.created_at, INSTANCES.c.name)


def _with_payer(which: sa.ColumnElement[bool]) -> sa.Select[Any]:
    return _in_order(which).add_columns(payer().label("payer"))


# Queries that are read all the time are built once: to build one takes longer than SQLite needs to answer it.
_EVERY = _with_payer(sa.true())
_NOT_ENDED = _with_payer(INSTANCES.c.state.in_(NOT_ENDED))
_OF_NAME = _with_payer(INSTANCES.c.name == sa.bindparam("name"))
_PROVIDERS = INSTANCES.c.provider == sa.bindparam("provider")
_OF_PROVIDER = _with_payer(_PROVIDERS & INSTANCES.c.state.in_(NOT_ENDED))
_OF_NAMES = _with_payer(_PROVIDERS & INSTANCES.c.name.in_(sa.bindparam("names", expanding=True)))
_READY = _with_payer(
    (INSTANCES.c.engine_key == sa.bindparam("engine_key"))
    & (INSTANCES.c.state == "ready")
    & INSTANCES.c.notice_at.is_(None)
    & INSTANCES.c.retire_at.is_(None)
)
_RANKED = (
    sa.select(
        INSTANCES.c.name,
        sa.func.row_number()
        .over(
            partition_by=[INSTANCES.c[name] for name in ("model", "gpu", "gpu_memory_gib", "gpus")],
            order_by=[INSTANCES.c.created_at.desc(), INSTANCES.c.name],
        )
        .label("rank"),
    )
    .where(INSTANCES.c.ready_at.is_not(None))
    .subquery()
)
_NEWEST = sa.select(_RANKED.c.name).where(_RANKED.c.rank <= MEASURED)
_LATEST = sa.select(
    LEASES.c.instance,
    sa.func.max(LEASES.c.epoch),
    sa.func.max(sa.func.coalesce(LEASES.c.released_at, LEASES.c.expires_at)),
).group_by(LEASES.c.instance)
_LIVE = (
    sa.select(LEASES)
    .where(LEASES.c.released_at.is_(None) & (LEASES.c.expires_at > sa.bindparam("now", type_=sa.Float)))
    .order_by(LEASES.c.instance, LEASES.c.epoch)
)
_FEW = LEASES.c.instance.in_(sa.bindparam("names", expanding=True))
_LATEST_OF_FEW, _LIVE_OF_FEW = _LATEST.where(_FEW), _LIVE.where(_FEW)


_PAID_BY_TOKENS = LEASES.c.useful_usd + LEASES.c.wasted_usd > 0
_BY_TOKENS = sa.select(LEASES).where(_PAID_BY_TOKENS).order_by(LEASES.c.acquired_at, LEASES.c.instance, LEASES.c.epoch)


def _standing(connection: sa.Connection, names: Sequence[str], now: float) -> dict[str, _Standing]:
    found: dict[str, _Standing] = defaultdict(_Standing)
    if not names:
        return found
    few = len(names) <= MANY
    which = {"names": names} if few else {}
    for name, epoch, last_end in connection.execute(_LATEST_OF_FEW if few else _LATEST, which):
        found[name].epoch, found[name].last_end = epoch, last_end
    for lease in connection.execute(_LIVE_OF_FEW if few else _LIVE, {"now": now, **which}).mappings():
        found[lease["instance"]].live.append(lease)
    return found


def _load(connection: sa.Connection, which: sa.ColumnElement[bool]) -> tuple[Sequence[Row], dict[str, list[Row]]]:
    """Instances, and their leases in the order of epochs."""
    rows = connection.execute(_in_order(which)).mappings().all()
    names = sa.select(INSTANCES.c.name).where(which)
    leases: dict[str, list[Row]] = defaultdict(list)
    query = sa.select(LEASES).where(LEASES.c.instance.in_(names)).order_by(LEASES.c.instance, LEASES.c.epoch)
    for lease in connection.execute(query).mappings():
        leases[lease["instance"]].append(lease)
    return rows, leases


def _end(lease: Row, now: float) -> float | None:
    """When the lease ended; None: it is live."""
    if lease["released_at"] is not None:
        return float(lease["released_at"])
    return float(lease["expires_at"]) if lease["expires_at"] <= now else None


def _timeline(row: Row, leases: Sequence[Row], now: float) -> Timeline:
    spans = [
        LeaseSpan(
            acquired_at=lease["acquired_at"],
            renewed_at=lease["acquired_at"] if lease["renewed_at"] is None else lease["renewed_at"],
            ended_at=_end(lease, now),
            useful_seconds=lease["useful_seconds"],
            wasted_seconds=lease["wasted_seconds"],
        )
        for lease in leases
    ]
    return Timeline(row["created_at"], row["ready_at"], ended_at(row), row["state"] in ("ending", "ended"), spans)


def _cost(row: Row, leases: Sequence[Row], now: float) -> InstanceCost:
    return InstanceCost(
        **{name: row[name] for name in _COST_COLUMNS},
        seconds=split_bill(_timeline(row, leases, now), now)[0],
        rows=sum(lease["rows"] for lease in leases),
        prompt_tokens=sum(lease["prompt_tokens"] for lease in leases),
        completion_tokens=sum(lease["completion_tokens"] for lease in leases),
    )


def _engine_cost(name: str, leases: Sequence[Row]) -> InstanceCost:
    """The bill of an engine that is paid by the token: of all its leases."""
    return InstanceCost(
        name=name,
        **{**_ENGINE, "provider": name},
        region="",
        model="",
        dataset=leases[-1]["dataset"],
        state="",
        price_per_hour=0.0,
        clock=1.0,
        seconds=Split(useful=_sum(leases, "useful_seconds"), wasted=_sum(leases, "wasted_seconds")),
        rows=sum(lease["rows"] for lease in leases),
        prompt_tokens=sum(lease["prompt_tokens"] for lease in leases),
        completion_tokens=sum(lease["completion_tokens"] for lease in leases),
        by_tokens=Split(useful=_sum(leases, "useful_usd"), wasted=_sum(leases, "wasted_usd")),
    )


def _engine_charge(lease: Row, now: float) -> Charge:
    ended = _end(lease, now)
    return Charge(
        dataset=lease["dataset"],
        instance=lease["instance"],
        **{**_ENGINE, "provider": lease["instance"]},
        usd_per_second=0.0,
        began=lease["acquired_at"],
        ended=now if ended is None else ended,
        seconds=Split(useful=lease["useful_seconds"], wasted=lease["wasted_seconds"]),
        rows=lease["rows"],
        prompt_tokens=lease["prompt_tokens"],
        completion_tokens=lease["completion_tokens"],
        by_tokens=Split(useful=lease["useful_usd"], wasted=lease["wasted_usd"]),
    )


# An engine that is paid by the token is its own provider; nobody says on what it runs.
_ENGINE: dict[str, Any] = {"instance_type": "endpoint", "gpu": "", "gpus": 0, "spot": False}


def _sum(leases: Sequence[Row], column: str) -> float:
    return float(sum(lease[column] for lease in leases))


def _bill(row: Row, leases: Sequence[Row], now: float) -> Bill:
    work = [
        Work(lease["dataset"], lease["rows"], lease["prompt_tokens"], lease["completion_tokens"]) for lease in leases
    ]
    described = {name: row[name] for name in _BILL_COLUMNS}
    return Bill(instance=row["name"], **described, line=_timeline(row, leases, now), work=work)


_BILL_COLUMNS = [name for name in Bill.__dataclass_fields__ if name in INSTANCES.c]
_COST_COLUMNS = [name for name in InstanceCost.__dataclass_fields__ if name in INSTANCES.c]
_INSTANCE_COLUMNS = [name for name in Instance.__dataclass_fields__ if name in INSTANCES.c]


def _instance(row: Row, leases: _Standing, now: float) -> Instance:
    def age(moment: float | None) -> float | None:
        return None if moment is None else max(0.0, now - moment)

    holding = next((lease for lease in leases.live if lease["draining_at"] is None), None)
    idle = None
    if row["state"] == "ready" and not leases.live:
        idle = age(max(row["ready_at"], leases.last_end))
    billed = max(0.0, (ended_at(row) or now) - row["created_at"])
    return Instance(
        **{name: row[name] for name in _INSTANCE_COLUMNS},
        payer=row["payer"],
        seen=row["seen_at"] is not None,
        end_unproven=row["state"] == "ended" and (row["missing_since"] is not None or not existed(row)),
        retiring=row["retire_at"] is not None,
        age=max(0.0, now - row["created_at"]),
        ready_age=age(row["ready_at"]),
        ended_age=age(row["ended_at"]),
        missing_seconds=age(row["missing_since"]),
        notice_seconds=None if row["notice_at"] is None else max(0.0, row["notice_at"] - now),
        idle_seconds=idle,
        lease=None if holding is None else _lease(holding),
        lease_age=None if holding is None else age(holding["acquired_at"]),
        draining=tuple(_lease(lease) for lease in leases.live if lease["draining_at"] is not None),
        epoch=leases.epoch,
        usd=billed * usd_per_second(row["price_per_hour"], row["clock"]),
    )


def _lease(row: Row) -> Lease:
    return Lease(row["instance"], row["epoch"], row["run_id"], row["dataset"])
