"""Whether one more request is accepted: by how full queue and engines are, tenants alike. Pure; time is an argument.

Up to nine tenths everybody is let in while there is room; of several tenants none that holds more than its equal part
and twice the room that is left. From there on a tenant that holds more than its share of the room is refused. One that
holds less than its equal part of what waits has its turn, while more room is left than it holds. The others are let in
at a rate that falls with the room that is left: from the rate at which requests are answered to a twentieth of it when
engines are full, and to nothing when the queue is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from batch_assets.api.online.queues.queue_protocol import QueueDepth

SLOW_FROM = 0.9
MOST_OF_ROOM = 2.0  # what one of several tenants may hold, as a multiple of the room that is left
LEAST_PART = 0.05  # of the rate of answers, while only engines are full
LEAST_RATE = 1.0  # requests/s, so that whoever begins is not refused for want of a past
RATE_SECONDS = 10.0  # over which the rate of answers is averaged
MOST_TENANTS = 10_000
LONGEST_WAIT = 60.0


@dataclass(frozen=True, slots=True)
class EnginePressure:
    """How full engines are, 0 to 1 and more. `kv`: of their KV cache. `queue`: waiting beside running, without rows of
    our own batches.
    """

    kv: float = 0.0
    queue: float = 0.0

    @property
    def most(self) -> float:
        """The worse of the two."""
        return max(self.kv, self.queue)


@dataclass(frozen=True, slots=True)
class Admitted:
    """`wait`: seconds after which it is worth while to ask again; None: it is let in."""

    wait: float | None = None


@dataclass(slots=True)
class _Allowance:
    tokens: float
    at: float


class Admission:
    """`capacity`: most requests without an answer. `uniform`: 0 to 1, spreads those who come again."""

    def __init__(self, capacity: int, uniform: Callable[[], float]) -> None:
        self._capacity, self._uniform = capacity, uniform
        self._depth = QueueDepth()
        self._pressures: Mapping[str, EnginePressure] = {}
        self._new: dict[str, int] = {}
        self._new_total = 0
        self._active: set[str] = set()
        self._allowances: OrderedDict[str, _Allowance] = OrderedDict()
        self._rate, self._rate_at = 0.0, 0.0
        self._answered = 0

    def observe(self, depth: QueueDepth, pressures: Mapping[str, EnginePressure], answered: int, now: float) -> None:
        """How things are now. `pressures`: by model. `answered`: tasks that ended since the call before, as far as this
        process knows.
        """
        self._depth, self._pressures = depth, pressures
        self._new, self._new_total = {}, 0
        self._active = set(depth.tenants)
        self._answered += answered
        passed = now - self._rate_at
        if passed >= 1.0:
            weight = min(1.0, passed / RATE_SECONDS)
            self._rate += weight * (self._answered / passed - self._rate)
            self._answered, self._rate_at = 0, now

    @property
    def depth(self) -> QueueDepth:
        """What was observed, and what was let in since."""
        return replace(self._depth, waiting=self._depth.waiting + self._new_total)

    @property
    def fullness(self) -> float:
        """How full queue or engines are, the fuller one; 1 is full."""
        engines = max((pressure.most for pressure in self._pressures.values()), default=0.0)
        return max(self._unanswered / self._capacity, engines)

    def ask(self, tenant: str, model: str, now: float) -> Admitted:
        """Whether a request of this tenant is let in now; it then counts."""
        filled, engines = self._unanswered / self._capacity, 0.0
        if (pressure := self._pressures.get(model)) is not None:
            engines = pressure.most
        if filled >= 1.0:
            return Admitted(self._wait())
        crowded = max(filled, engines) >= SLOW_FROM or self._holds_much(tenant)
        if crowded and not self._has_turn(tenant) and not self._slowly(tenant, filled, engines, now):
            return Admitted(self._wait())
        self._new[tenant] = self._new.get(tenant, 0) + 1
        self._new_total += 1
        self._active.add(tenant)
        return Admitted()

    def withdraw(self, tenant: str) -> None:
        """A request that was let in was not kept."""
        if self._new.get(tenant, 0) > 0:
            self._new[tenant] -= 1
            self._new_total -= 1

    @property
    def _unanswered(self) -> int:
        return self._depth.unanswered + self._new_total

    def _held(self, tenant: str) -> int:
        return self._depth.tenants.get(tenant, 0) + self._new.get(tenant, 0)

    def _with(self, tenant: str) -> int:
        """How many tenants have requests here, this one counted."""
        return len(self._active) + (tenant not in self._active)

    def _holds_much(self, tenant: str) -> bool:
        active, room = self._with(tenant), self._capacity - self._unanswered
        return active > 1 and self._held(tenant) > max(MOST_OF_ROOM * room, self._unanswered / active)

    def _has_turn(self, tenant: str) -> bool:
        """Whether it comes before others, who hold more: a burst of theirs leaves room for those after it."""
        held, active = self._held(tenant), self._with(tenant)
        return active > 1 and held < min(self._capacity - self._unanswered, self._unanswered / active)

    def _slowly(self, tenant: str, filled: float, engines: float, now: float) -> bool:
        active, held = self._with(tenant), self._held(tenant)
        if filled >= SLOW_FROM and active > 1 and held >= SLOW_FROM * self._capacity / active:
            return False
        room = min(1.0, (1.0 - filled) / (1.0 - SLOW_FROM))
        part = min(1.0, max(LEAST_PART, (1.0 - engines) / (1.0 - SLOW_FROM)))
        rate = max(LEAST_RATE, self._rate) * min(room, part) / active
        allowance = self._allowances.setdefault(tenant, _Allowance(1.0, now))
        self._allowances.move_to_end(tenant)
        if len(self._allowances) > MOST_TENANTS:
            self._allowances.popitem(last=False)
        allowance.tokens = min(max(1.0, rate), allowance.tokens + max(0.0, now - allowance.at) * rate)
        allowance.at = now
        if allowance.tokens < 1.0:
            return False
        allowance.tokens -= 1.0
        return True

    def _wait(self) -> float:
        """Until the queue is below nine tenths again, at the rate of answers; a quarter more or less."""
        over = max(1.0, self._unanswered - SLOW_FROM * self._capacity)
        seconds = over / max(LEAST_RATE, self._rate)
        return min(LONGEST_WAIT, max(1.0, seconds) * (0.75 + 0.5 * self._uniform()))
