"""As many loops as engines are wanted: more at once, fewer in an order that costs least."""

from __future__ import annotations

import asyncio

import pytest

from batch_assets.api.execution.engines.engine_slots import SURPLUS_SECONDS, EngineSlot, EngineSlots


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_loops_without_an_engine_leave_first_and_then_the_last_that_got_one() -> None:
    clock, began, end = Clock(), list[EngineSlot](), asyncio.Event()
    slots = EngineSlots(1, clock)

    async def serve(slot: EngineSlot) -> None:
        slot.serving = len(began) < 3
        began.append(slot)
        await end.wait()

    async def steps() -> None:
        running = asyncio.create_task(slots.run(serve))
        await asyncio.sleep(0)
        slots.want(4)
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(began) == 4 and [slot.serving for slot in began] == [True, True, True, False]
        slots.want(1)
        assert slots.too_many == 2, "the one that waits is cancelled at once"
        assert not any(slot.leaves for slot in began[:3]), "an instance that is to end may be leaving"
        clock.now = SURPLUS_SECONDS
        assert [slot.leaves for slot in began[:3]] == [False, True, True]
        assert not began[0].needed
        slots.want(3)
        assert not any(slot.leaves for slot in began[:3]) and began[0].needed
        slots.want(0)
        assert slots.wanted == 1
        end.set()
        await running

    asyncio.run(steps())


def test_what_a_loop_raises_ends_all_of_them() -> None:
    slots, cancelled = EngineSlots(2), []

    async def serve(slot: EngineSlot) -> None:
        if cancelled or slot.serving:
            raise AssertionError
        slot.serving = True
        try:
            if not slots.too_many and len(slots._loops) == 2 and list(slots._loops)[1] is slot:
                raise ValueError("a defect")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(slot)
            raise

    with pytest.raises(ValueError, match="a defect"):
        asyncio.run(slots.run(serve))
    assert len(cancelled) == 1
