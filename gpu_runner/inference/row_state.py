"""The states of a row on its way through a feed, and the transitions between them.

No other module writes a field of `Item` or `OpenBatch`. A transition that `TRANSITIONS` does not allow raises
InvalidTransition, so that a row is in one place at a time and has one outcome. The states and who holds the row:

    WAITING         row_queue, ready to be sent
    SUSPECT         poison_rows, to be sent with nothing in flight but its group
    IN_FLIGHT       engine_worker, sent to its engine
    ANSWER_WAITING  engine_worker, the answer has come and waits for room in memory
    UNDECIDED       failed_requests, the request failed and it is not known yet whether the engine lives
    BACKING_OFF     row_queue, until the time of its next try
    DENIED          denials, refused as a request that this server does not allow; keeps its slot
    SET_ASIDE       denials, the engine answers other requests; keeps no slot
    DONE, DEAD      its batch, with an answer or a dead letter; terminal
    CANCELLED       nobody: its job has ended before it had an outcome; terminal
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import IntEnum

from gpu_runner.client.protocol import Completion, Repair
from gpu_runner.inference.answer_memory import BatchBytes
from gpu_runner.inference.poison_rows import Group
from gpu_runner.inference.prefix_order import AS_READ, Place
from gpu_runner.micro_batches.bisection import RefusedList
from gpu_runner.rows import ALIKE, Outcome, Row, Turn, Urgency, next_request


class RowState(IntEnum):
    """Where a row is; the module's docstring says what each means."""

    WAITING = 0
    SUSPECT = 1
    IN_FLIGHT = 2
    ANSWER_WAITING = 3
    UNDECIDED = 4
    BACKING_OFF = 5
    DENIED = 6
    SET_ASIDE = 7
    DONE = 8
    DEAD = 9
    CANCELLED = 10


@dataclass(frozen=True, slots=True)
class Transition:
    """A named change of state: from any of `sources` to `target`."""

    name: str
    sources: frozenset[RowState]
    target: RowState


def _transition(name: str, sources: str, target: RowState) -> Transition:
    return Transition(name, frozenset(RowState[source] for source in sources.split()), target)


SEND = _transition("send", "WAITING SUSPECT", RowState.IN_FLIGHT)
WAIT_FOR_ROOM = _transition("wait for room", "IN_FLIGHT", RowState.ANSWER_WAITING)
READ_ANSWER = _transition("read answer", "ANSWER_WAITING", RowState.IN_FLIGHT)
ASK_AGAIN = _transition("ask again", "IN_FLIGHT BACKING_OFF", RowState.WAITING)
NEXT_TURN = _transition("ask for the next turn", "IN_FLIGHT", RowState.WAITING)
ASK_AGAIN_IN_TRIAL = _transition("ask again in trial", "IN_FLIGHT BACKING_OFF", RowState.SUSPECT)
FAIL = _transition("fail", "IN_FLIGHT", RowState.UNDECIDED)
BACK_OFF = _transition("back off", "UNDECIDED SET_ASIDE", RowState.BACKING_OFF)
DENY = _transition("deny", "IN_FLIGHT", RowState.DENIED)
SET_ASIDE = _transition("set aside", "DENIED", RowState.SET_ASIDE)
GIVE_BACK = _transition("give back", "IN_FLIGHT UNDECIDED DENIED SET_ASIDE", RowState.WAITING)
TRY_ALONE = _transition("try alone", "SUSPECT IN_FLIGHT UNDECIDED BACKING_OFF DENIED SET_ASIDE", RowState.SUSPECT)
SUCCEED = _transition("succeed", "IN_FLIGHT", RowState.DONE)
DIE = _transition("die", "IN_FLIGHT UNDECIDED SET_ASIDE", RowState.DEAD)
CANCEL = _transition(
    "cancel",
    "WAITING SUSPECT IN_FLIGHT ANSWER_WAITING UNDECIDED BACKING_OFF DENIED SET_ASIDE",
    RowState.CANCELLED,
)

TRANSITIONS = (
    SEND,
    WAIT_FOR_ROOM,
    READ_ANSWER,
    ASK_AGAIN,
    NEXT_TURN,
    ASK_AGAIN_IN_TRIAL,
    FAIL,
    BACK_OFF,
    DENY,
    SET_ASIDE,
    GIVE_BACK,
    TRY_ALONE,
    SUCCEED,
    DIE,
    CANCEL,
)
TERMINAL = frozenset({RowState.DONE, RowState.DEAD, RowState.CANCELLED})


class InvalidTransition(Exception):
    """A defect of the feed: a row was to be moved from a place where it is not."""


@dataclass(slots=True, eq=False)
class OpenBatch:
    """A batch between being read and being committed. `left` counts rows without an outcome. `ended`: its job has."""

    key: str
    outcomes: list[Outcome | None]
    left: int
    bytes: BatchBytes
    urgency: Urgency = ALIKE
    job: str = ""
    ended: bool = False

    def end(self) -> None:
        """Its job has ended: its rows are asked for no more, and it is not handed on."""
        self.ended = True


