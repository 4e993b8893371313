"""What a queue of tasks does, whoever keeps it.

A task is *waiting*, *claimed* by a consumer, *delayed* until its next try, *done*, or a *dead letter*. `append` returns
when the task is durable. `acknowledge` and `bury` store the result first: only then the task is out of the queue. Who
claims a task may get it again after it was answered by somebody else: the first result stays. Every call raises
QueueAway when the queue cannot be used now, within a bounded time.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from batch_assets.api.online.queues.tasks import OnlineTask, TaskResult

RESULT_SECONDS = 600.0
DEAD_LETTER_SECONDS = 7 * 86_400.0
SHARDS, TENANT_SHARDS = 16, 4
_TASK_ID = re.compile(r"task_[0-9a-f]{32}")


class QueueAway(Exception):
    """The queue cannot be used now. Whether the call did something is not known."""


class KeyReused(Exception):
    """An Idempotency-Key that came with another request before."""


@dataclass(frozen=True, slots=True)
class OnceKey:
    """By what a repeated request is known. `name`: a digest of caller and key. `fingerprint`: of the request."""

    name: str
    fingerprint: str


def once_key(tenant: str, client_id: str, key: str, request: bytes) -> OnceKey:
    """The key of a request: a client's keys are its own."""
    name = "\0".join((tenant, client_id, key))
    return OnceKey(hashlib.sha256(name.encode()).hexdigest(), hashlib.sha256(request).hexdigest()[:32])


def new_task_id(tenant: str, once: OnceKey | None, random_hex: Callable[[int], str] = secrets.token_hex) -> str:
    """An id that says in which shard its task is. Those of a tenant are in four shards, so that few tenants can fill
    all (shuffle sharding); a repeated request is in the shard of the first.
    """
    seed = random_hex(1) if once is None else once.name[:2]
    shard = hashlib.sha256(f"{tenant}\0{int(seed, 16) % TENANT_SHARDS}".encode()).digest()[0] % SHARDS
    return f"task_{shard:02x}{random_hex(15)}"


def shard_of(task_id: str) -> int | None:
    """The shard that an id names; None for what is no id of ours."""
    if _TASK_ID.fullmatch(task_id) is None or (shard := int(task_id[5:7], 16)) >= SHARDS:
        return None
    return shard


@dataclass(frozen=True, slots=True)
class Appended:
    """`repeated`: the task was there already, by its Idempotency-Key."""

    task_id: str
    repeated: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """A task in a consumer's hands. `failures`: tries that failed so far. `returned`: how often it was given back
    without one. `deliveries`: how often it was claimed since it was given back last, this time included.
    `expires_at`: Unix seconds. `receipt`: which delivery this is.
    """

    task: OnlineTask
    consumer: str
    receipt: str
    failures: int
    returned: int
    deliveries: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class StoredTask:
    """What can be said of a task. `result`: the JSON of TaskResult; None while it is pending."""

    task_id: str
    tenant: str
    created_at: float
    result: bytes | None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A task that was given up. `died_at`: Unix seconds."""

    task_id: str
    tenant: str
    model: str
    code: str
    failures: int
    created_at: float
    died_at: float


def dead_letter(task: OnlineTask, code: str, failures: int, died_at: float) -> DeadLetter:
    """What is shown of a task that was given up."""
    return DeadLetter(task.task_id, task.tenant, task.model, code, failures, task.created_at, died_at)


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Tasks by state. `tenants`: those that are not answered yet, by tenant."""

    waiting: int = 0
    claimed: int = 0
    delayed: int = 0
    dead: int = 0
    tenants: Mapping[str, int] = field(default_factory=dict)

    @property
    def unanswered(self) -> int:
        """Accepted and not answered."""
        return self.waiting + self.claimed + self.delayed


class TaskQueue(Protocol):
    """Calls of one process; they may come at the same time, from one event loop."""

    async def append(self, task: OnlineTask, once: OnceKey | None = None) -> Appended:
        """Keep a task. Raises KeyReused."""

    async def known(self, tenant: str, once: OnceKey) -> str | None:
        """The id of the task that came with this key, as long as its result is kept. Raises KeyReused."""

    async def claim(self, consumer: str, most: int, wait: float) -> Sequence[Claim]:
        """Tasks for this consumer, oldest first, tenants in turn: about `most`. Waits up to `wait` seconds for one.
        What is claimed for it after that, it gets by its next call.
        """

    async def extend(self, claims: Sequence[Claim]) -> None:
        """The consumers of these claims are alive."""

    async def acknowledge(self, claim: Claim, result: TaskResult) -> bool:
        """Store the result, then take the task out of the queue. False: it had a result already, which stays."""

    async def retry(self, claim: Claim, seconds: float, *, charged: bool) -> bool:
        """Give a task back, to be claimed after `seconds`. `charged`: the try has failed. False: it is not ours now."""

    async def bury(self, claim: Claim, result: TaskResult) -> bool:
        """Make a task a dead letter, with this result. False: it is not ours now."""

    async def reclaim(self, consumer: str, silent: float, most: int) -> Sequence[Claim]:
        """Take over tasks whose consumer has claimed or extended nothing of them for `silent` seconds."""

    async def look(self, task_id: str, wait: float = 0.0, tenant: str | None = None) -> StoredTask | None:
        """The task and its result, for which this waits up to `wait` seconds. None: there is no such task any more, or
        it is not of this `tenant`, for which nobody waits.
        """

    def depth_now(self) -> QueueDepth | None:
        """How much there is by state, without asking anybody; None: that is not known here. For any thread."""

    async def depth(self) -> QueueDepth:
        """How much there is."""

    async def dead_letters(self, most: int) -> Sequence[DeadLetter]:
        """Dead letters, newest first."""

    async def redrive(self, task_ids: Sequence[str]) -> int:
        """Put dead letters back into the queue with all their tries and their whole lifetime. Returns how many."""

    async def sweep(self) -> None:
        """Make delayed tasks due, and forget what is older than it is kept. Called every now and then."""

    async def close(self) -> None:
        """Close files and connections. What is claimed stays claimed."""
