"""The continuous-batching model, against hand-made figures and against a model that walks token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.timing import SOAK

from gpu_runner.simulator.scheduler import Scheduler, Sequence, StepModel

# Steps of 1 s whatever is in them, so that times can be counted by hand.
UNIT = StepModel(
    max_num_seqs=4,
    max_batched_tokens=100,
    kv_tokens=10_000,
    weights_seconds=1.0,
    token_seconds=0.0,
    context_seconds=0.0,
    overhead_seconds=0.0,
)


def unit(**changes: float) -> StepModel:
    return StepModel(**{name: getattr(UNIT, name) for name in StepModel.__slots__} | changes)


def run_dry(scheduler: Scheduler) -> list[Sequence]:
    return scheduler.advance(1e9)


def test_the_first_token_comes_out_of_the_prefill_and_each_further_one_costs_a_step() -> None:
    scheduler = Scheduler(UNIT)
    sequence = scheduler.submit(prompt_tokens=50, output_tokens=5, at=2.0)
    assert run_dry(scheduler) == [sequence]
    assert sequence.first_token_at == 3.0
    assert sequence.finished_at == 7.0


def test_a_long_prompt_is_prefilled_in_chunks_of_the_token_budget() -> None:
    scheduler = Scheduler(UNIT)
    sequence = scheduler.submit(prompt_tokens=250, output_tokens=1, at=0.0)
    run_dry(scheduler)
    assert sequence.first_token_at == sequence.finished_at == 3.0


def test_decoding_sequences_take_their_share_of_the_budget_before_prefill() -> None:
    scheduler = Scheduler(unit(max_batched_tokens=10))
    scheduler.submit(prompt_tokens=1, output_tokens=100, at=0.0)
    late = scheduler.submit(prompt_tokens=18, output_tokens=1, at=5.0)
    run_dry(scheduler)
    assert late.finished_at == 7.0  # 9 tokens of prefill in each of two steps


def test_an_embedding_ends_with_its_prefill_and_generates_nothing() -> None:
    scheduler = Scheduler(UNIT)
    sequence = scheduler.submit(prompt_tokens=50, output_tokens=0, at=0.0)
    run_dry(scheduler)
    assert (sequence.finished_at, scheduler.generated_tokens, scheduler.kv_used) == (1.0, 0, 0)


def test_a_sequence_may_fill_the_kv_cache_to_its_last_token() -> None:
    scheduler = Scheduler(unit(kv_tokens=60))
    sequences = [scheduler.submit(60, 0, at=0.0), scheduler.submit(59, 1, at=0.0), scheduler.submit(10, 50, at=0.0)]
    assert run_dry(scheduler) == sequences


def test_more_sequences_than_slots_wait_and_are_admitted_first_come_first_served() -> None:
    scheduler = Scheduler(UNIT)
    sequences = [scheduler.submit(1, 3, at=0.0) for _ in range(6)]
    scheduler.advance(1.5)
    assert (scheduler.running_count, scheduler.waiting_count) == (4, 2)
    assert run_dry(scheduler) == sequences
    assert [s.finished_at for s in sequences] == [3.0, 3.0, 3.0, 3.0, 6.0, 6.0]


def test_nothing_is_finished_before_its_step_has_ended() -> None:
    scheduler = Scheduler(UNIT)
    scheduler.submit(1, 3, at=0.0)
    assert scheduler.advance(2.999) == []
    assert len(scheduler.advance(3.0)) == 1


def test_a_sequence_is_slower_the_more_context_the_engine_reads() -> None:
    scheduler = Scheduler(unit(context_seconds=0.001))
    sequence = scheduler.submit(100, 3, at=0.0)
    run_dry(scheduler)
    # Prefill reads the 100 tokens it holds; the two decode steps read 101 and 102.
    assert sequence.finished_at == pytest.approx(3 + 0.1 + 0.101 + 0.102)


def test_a_batch_beyond_the_memory_bound_takes_the_time_to_compute_its_tokens() -> None:
    model = StepModel()
    assert model.compute_seconds(1) == pytest.approx(0.0038)
    assert model.compute_seconds(256) == pytest.approx(0.0005 + 256 * 32e-6)


def test_an_aborted_sequence_frees_its_slot_and_its_kv_at_once() -> None:
    scheduler = Scheduler(unit(max_num_seqs=1))
    first, second, third = (scheduler.submit(10, 50, at=0.0) for _ in range(3))
    scheduler.advance(5.0)
    scheduler.abort(second)  # waits
    scheduler.abort(first)  # runs
    assert (scheduler.kv_used, scheduler.running_count, scheduler.waiting_count) == (0, 0, 1)
    assert run_dry(scheduler) == [third]
    scheduler.abort(third)  # finished: nothing to free
    assert (scheduler.kv_used, scheduler.busy) == (0, False)


def test_a_sequence_aborted_in_its_prefill_never_finishes() -> None:
    scheduler = Scheduler(UNIT)
    sequence = scheduler.submit(250, 5, at=0.0)
    scheduler.advance(1.5)
    scheduler.abort(sequence)
    assert run_dry(scheduler) == []
    assert scheduler.kv_used == 0


def test_a_full_kv_cache_preempts_the_youngest_which_recomputes_and_still_finishes() -> None:
    scheduler = Scheduler(unit(kv_tokens=60))
    old = scheduler.submit(10, 40, at=0.0)
    young = scheduler.submit(10, 40, at=0.5)
    assert run_dry(scheduler) == [old, young]
    assert (old.preemptions, scheduler.preemptions) == (0, young.preemptions)
    assert young.preemptions >= 1
    assert scheduler.generated_tokens == 80


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit 60"):
        Scheduler(unit(kv_tokens=60)).submit(50, 11, at=0.0)


def test_steady_throughput_is_what_the_step_time_allows() -> None:
    model = StepModel(max_num_seqs=64, context_seconds=0.0, token_seconds=0.0)
    scheduler = Scheduler(model)
    for _ in range(1024):
        scheduler.submit(10, 100, at=0.0)
    last = run_dry(scheduler)[-1]
    assert last.finished_at == pytest.approx(1024 / 64 * 100 * model.compute_seconds(64))


class Reference:
    """The same rules without shortcuts: one step at a time, one token at a time."""

    def __init__(self, model: StepModel, work: list[tuple[float, int, int]]) -> None:
        self.model = model
        self.queue = [{"at": at, "p": p, "o": o, "done": 0, "left": 0, "end": -1.0} for at, p, o in work]
        self.all = list(self.queue)

    def run(self) -> list[float]:
        clock, prefill, decode = 0.0, [], []
        while self.queue or prefill or decode:
            if not prefill and not decode:
                clock = max(clock, self.queue[0]["at"])
            preempted = False
            while (
                len(prefill + decode) > 1 and self._kv(prefill + decode) + len(prefill + decode) > self.model.kv_tokens
            ):
                self.queue.insert(0, (prefill or decode).pop())
                preempted = True
            chunks, budget = [], self.model.max_batched_tokens - len(decode)
            for one in prefill:
                chunks.append((one, min(one["left"], budget)))
                budget -= chunks[-1][1]
            while not preempted and budget > 0 and self.queue and self.queue[0]["at"] <= clock:
                one, running = self.queue[0], prefill + decode
                needed = self._kv(running) + len(running) + one["p"] + one["done"] + 1
                if len(running) >= self.model.max_num_seqs or needed > self.model.kv_tokens:
                    break
                self.queue.pop(0)
                one["left"] = one["p"] + one["done"]
                prefill.append(one)
                chunks.append((one, min(one["left"], budget)))
                budget -= chunks[-1][1]
            tokens = len(decode) + sum(n for _, n in chunks)
            kv = self._kv(prefill + decode) * self.model.context_seconds
            clock += self.model.compute_seconds(tokens) + kv
            for one in decode:
                one["done"] += 1
            for one, n in chunks:
                one["left"] -= n
                if not one["left"]:
                    one["done"] += 1
                    prefill.remove(one)
                    decode.append(one)
            for one in [one for one in decode if one["done"] >= one["o"]]:
                one["end"] = clock
                decode.remove(one)
        return [one["end"] for one in self.all]

    def _kv(self, running: list[dict[str, float]]) -> float:
        return sum(one["p"] + one["done"] for one in running)


def spaced(work: list[tuple[int, int, int]]) -> list[tuple[float, int, int]]:
    """Arrivals in order, each with a fraction of its own: steps take whole tenths of a millisecond, so that no
    arrival falls on the end of a step, where rounding would decide."""
    return [(at / 100 + n * 1e-6, p, o) for n, (at, p, o) in enumerate(sorted(work))]


workloads = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12
).map(spaced)
models = st.builds(
    StepModel,
    max_num_seqs=st.integers(1, 6),
    max_batched_tokens=st.integers(10, 80),
    kv_tokens=st.integers(100, 300),
    weights_seconds=st.just(0.02),
    token_seconds=st.just(0.001),
    context_seconds=st.just(0.0001),
    overhead_seconds=st.just(0.001),
)


@settings(max_examples=300 if SOAK else 100, deadline=None)
@given(workloads, models)
def test_the_shortcuts_give_the_times_of_a_walk_token_by_token(
    work: list[tuple[float, int, int]], model: StepModel
) -> None:
    scheduler = Scheduler(model)
    sequences = [scheduler.submit(p, o, at) for at, p, o in work]
    run_dry(scheduler)
    assert [s.finished_at for s in sequences] == pytest.approx(Reference(model, work).run())


@settings(max_examples=200 if SOAK else 80, deadline=None)
@given(workloads, models, st.floats(0.003, 0.3))
def test_looking_often_or_rarely_changes_nothing(
    work: list[tuple[float, int, int]], model: StepModel, slice_seconds: float
) -> None:
    leap, walk = Scheduler(model), Scheduler(model)
    expected = [leap.submit(p, o, at) for at, p, o in work]
    run_dry(leap)
    found, pending, now = [], list(work), 0.0
    while pending or walk.busy:
        now += slice_seconds
        while pending and pending[0][0] <= now:
            at, p, o = pending.pop(0)
            found.append(walk.submit(p, o, at))
        walk.advance(now)
        assert walk.running_count <= model.max_num_seqs
        assert walk.kv_used <= model.kv_tokens or walk.running_count == 1
    assert [s.finished_at for s in found] == pytest.approx([s.finished_at for s in expected])
    assert walk.generated_tokens == leap.generated_tokens == sum(o for _, _, o in work)
    assert walk.kv_used == leap.kv_used == 0


@settings(max_examples=200 if SOAK else 80, deadline=None)
@given(workloads, models, st.data())
def test_aborts_at_any_moment_leave_nothing_behind(
    work: list[tuple[float, int, int]], model: StepModel, data: st.DataObject
) -> None:
    scheduler = Scheduler(model)
    sequences = [scheduler.submit(p, o, at) for at, p, o in work]
    victims = data.draw(st.lists(st.sampled_from(sequences), unique=True))
    finished: list[Sequence] = []
    for victim in victims:
        finished += scheduler.advance(scheduler.clock + data.draw(st.floats(0, 1)))
        scheduler.abort(victim)
    finished += run_dry(scheduler)
    assert set(finished) >= set(sequences) - set(victims)
    assert len(finished) == len(set(finished))
    assert (scheduler.kv_used, scheduler.running_count, scheduler.waiting_count) == (0, 0, 0)


def test_priority_scheduling_admits_the_lowest_number_first_and_equals_in_order() -> None:
    scheduler = Scheduler(unit(max_num_seqs=1, by_priority=True))
    running = scheduler.submit(1, 5, at=0.0, priority=9)
    scheduler.advance(1.5)
    late = [scheduler.submit(1, 2, at=1.5, priority=priority) for priority in (5, 0, 5, -1)]
    finished = scheduler.advance(100.0)
    assert finished == [running, late[3], late[1], late[0], late[2]], "a slot is not taken from who has it"


def test_without_priority_scheduling_a_priority_says_nothing() -> None:
    scheduler = Scheduler(unit(max_num_seqs=1))
    order = [scheduler.submit(1, 2, at=0.0, priority=priority) for priority in (5, 0, -1)]
    assert scheduler.advance(100.0) == order


def test_priority_scheduling_preempts_the_highest_number_that_came_last() -> None:
    scheduler = Scheduler(unit(kv_tokens=60, by_priority=True))
    batch = scheduler.submit(10, 40, at=0.0, priority=100)
    young = scheduler.submit(10, 40, at=0.0, priority=0)
    finished = scheduler.advance(200.0)
    assert finished == [young, batch] and batch.preemptions > 0 and young.preemptions == 0


def test_a_priority_that_has_not_arrived_holds_nobody_up() -> None:
    scheduler = Scheduler(unit(max_num_seqs=1, by_priority=True))
    now = scheduler.submit(1, 2, at=0.0, priority=5)
    later = scheduler.submit(1, 2, at=50.0, priority=0)
    assert scheduler.advance(10.0) == [now]
    assert scheduler.advance(100.0) == [later]
