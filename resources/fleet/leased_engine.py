"""What a run needs of an engine, and what it has when one is leased."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from gpu_runner.bounded_http.tls_files import TlsFiles
from gpu_runner.cost_meter import CostMeter
from gpu_runner.fleet_database.database import Instance, Lease
from gpu_runner.offers.offer import Objective, Offer, OfferFilter
from gpu_runner.offers.speed import LengthMix
from gpu_runner.offers.workload import Workload
from gpu_runner.reachability import Reachability, always_open
from gpu_runner.request_limits import NO_LIMITS, RequestLimits
from gpu_runner.rows import POOLED, Task
from resources.engine_options import PLAIN, EngineOptions
from resources.pricing.market import ANY_OFFER
from resources.pricing.model_catalog import DeclaredModel

WARM = "fleet"  # source of an instance that stands ready, as an offer
UNKNOWN_WORK = Workload(10_000, 10_000, LengthMix(200, 200), 2_000, "assumed", "assumed")


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a run needs: an engine that serves `model` for `task`, or exactly the one at `endpoint`.

    `simulate`: the simulated providers of a fleet without a file will do. `limits`: of an engine that is an `endpoint`,
    in place of those in fleet.yaml. `engine`: arguments that it is started with. `batches`: one that answers hours
    later, by a Batch API, will do. `user_engine`: the engine of fleet.yaml whose `user_model` is asked beside it.
    """

    dataset: str
    model: str
    task: Task
    endpoint: str | None = None
    accept: OfferFilter = ANY_OFFER
    objective: Objective = "cheapest"
    max_model_len: int | None = None
    declared: DeclaredModel | None = None
    simulate: bool = False
    limits: RequestLimits = NO_LIMITS
    engine: EngineOptions = PLAIN
    batches: bool = False
    user_engine: str | None = None
    user_model: str = ""
    work: Callable[[], Workload] = field(default=lambda: UNKNOWN_WORK, compare=False)

    @property
    def engine_key(self) -> str:
        """Instances with this key serve the same: model, kind of task, and how the engine is started."""
        kind = "embedding" if self.task in POOLED else "generate"
        words = [self.model, kind, str(self.max_model_len)]
        if started := self.engine.started():
            words.append(orjson.dumps(started, option=orjson.OPT_SORT_KEYS).decode())
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


@dataclass(slots=True, eq=False)
class KnownEngine:
    """An engine that requests may be sent to. `max_num_seqs`: its slots, where they are known.

    `spending` prices rows, and keeps the fleet's database of its time. `own`: it is a process of ours and ends with it.
    `reachability`: of the way to it. `tls`: certificates for an engine of https, None: those of the system. `region`:
    where it is; empty: nobody says.
    """

    endpoint: str
    api_key: str | None = field(repr=False)
    max_num_seqs: int | None
    provider: str
    instance_type: str
    spot: bool = False
    limits: RequestLimits = NO_LIMITS
    spending: CostMeter = field(default_factory=CostMeter)
    own: bool = False
    reachability: Callable[[], Reachability] = always_open
    tls: TlsFiles | None = None
    region: str = ""


@dataclass(slots=True, eq=False)
class LeasedEngine(KnownEngine):
    """An engine that is ours now. The lease's epoch fences everything written in its name.

    `offer`: as what the instance is rented; None for an engine that stands in fleet.yaml. `why`: one sentence on why it
    was chosen. Prices are per real second. `user`: the engine of the model that plays the user, where that is another
    one; others may ask it too, and the lease on it counts what is spent there.
    """

    lease: Lease = field(kw_only=True)
    offer: Offer | None = None
    clock: float = 1.0
    why: str = ""
    close: Callable[[], None] = lambda: None
    user: LeasedEngine | None = None

    @property
    def name(self) -> str:
        """Name of the instance or of the engine."""
        return self.lease.instance

    @property
    def epoch(self) -> int:
        """Fencing epoch of the lease."""
        return self.lease.epoch

    @property
    def exhausted(self) -> bool:
        """Whether no further row, or text of its user, is paid for."""
        return self.spending.exhausted or (self.user is not None and self.user.spending.exhausted)


@dataclass(frozen=True, slots=True)
class LeaseSignals:
    """What a leased instance's row says to its holder.

    `notice_seconds`: until it is taken away, if its provider gave notice, and `notice_reason` its words for why.
    `succeeded`: another run has it now. `late`: why its batches are not waited for any more; None: they are.
    `retired`: it is to end, and the holder to leave it; why, for people. None: it stays.
    """

    notice_seconds: float | None = None
    succeeded: bool = False
    retired: str | None = None
    notice_reason: str = ""
    late: str | None = None


@dataclass(frozen=True, slots=True)
class StaticEngine:
    """An engine of fleet.yaml that answers, and how it is let go."""

    endpoint: str
    own: bool = False
    close: Callable[[], None] = lambda: None


def instance_offer(instance: Instance) -> Offer:
    """The offer that an instance was rented as, with its boot paid."""
    return Offer(
        provider=instance.provider,
        region=instance.region,
        instance_type=instance.instance_type,
        gpu=instance.gpu,
        gpus=instance.gpus,
        gpu_memory_gib=instance.gpu_memory_gib,
        spot=instance.spot,
        price_per_hour=instance.price_per_hour,
        boot_seconds=0.0,
        reliability=1.0,
        observed_at=time.time(),
        source=WARM,
    )