@dataclass(slots=True, eq=False)
class Item:
    """One row on its way. Only the methods below write its fields.

    `tries` are charged failures, `voids` failures that nobody charged, `deaths` engine deaths it was in
    flight at, `alone_deaths` those with nothing else in flight. Tokens and seconds add up over requests. `kept` are the
    bytes of an answer that is to be repaired, or was cut, `reading` those of one that is being read. `max_tokens`: what
    the row is asked for after its answer `cut`, which happened `cuts` times. `sent` is a time of the loop,
    `started_at` one of the clock. `repeats`: further requests for it since `sent` (hedging/). `group` is
    the trial that the row takes part in, in whatever state.

    `turns` are those of a conversation that were answered; `conversation` is the prompt with them and what the user
    says next, empty before the first one is. `user_request` asks a model for what the user says next, where that is to
    be written now; the last one of `turns` has no answer yet once it is. What is counted, of failures, tokens and
    seconds, is that of the text that is asked for now. `place` among the rows of its owner, before `order`.
    """

    row: Row
    batch: OpenBatch
    index: int
    order: int
    state: RowState = RowState.WAITING
    tries: int = 0
    voids: int = 0
    deaths: int = 0
    alone_deaths: int = 0
    repair: Repair | None = None
    max_tokens: int | None = None
    cut: Completion | None = None
    cuts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    sent: float = 0.0
    started_at: float = 0.0
    seconds: float = 0.0
    group: Group[Item] | None = None
    kept: int = 0
    reading: int = 0
    repeats: int = 0
    turns: tuple[Turn, ...] = ()
    conversation: bytes = b""
    user_request: bytes = b""
    place: Place = AS_READ

    @property
    def prompt(self) -> bytes:
        """What the next request asks, as JSON."""
        return self.user_request or self.conversation or self.row.prompt

    @property
    def fields(self) -> bytes:
        """Request fields of the next request's own, as JSON, or empty."""
        return b"" if self.user_request else self.row.own_fields

    @property
    def asked_row(self) -> Row:
        """The row as the next request shows it to the engine: another engine's request is none of its business."""
        return replace(self.row, prompt=self.user_request, fields=b"", seed=None) if self.user_request else self.row

    @property
    def answered_turns(self) -> tuple[Turn, ...]:
        """Turns that have their answer."""
        return self.turns if not self.turns or self.turns[-1].answered else self.turns[:-1]

    @property
    def user_says(self) -> str:
        """What the user says in the turn that is asked now."""
        at = len(self.answered_turns)
        return self.turns[at].user if at < len(self.turns) else self.row.turns[at]

    @property
    def goes_on(self) -> bool:
        """Whether there is something to ask after what is asked now."""
        return bool(self.user_request) or len(self.answered_turns) + 1 < self.row.last_turn

    def check(self, transition: Transition) -> None:
        """Raises InvalidTransition where the transition is not allowed now."""
        if self.state not in transition.sources:
            raise InvalidTransition(
                f"expected a row in {' or '.join(sorted(source.name for source in transition.sources))} "
                f"to {transition.name}, found row {self.row.row_id!r} in {self.state.name}: a defect of the feed"
            )

    def _move(self, transition: Transition) -> None:
        if self.state not in transition.sources:
            self.check(transition)
        self.state = transition.target

    # --- with an engine ---

    def send(self, now: float) -> None:
        """A slot has taken the row."""
        self._move(SEND)
        self.sent = now
        self.repeats = 0

    def hedge(self) -> None:
        """Mark the row as late: an engine is asked for it once more, beside the request that is under way."""
        self.check(FAIL)
        self.repeats += 1

    def answer_hedge(self, sent: float) -> None:
        """The request that was sent at `sent`, and not the first one, is answered."""
        self.check(SUCCEED)
        self.sent = sent

    def start(self, at: float) -> None:
        """A request begins; the first one counts as the row's start."""
        if self.started_at == 0.0:
            self.started_at = at

    def wait_for_room(self) -> None:
        """Its answer has come and waits for room in memory."""
        self._move(WAIT_FOR_ROOM)

    def read_answer(self, size: int) -> None:
        """Its answer of so many bytes is being read; 0 where the waiting was broken off."""
        self._move(READ_ANSWER)
        self.reading = size

    def done_reading(self) -> int:
        """The answer is no longer a body that is being read. Returns its bytes, 0 where there was none."""
        size, self.reading = self.reading, 0
        return size

    def add_seconds(self, now: float) -> None:
        """A request has ended."""
        self.seconds += now - self.sent

    def add_tokens(self, prompt: int, completion: int, cached: int) -> None:
        """A request was answered."""
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        self.cached_tokens += cached

    # --- failures ---

    def fail(self) -> None:
        """Its request failed: to be judged."""
        self._move(FAIL)

    def charge(self) -> None:
        """The failure that is judged counts as a try."""
        self.check(BACK_OFF)
        self.tries += 1

    def void(self) -> None:
        """The failure that is judged was not the row's."""
        self.check(BACK_OFF)
        self.voids += 1

    def back_off(self) -> None:
        """Let the row wait for its next try."""
        self._move(BACK_OFF)

    def deny(self) -> None:
        """The server does not allow its request: waits until it is known whether the row or the engine is meant."""
        self._move(DENY)

    def set_aside(self) -> None:
        """The engine answers others: waits without a slot."""
        self._move(SET_ASIDE)

    # --- back to the queue ---

    def ask_again(self) -> None:
        """Let the row be sent again: within its trial, where it takes part in one."""
        self._move(ASK_AGAIN if self.group is None else ASK_AGAIN_IN_TRIAL)

    def ask_for_repair(self, repair: Repair, held: int) -> None:
        """The next request is to repair an answer of so many bytes."""
        self.repair, self.cut, self.kept = repair, None, held

    def ask_for_more(self, max_tokens: int, cut: Completion, held: int) -> None:
        """The next request is for a longer answer than `cut`, which holds so many bytes with what it repairs."""
        self.max_tokens, self.cut, self.kept = max_tokens, cut, held
        self.cuts += 1

    def take_cut(self) -> Completion | None:
        """The cut answer that is left as it is, as there is no room for a longer one. None: there is none."""
        cut, self.cut, self.max_tokens = self.cut, None, None
        return cut

    def next_turn(self, turn: Turn) -> None:
        """A turn was answered, or what the user says in it written: the next text is to be asked, and nothing counts
        against it yet.
        """
        self._move(NEXT_TURN)
        self.group = None
        self.tries = self.voids = self.deaths = self.alone_deaths = self.cuts = self.kept = 0
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.seconds = 0.0
        self.repair = self.max_tokens = self.cut = None
        self.resume((turn,))

    def resume(self, turns: Sequence[Turn]) -> None:
        """These turns were answered, by whatever run: the conversation goes on after them. Of a model that writes the
        user's words, the last one may have no answer yet.
        """
        for turn in turns:
            before = self.answered_turns
            if len(before) == len(self.turns) and before and turn.user_model is not None:
                self._user_says(turn.user)
            self.turns = (*before, turn)
            if turn.answered and self.row.user is None:
                self._user_says(self.row.turns[len(self.turns)])
        user, goes_on = self.row.user, bool(self.turns) and self.turns[-1].answered
        self.user_request = user.request(self.turns) if user is not None and goes_on else b""

    def _user_says(self, text: str) -> None:
        """The conversation with the last answer, and this after it."""
        self.conversation = next_request(self.conversation or self.row.prompt, self.turns[-1].output or "", text)

    def give_back(self) -> None:
        """Its engine serves no longer."""
        self._move(GIVE_BACK)
        self.group = None

    # --- engine deaths ---

    def add_death(self) -> int:
        """Count that the row was in flight, among others, at an engine's death. Returns how often so far."""
        self.deaths += 1
        return self.deaths

    def add_alone_death(self) -> int:
        """Count that the row was alone in flight at an engine's death. Returns how often so far."""
        self.alone_deaths += 1
        return self.alone_deaths

    def try_alone(self) -> None:
        """Let the row be sent with nothing in flight but its group, in a trial to come."""
        self._move(TRY_ALONE)
        self.group = None

    def join_trial(self, group: Group[Item]) -> None:
        """The trial of its group begins."""
        self.check(TRY_ALONE)
        self.group = group

    # --- the end ---

    def check_end(self, outcome: Outcome) -> None:
        """Raises InvalidTransition where the row may not end with this outcome now."""
        self.check(SUCCEED if outcome.error is None else DIE)

    def end(self, outcome: Outcome) -> None:
        """The row has its outcome, which is final."""
        self._move(SUCCEED if outcome.error is None else DIE)
        self.group = None
        self.batch.outcomes[self.index] = outcome
        self.batch.left -= 1

    def cancel(self) -> None:
        """Its job has ended, and it has no outcome."""
        self._move(CANCEL)
        self.group = None


# Entered around each request of an engine, with the jobs of its rows, each once.
RequestContext = Callable[[Sequence[str]], AbstractContextManager[object]]


@dataclass(slots=True, eq=False)
class Request:
    """A request to an engine for these rows.

    `refused`: the list of which these rows are a part, where that was refused. `slot`: the task that waits for the
    answer. `answered`: the answer has come, and waits for room. `broken_off`: nobody wants the answer any more, nor
    what else comes of it; the rows are elsewhere, or are over. `second`: a request for the same rows, as this one is
    late (second_requests.py).
    """

    rows: Sequence[Item]
    refused: RefusedList | None = None
    slot: asyncio.Task[None] | None = None
    answered: bool = False
    broken_off: bool = False
    second: asyncio.Task[None] | None = None

    def cancel_second(self) -> None:
        """This one has ended, or its answer is being read: the second one is not waited for."""
        second, self.second = self.second, None
        if second is not None and second is not asyncio.current_task():
            second.cancel()

    @property
    def jobs(self) -> list[str]:
        """The jobs of its rows, each once, in the order of the rows."""
        return list(dict.fromkeys([item.batch.job for item in self.rows]))
