"""The rows that a feed still has to bring through an engine, and the batches they belong to.

Plain bookkeeping on the event loop's thread: no tasks, no clock, no I/O. A row is in exactly one place: ready,
waiting for its next try, among the suspects, or held by an engine worker; row_state.py says which states these are.

Of rows that are ready, those of a higher priority are sent first. Owners of one priority take turns of ROWS_IN_TURN
rows, so that rows which go in one request stay together. Of one owner the rows that are due first go first, and of
those that are due together the ones that were read first, or those that stand before others in the order of their
prompts (prefix_order.py): rows that come back from an engine or from a failed try have their old place.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gpu_runner.client.protocol import Completion, Repair
from gpu_runner.client.vector_length import VectorLength
from gpu_runner.inference.answer_memory import AnswerMemory, bytes_of, bytes_of_turns
from gpu_runner.inference.failures.failing_requests import FailureRecord
from gpu_runner.inference.poison_rows import Group, PoisonBisector
from gpu_runner.inference.prefix_order import Place, PrefixOrder, PrefixPolicy
from gpu_runner.inference.row_state import NEXT_TURN, Item, OpenBatch
from gpu_runner.rows import Batch, Outcome, Row, Turn, Urgency

ROWS_IN_TURN = 64

Entry = tuple[float, Place, int, Item]  # when it is due, its place, in which order it was read


@dataclass(slots=True)
class _Owners:
    """The owners of one priority: a heap of rows for each owner, the owner whose turn it is at the front, which has
    `had` rows.
    """

    rows: OrderedDict[str, list[Entry]] = field(default_factory=OrderedDict)
    had: int = 0


class ReadyRows:
    """`unsent` of its rows were never asked of an engine. `prompt_bytes`: of all its rows."""

    def __init__(self) -> None:
        self.unsent = 0
        self.prompt_bytes = 0
        self._priorities: dict[int, _Owners] = {}
        self._size = 0
        self._had: int | None = 0  # by the owner of the row that `take` gave last, in its turn before it

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        """In no order."""
        for owners in self._priorities.values():
            for rows in owners.rows.values():
                yield from (entry[-1] for entry in rows)

    def add(self, item: Item) -> None:
        """One more."""
        urgency = item.batch.urgency
        owners = self._priorities.setdefault(urgency.priority, _Owners())
        heapq.heappush(owners.rows.setdefault(urgency.owner, []), self._entry(item))
        self._count(item, 1)

    def take(self) -> Item | None:
        """The first one; None: there is none."""
        if not self._priorities:
            return None
        priority = max(self._priorities)
        owners = self._priorities[priority]
        owner, rows = next(iter(owners.rows.items()))
        item = heapq.heappop(rows)[-1]
        self._had = owners.had
        owners.had += 1
        if owners.had == ROWS_IN_TURN:
            owners.rows.move_to_end(owner)
            owners.had = 0
        self._took(priority, owner, item)
        return item

    def take_of(self, is_wanted: Callable[[Item], bool]) -> Item | None:
        """The wanted one that is due first, out of turn; None: there is none."""
        found = min((self._entry(item) for item in self if is_wanted(item)), default=None)
        if found is None:
            return None
        item, urgency = found[-1], found[-1].batch.urgency
        rows = self._priorities[urgency.priority].rows[urgency.owner]
        rows.remove(found)
        heapq.heapify(rows)
        self._had = None
        self._took(urgency.priority, urgency.owner, item)
        return item

    def put_first(self, item: Item) -> None:
        """The one that was taken last is ready again; unless it was taken out of turn, it is the first one, and its
        owner's turn is where it was.
        """
        self.add(item)
        if self._had is not None:
            owners = self._priorities[item.batch.urgency.priority]
            owners.rows.move_to_end(item.batch.urgency.owner, last=False)
            owners.had = self._had

    def remove(self, is_gone: Callable[[Item], bool]) -> list[Item]:
        """Takes out every row for which this is true, whoever's turn it is."""
        gone = [item for item in self if is_gone(item)]
        for priority, owner in {(item.batch.urgency.priority, item.batch.urgency.owner) for item in gone}:
            rows = self._priorities[priority].rows
            rows[owner] = [entry for entry in rows[owner] if not is_gone(entry[-1])]
            heapq.heapify(rows[owner])
            self._leave_if_empty(priority, owner)
        for item in gone:
            self._count(item, -1)
        return gone

    def before(self, urgency: Urgency) -> int:
        """About how many of these would be taken before further rows of this urgency."""
        found = sum(
            len(rows)
            for priority, owners in self._priorities.items()
            if priority > urgency.priority
            for rows in owners.rows.values()
        )
        if (owners := self._priorities.get(urgency.priority)) is None:
            return found
        own = sum(entry[0] <= urgency.due for entry in owners.rows.get(urgency.owner, ()))
        most = (own // ROWS_IN_TURN + 1) * ROWS_IN_TURN
        return found + own + sum(min(len(rows), most) for owner, rows in owners.rows.items() if owner != urgency.owner)

    @staticmethod
    def _entry(item: Item) -> Entry:
        return item.batch.urgency.due, item.place, item.order, item

    def _took(self, priority: int, owner: str, item: Item) -> None:
        self._leave_if_empty(priority, owner)
        self._count(item, -1)

    def _leave_if_empty(self, priority: int, owner: str) -> None:
        owners = self._priorities[priority]
        if not owners.rows[owner]:
            if next(iter(owners.rows)) == owner:
                owners.had = 0
            del owners.rows[owner]
        if not owners.rows:
            del self._priorities[priority]

    def _count(self, item: Item, rows: int) -> None:
        self._size += rows
        self.unsent += rows if item.started_at == 0.0 else 0
        self.prompt_bytes += rows * len(item.prompt)


CANCEL_AGAIN_SECONDS = 1.0


@dataclass(slots=True)
class Counts:
    """What happened so far. `requests` counts row requests, not canaries; `hedges` those of them that are second
    requests for late rows. `longer` counts requests after a cut answer, `turns` answers to conversations that go on.
    `seconds` adds up those of all outcomes.
    """

    known: int = 0
    ok: int = 0
    dead: int = 0
    batches: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 0
    hedges: int = 0
    failures: int = 0
    charged: int = 0
    voided: int = 0
    repairs: int = 0
    longer: int = 0
    turns: int = 0
    canaries: int = 0
    engine_deaths: int = 0
    seconds: float = 0.0


class Work:
    """All open rows. `on_row` hears of every outcome that an engine gave, with job and key of its batch, and of every
    turn of a conversation that goes on: then the outcome has only `begun`.
    """

    def __init__(
        self,
        on_row: Callable[[str, str, Outcome], None],
        memory: AnswerMemory,
        vectors: VectorLength,
        prefixes: PrefixPolicy,
    ) -> None:
        self.memory, self.vectors = memory, vectors
        self.prefixes = PrefixOrder(prefixes)
        self.failures = FailureRecord()
        self.ready = ReadyRows()
        self.suspects: PoisonBisector[Item] = PoisonBisector()
        self._trial: object | None = None  # the engine worker that tries suspects now: one at a time
        self.complete: deque[OpenBatch] = deque()
        self._open: dict[OpenBatch, None] = {}
        self.exhausted = False  # every batch is open or closed: no row comes but those that are here
        self.open_rows = 0
        self.counts = Counts()
        self._later: list[tuple[float, int, Item]] = []
        self.held_back: list[Item] = []  # to be asked again by another engine than the one at work
        self.holds_back = False
        self.low = self.look_below = 0  # `take` calls `on_low` while fewer rows than one of them are ready
        self.on_low: Callable[[], None] = _nothing
        self._order = 0
        self._on_row = on_row
        self._answers = self
        self.users: Work | None = None

    def part(self) -> Work:
        """From now on rows whose next text a model is to write for the user are in a queue of their own, `users`, for
        engines of that model. Batches, memory and counters are common.
        """
        users = self.users = Work(self._on_row, self.memory, self.vectors, PrefixPolicy())
        users.counts, users._answers, users.users = self.counts, self, users
        return users

    def _enter(self, item: Item) -> None:
        """The row is ready, for an engine that writes its next text."""
        queue = self.users if self.users is not None and item.user_request else self._answers
        queue.ready.add(item)
        queue.look_below += 1

    @property
    def queued(self) -> int:
        """Rows that no worker holds."""
        own = len(self.ready) + len(self._later) + self.suspects.size + len(self.held_back)
        return own if self.users is None or self.users is self else own + self.users.queued

    @property
    def open_batches(self) -> int:
        """Batches that were read and neither handed on nor left out."""
        return len(self._open)

    def open(self, batch: Batch) -> None:
        """Takes a batch in; one without unknown rows is complete at once."""
        outcomes = [batch.known.get(row.row_id) for row in batch.rows]
        held = self.memory.open(len(outcomes))
        opened = OpenBatch(batch.key, outcomes, outcomes.count(None), held, batch.urgency, batch.job)
        for outcome in outcomes:
            if outcome is not None:
                self.memory.keep(opened.bytes, *bytes_of(outcome))
                if self.vectors.expected is None and isinstance(outcome.output, tuple):
                    self.vectors.expected = len(outcome.output)
        unknown = [index for index, outcome in enumerate(outcomes) if outcome is None]
        places = self.prefixes.places([batch.rows[index].prompt for index in unknown])
        for index, place in zip(unknown, places, strict=True):
            row = batch.rows[index]
            item = Item(row, opened, index, self._order, place=place)
            if begun := _begun(row, batch.begun.get(row.row_id, ())):
                item.resume(begun)
                self._keep_turns(item, 1)
            (self.users if self.users is not None and item.user_request else self).ready.add(item)
            self._order += 1
        self.counts.known += len(outcomes) - opened.left
        self._open[opened] = None
        self.open_rows += len(outcomes)
        if opened.left == 0:
            self.complete.append(opened)

    def no_more_batches(self) -> None:
        """The source has ended."""
        self.exhausted = True

    def call_below(self, low: int) -> None:
        """Sets how many ready rows are few: `take` then calls `on_low`."""
        self.low = low

    def look_again(self, below: int = sys.maxsize) -> None:
        """What is read next may be more urgent than ready rows: `take` calls `on_low` while fewer than that are ready.

        0: not for this.
        """
        self.look_below = below

    def take_complete(self) -> OpenBatch:
        """The next batch to commit; `close` or `put_back` must follow."""
        return self.complete.popleft()

    def put_back(self, batch: OpenBatch) -> None:
        """The batch was not committed: it is the next one again, unless its job has ended."""
        if batch.ended:
            self._forget(batch)
        else:
            self.complete.appendleft(batch)

    def close(self, batch: OpenBatch) -> None:
        """The batch is committed."""
        self._forget(batch)
        self.counts.batches += 1

    def _forget(self, batch: OpenBatch) -> None:
        self.memory.close(batch.bytes)
        del self._open[batch]
        self.open_rows -= len(batch.outcomes)

    def end_job(self, job: str) -> None:
        """Takes out the rows of this job that no engine worker holds, and its batches, but for those being committed.

        Those that an engine worker holds have a batch that has `ended`: the worker is to `cancel` them.
        """
        ended = [batch for batch in self._open if batch.job == job]
        for batch in ended:
            batch.end()
        self._cancel_ended()
        if self.users is not None:
            self.users._cancel_ended()
        complete, self.complete = self.complete, deque(batch for batch in self.complete if not batch.ended)
        for batch in ended:
            if batch.left or batch in complete:
                self._forget(batch)

    def _cancel_ended(self) -> None:
        for item in self.ready.remove(_has_ended) + self.suspects.remove(_has_ended):
            item.cancel()
        later, self._later = self._later, [entry for entry in self._later if not _has_ended(entry[2])]
        heapq.heapify(self._later)
        held, self.held_back = self.held_back, [item for item in self.held_back if not _has_ended(item)]
        for item in [*(item for _, _, item in later), *held]:
            if _has_ended(item):
                self.cancel(item)

    def cancel(self, item: Item) -> None:
        """The row's job has ended: nobody holds it any more."""
        group = item.group
        item.cancel()
        if group is not None:
            self.suspects.row_left(group)

    def settle(self, item: Item, outcome: Outcome) -> None:
        """The row has its outcome, unless `on_row` raises: then it has none."""
        batch = item.batch
        item.check_end(outcome)
        self._on_row(batch.job, batch.key, outcome)
        item.end(outcome)
        if item.kept:
            self.memory.keep(batch.bytes, -item.kept)
        if item.turns:
            self._keep_turns(item, -1)
        self.memory.keep(batch.bytes, *bytes_of(outcome))
        counts = self.counts
        if outcome.error is None:
            counts.ok += 1
        else:
            counts.dead += 1
        counts.seconds += item.seconds
        counts.prompt_tokens += item.prompt_tokens
        counts.completion_tokens += item.completion_tokens
        if batch.left == 0:
            self._answers.complete.append(batch)

    def next_turn(self, item: Item, so_far: Outcome) -> bool:
        """The row's next turn is to be asked, in its old place, unless `on_row` raises. A row in a trial leaves it: it
        has ended no engine. Returns whether the trial is over.
        """
        batch, group = item.batch, item.group
        item.check(NEXT_TURN)
        self._on_row(batch.job, batch.key, so_far)
        counts = self.counts
        counts.turns += 1
        counts.prompt_tokens += item.prompt_tokens
        counts.completion_tokens += item.completion_tokens
        if item.kept:
            self.memory.keep(batch.bytes, -item.kept)
        if item.turns:
            self._keep_turns(item, -1)
        item.next_turn(so_far.turns[-1])
        self._keep_turns(item, 1)
        self._enter(item)
        return group is not None and self.suspects.row_ended(group)

    def _keep_turns(self, item: Item, sign: int) -> None:
        """The turns of a conversation are held twice while it goes on: the next prompt has them, too."""
        held, stored = bytes_of_turns(item.turns)
        self.memory.keep(item.batch.bytes, sign * 2 * held, sign * stored)

    def take(self) -> Item | None:
        """The next ready row; while the memory is full, the next one of the oldest batch."""
        item = self.ready.take_of(self._is_of_the_oldest) if self.memory.full else self.ready.take()
        if len(self.ready) < max(self.low, self.look_below):
            self.on_low()
        return item

    def _is_of_the_oldest(self, item: Item) -> bool:
        return self.memory.is_oldest(item.batch.bytes)

    def put_first(self, item: Item) -> None:
        """A row that was just taken, and not sent, is the next one again."""
        self.ready.put_first(item)

    def repair(self, item: Item, repair: Repair, held: int) -> None:
        """The row is to be asked again, with its answer of so many bytes."""
        self.memory.keep(item.batch.bytes, held - item.kept)
        item.ask_for_repair(repair, held)
        self.counts.repairs += 1
        self.soon(item)

    def ask_for_more(self, item: Item, max_tokens: int, cut: Completion, held: int) -> None:
        """The row is to be asked again for a longer answer than `cut`; held with it: so many bytes."""
        self.memory.keep(item.batch.bytes, held - item.kept)
        item.ask_for_more(max_tokens, cut, held)
        self.counts.longer += 1
        self.soon(item)

    def later(self, item: Item, due: float) -> None:
        """The row, whose failure is judged, is to be tried again at `due`."""
        item.back_off()
        heapq.heappush(self._later, (due, item.order, item))

    def soon(self, item: Item) -> None:
        """The row is to be tried again: ready, in its old place."""
        item.ask_again()
        if item.group is not None:
            item.group.put_first(item)
        elif self.holds_back:
            self.held_back.append(item)
        else:
            self.ready.add(item)
            self.look_below += 1

    def release(self) -> None:
        """Rows that were held back for another engine are ready."""
        held, self.held_back = self.held_back, []
        for item in held:
            self.ready.add(item)
        self.look_below += len(held)

    def promote(self, now: float) -> None:
        """Makes the rows ready whose time has come."""
        while self._later and self._later[0][0] <= now:
            self.soon(heapq.heappop(self._later)[2])

    @property
    def next_due(self) -> float | None:
        """When `promote` has something to do."""
        return self._later[0][0] if self._later else None

    def give_back(self, items: Iterable[Item]) -> None:
        """Rows of an engine that serves no longer: ready again, each in its old place."""
        for item in items:
            item.give_back()
            self.ready.add(item)
        self.look_again()

    # --- counters ---

    def count_failure(self) -> None:
        """A request failed or was denied."""
        self.counts.failures += 1

    def start(self, item: Item, at: float) -> None:
        """A request of the row begins at this time of the clock."""
        item.start(at)
        self.counts.requests += 1

    def hedge(self, item: Item) -> None:
        """A further request of a late row begins."""
        item.hedge()
        self.counts.requests += 1
        self.counts.hedges += 1

    def charge(self, item: Item) -> None:
        """The row's failure counts as a try."""
        item.charge()
        self.counts.charged += 1

    def void(self, item: Item) -> None:
        """The row's failure was the engine's."""
        item.void()
        self.counts.voided += 1

    def count_engine_death(self) -> None:
        """An engine was lost."""
        self.counts.engine_deaths += 1

    def count_canaries(self, canaries: int) -> None:
        """So many canaries were sent to an engine that serves no longer."""
        self.counts.canaries += canaries

    # --- suspects ---

    def suspect(self, items: Iterable[Item]) -> None:
        """Rows that are to be tried alone, as one group."""
        rows = sorted(items, key=lambda item: item.order)
        for item in rows:
            item.try_alone()
        self.suspects.add(rows)

    def may_begin_trial(self, worker: object) -> bool:
        """Whether there are suspects for this engine worker to try: one worker at a time."""
        return bool(self.suspects) and (self._trial is None or self._trial is worker)

    def begin_trial(self, worker: object) -> None:
        """From now on only this engine worker tries suspects."""
        self._trial = worker

    def end_trial(self, worker: object) -> None:
        """The engine worker tries no suspects any more."""
        if self._trial is worker:
            self._trial = None

    def next_group(self) -> Group[Item]:
        """The suspects to try next, with nothing else in flight."""
        group = self.suspects.next()
        for item in group.waiting:
            item.join_trial(group)
        return group

    def group_died(self, group: Group[Item], in_flight: list[Item], rest: list[Item]) -> None:
        """The engine died at a trial: the rows in flight are split, the rest are tried on their own."""
        for item in (*in_flight, *rest):
            item.try_alone()
        self.suspects.died(group, in_flight, rest)

    def put_back_group(self, group: Group[Item], rows: list[Item]) -> None:
        """The trial was broken off for another reason: its rows without an outcome are tried again."""
        for item in rows:
            item.try_alone()
        self.suspects.put_back(group, rows)

    def leave_group(self, group: Group[Item]) -> list[Item]:
        """Takes a group's rows out of everything but the engine worker; returns those that were not submitted."""
        rows = group.take_all()
        rows += [item for _, _, item in self._later if item.group is group]
        self._later = [entry for entry in self._later if entry[2].group is not group]
        heapq.heapify(self._later)
        return sorted(rows, key=lambda item: item.order)


def _nothing() -> None:
    return None


def _begun(row: Row, turns: Sequence[Turn]) -> Sequence[Turn]:
    """Of turns that were answered before, those after which there is something left to ask."""
    turns = turns[: row.last_turn]
    return turns[:-1] if len(turns) == row.last_turn and turns and turns[-1].answered else turns


def _has_ended(item: Item) -> bool:
    return item.batch.ended


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels tasks and waits until all are gone, also when the waiting itself is cancelled meanwhile.

    A task that swallowed its cancel (asyncio.wait_for does so before Python 3.12) is cancelled again.
    """
    pending = set(tasks)
    cancelled: asyncio.CancelledError | None = None
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)
        except asyncio.CancelledError as error:
            cancelled = error
        pending = {task for task in pending if not task.done()}
    if cancelled is not None:
        raise cancelled
