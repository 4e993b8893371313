"""The life of an engine worker: which transition is allowed in which state, and what a late one does."""

from __future__ import annotations

import pytest

from gpu_runner.inference.row_state import InvalidTransition
from gpu_runner.inference.worker_state import WorkerLife, WorkerState


def life(state: WorkerState) -> WorkerLife:
    found = WorkerLife()
    if state is not WorkerState.STARTING:
        found.start()
    if state is WorkerState.DRAINING:
        assert found.drain()
    if state in (WorkerState.ENDED, WorkerState.CLOSED):
        found.end()
    if state is WorkerState.CLOSED:
        found.close()
    assert found.state is state
    return found


def test_a_worker_serves_drains_ends_and_is_closed() -> None:
    found = WorkerLife()
    assert (found.serving, found.draining, found.over) == (False, False, False)
    found.start()
    assert (found.serving, found.draining, found.over) == (True, False, False)
    assert found.drain()
    assert (found.serving, found.draining, found.over) == (False, True, False)
    assert not found.ended.is_set()
    found.end()
    assert (found.serving, found.draining, found.over) == (False, False, True)
    assert found.ended.is_set()
    found.close()
    assert found.over
    assert found.error is None


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.SERVING, WorkerState.DRAINING])
def test_it_may_end_at_any_time_and_the_first_reason_counts(state: WorkerState) -> None:
    found, first = life(state), ValueError("first")
    found.end(first)
    found.end(ValueError("second"))
    assert (found.state, found.error) == (WorkerState.ENDED, first)
    found.close()
    found.end(ValueError("third"))
    assert (found.state, found.error) == (WorkerState.CLOSED, first)


@pytest.mark.parametrize("state", [state for state in WorkerState if state is not WorkerState.SERVING])
def test_a_drain_that_comes_too_late_or_again_changes_nothing(state: WorkerState) -> None:
    found = life(state)
    assert not found.drain()
    assert found.state is state


@pytest.mark.parametrize("state", [state for state in WorkerState if state is not WorkerState.STARTING])
def test_what_was_started_is_not_started_again(state: WorkerState) -> None:
    with pytest.raises(InvalidTransition, match=f"expected STARTING, found {state.name}"):
        life(state).start()


@pytest.mark.parametrize("state", [state for state in WorkerState if state is not WorkerState.ENDED])
def test_only_what_has_ended_is_closed(state: WorkerState) -> None:
    with pytest.raises(InvalidTransition, match=f"expected ENDED, found {state.name}"):
        life(state).close()
