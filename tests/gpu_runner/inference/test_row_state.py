"""A row's states: each transition only from where it is allowed, one outcome per row, no other writer."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import property_test
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches, row
from support.virtual_time import run

import gpu_runner.inference
from gpu_runner.client.protocol import EngineLost, RowRejected, Transient, error_of
from gpu_runner.inference import row_state
from gpu_runner.inference.answer_memory import BatchBytes
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.inference.poison_rows import Group
from gpu_runner.inference.row_state import (
    TERMINAL,
    TRANSITIONS,
    InvalidTransition,
    Item,
    OpenBatch,
    RowState,
    Transition,
)
from gpu_runner.rows import Outcome, Turn, Urgency


def outcome(error: str | None = None) -> Outcome:
    return Outcome("r0", "key-r0", None if error else "text", "stop", 1, 1, 1, error, None, ORIGIN, 0.0, 0.0, None)


def item(state: RowState = RowState.WAITING, *, in_trial: bool = False) -> Item:
    group: Group[Item] | None = Group(deque(), 1) if in_trial else None
    return Item(row("b0", "r0"), OpenBatch("b0", [None], 1, BatchBytes(1 << 20)), 0, 0, state, group=group)


def in_trial(state: RowState) -> Item:
    return item(state, in_trial=True)


def in_conversation(state: RowState) -> Item:
    one = in_trial(state)
    return dataclasses.replace(one, row=dataclasses.replace(one.row, turns=("hi", "why?", "so?")))


TURN = Turn("hi", "yes", "stop", None, 1, 1, 1, 0.5, None)
MOVES: dict[Transition, tuple[Callable[[RowState], Item], Callable[[Item], object]]] = {
    row_state.SEND: (item, lambda one: one.send(1.0)),
    row_state.WAIT_FOR_ROOM: (item, Item.wait_for_room),
    row_state.READ_ANSWER: (item, lambda one: one.read_answer(5)),
    row_state.ASK_AGAIN: (item, Item.ask_again),
    row_state.NEXT_TURN: (in_conversation, lambda one: one.next_turn(TURN)),
    row_state.ASK_AGAIN_IN_TRIAL: (in_trial, Item.ask_again),
    row_state.FAIL: (item, Item.fail),
    row_state.BACK_OFF: (item, Item.back_off),
    row_state.DENY: (item, Item.deny),
    row_state.SET_ASIDE: (item, Item.set_aside),
    row_state.GIVE_BACK: (in_trial, Item.give_back),
    row_state.TRY_ALONE: (in_trial, Item.try_alone),
    row_state.SUCCEED: (item, lambda one: one.end(outcome())),
    row_state.DIE: (item, lambda one: one.end(outcome("http_500"))),
    row_state.CANCEL: (in_trial, Item.cancel),
}
CASES = [
    pytest.param(transition, state, id=f"{transition.name}-{state.name}")
    for transition in TRANSITIONS
    for state in RowState
]


def test_every_transition_has_a_method() -> None:
    assert set(MOVES) == set(TRANSITIONS)
    assert len({transition.name for transition in TRANSITIONS}) == len(TRANSITIONS)


@pytest.mark.parametrize(("transition", "state"), CASES)
def test_a_transition_is_made_where_the_table_allows_it_and_raises_elsewhere(
    transition: Transition, state: RowState
) -> None:
    make, move = MOVES[transition]
    one = make(state)
    if state in transition.sources:
        move(one)
        assert one.state is transition.target
        return
    before = dataclasses.astuple(one)
    with pytest.raises(InvalidTransition, match=f"{transition.name}, found row 'r0' in {state.name}"):
        move(one)
    assert dataclasses.astuple(one) == before


def test_no_transition_leaves_a_terminal_state_and_every_other_state_leads_to_one() -> None:
    assert not any(transition.sources & TERMINAL for transition in TRANSITIONS)
    reach = set(TERMINAL)
    for _ in RowState:
        reach |= {source for transition in TRANSITIONS if transition.target in reach for source in transition.sources}
    assert reach == set(RowState)
    assert {transition.target for transition in TRANSITIONS} == set(RowState)


@pytest.mark.parametrize("state", RowState)
def test_a_try_is_counted_only_while_its_failure_is_judged(state: RowState) -> None:
    one = item(state)
    for count in (one.charge, one.void):
        if state in (RowState.UNDECIDED, RowState.SET_ASIDE):
            count()
        else:
            with pytest.raises(InvalidTransition):
                count()
    expected = int(state in (RowState.UNDECIDED, RowState.SET_ASIDE))
    assert (one.tries, one.voids) == (expected, expected)


def test_an_outcome_is_counted_once_in_its_batch() -> None:
    one = item(RowState.IN_FLIGHT)
    one.end(outcome())
    with pytest.raises(InvalidTransition):
        one.end(outcome("http_500"))
    assert one.batch.left == 0 and one.batch.outcomes == [outcome()]


@settings(deadline=None)
@given(st.lists(st.sampled_from(TRANSITIONS), max_size=60), st.booleans())
def test_whatever_is_tried_a_row_ends_at_most_once_and_stays_there(steps: list[Transition], grouped: bool) -> None:
    one = item(in_trial=grouped)
    one.row = dataclasses.replace(one.row, turns=("and then?",) * 61)
    ended: RowState | None = None
    for transition in steps:
        before = one.state
        in_group = one.group is not None
        allowed = before in transition.sources
        if transition in (row_state.ASK_AGAIN, row_state.ASK_AGAIN_IN_TRIAL):
            allowed = before in row_state.ASK_AGAIN.sources
        try:
            MOVES[transition][1](one)
        except InvalidTransition:
            assert not allowed and one.state is before
            continue
        assert allowed and ended is None
        if transition in (row_state.ASK_AGAIN, row_state.ASK_AGAIN_IN_TRIAL):
            assert one.state is (RowState.SUSPECT if in_group else RowState.WAITING)
        if one.state in TERMINAL:
            ended = one.state
    without = (None, RowState.CANCELLED)
    assert one.batch.left == (1 if ended in without else 0)
    assert (one.batch.outcomes[0] is None) == (ended in without)


# --- in a feed ---


def audit(feed: Feed) -> None:
    """Every row that a feed holds is in one place, and in the state of that place."""
    work = feed._work
    places = [(one, {RowState.WAITING}) for one in work.ready]
    places += [(one, {RowState.BACKING_OFF}) for _, _, one in work._later]
    places += [(one, {RowState.SUSPECT}) for group in work.suspects._stack for one in group.waiting]
    for worker in feed._workers:
        places += [(one, {RowState.IN_FLIGHT, RowState.ANSWER_WAITING}) for one in worker.in_flight]
        places += [(failure.item, {RowState.UNDECIDED}) for failure in worker.failures._undecided]
        places += [(denial.item, {RowState.DENIED}) for denial in worker.failures.denials._fresh]
        places += [(denial.item, {RowState.SET_ASIDE}) for denial in worker.failures.denials._aside]
        if worker.group is not None:
            places += [(one, {RowState.SUSPECT}) for one in worker.group.waiting]
    assert len({id(one) for one, _ in places}) == len(places)
    for one, states in places:
        assert one.state in states, (one.row.row_id, one.state, states)


@pytest.mark.slow
@property_test(
    12,
    40,
    bad=st.dictionaries(
        st.integers(0, 59), st.sampled_from(["kill", "hang", "rejected", "denied", "once", "always"]), max_size=6
    ),
    deaths=st.lists(st.floats(0.0, 3.0), max_size=3),
    seqs=st.sampled_from([1, 4, 32]),
    seed=st.integers(0, 9),
    urgencies=st.lists(
        st.builds(Urgency, st.integers(0, 1), st.sampled_from("ab"), st.sampled_from([1.0, 2.0])),
        min_size=6,
        max_size=6,
    ),
)
def test_whatever_fails_each_row_is_in_the_state_of_its_place_and_ends_once(
    bad: dict[int, str], deaths: list[float], seqs: int, seed: int, urgencies: list[Urgency]
) -> None:
    rules: dict[str, object] = {}
    for number, kind in bad.items():
        rules[f"r{number}"] = {
            "kill": "kill",
            "hang": "hang",
            "rejected": RowRejected("rejected_400"),
            "denied": error_of(403, {}, b"{}"),
            "once": [Transient("http_500")],
            "always": Transient("http_502"),
        }[kind]
    sink, ends = Sink(), Counter[str]()
    move = Item._move

    def note(one: Item, transition: Transition) -> None:
        move(one, transition)
        ends[one.row.row_id] += one.state in TERMINAL

    async def main() -> None:
        def on_row(job: str, key: str, ended: Outcome) -> None:
            audit(feed)
            sink.on_row(job, key, ended)

        source = [
            dataclasses.replace(one, urgency=its) for one, its in zip(batches(60, size=10), urgencies, strict=True)
        ]
        feed = Feed(
            iter(source),
            on_row=on_row,
            on_batch=sink.on_batch,
            policy=FeedPolicy(stall_seconds=30),
            rng=random.Random(seed),
        )
        fates, engines = list(deaths), 0
        while not feed.finished:
            engines += 1
            assert engines < 100
            engine = FakeEngine(rules, slots=8)
            if fates:
                asyncio.get_running_loop().call_later(fates.pop(), engine.die)
            with suppress(EngineLost):
                await feed.serve(engine, ORIGIN, seqs)
            audit(feed)

    with mock.patch.object(Item, "_move", note):
        run(main)
    assert set(sink.outcomes()) == {f"r{i}" for i in range(60)}
    assert ends == dict.fromkeys(sink.outcomes(), 1)


# --- who writes ---


def writes(source: str, fields: set[str]) -> list[str]:
    """Assignments to these fields, or to what they hold, of other objects than `self` and counters."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute | ast.Subscript) or isinstance(node.ctx, ast.Load):
            continue
        field = node.value if isinstance(node, ast.Subscript) else node
        if (
            isinstance(field, ast.Attribute)
            and field.attr in fields
            and ast.unparse(field.value) not in {"self", "counts"}
        ):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_other_module_writes_a_field_of_a_row_or_of_its_batch() -> None:
    fields = {field.name for kind in (Item, OpenBatch) for field in dataclasses.fields(kind)}
    assert writes("item.tries += 1\nbatch.outcomes[0] = None\nself.group = item.group", fields) == [
        "line 1: item.tries",
        "line 2: batch.outcomes[0]",
    ]
    # Two modules know no rows and have fields of these names: those of a batch's bytes, and of a group.
    others = {"row_state.py", "answer_memory.py", "poison_rows.py"}
    modules = {path.name: path for path in Path(gpu_runner.inference.__file__).parent.glob("*.py")}
    assert others < set(modules)
    found = {name: writes(path.read_text(), fields) for name, path in modules.items() if name not in others}
    assert {name: lines for name, lines in found.items() if lines} == {}
