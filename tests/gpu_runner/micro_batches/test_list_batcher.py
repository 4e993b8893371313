"""Requests of many callers as lists: each caller its own outcome, whoever leaves, whatever fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop
from support.virtual_time import run

from gpu_runner.micro_batches.list_batcher import BatcherClosed, BatcherFull, BatchPolicy, ListBatcher, ListRefused
from gpu_runner.micro_batches.list_buffer import WaitPolicy
from gpu_runner.micro_batches.list_limits import ListLimits


class ListServer:
    """A fixed batch API: so many inputs in so many seconds. `bad` inputs refuse their list."""

    def __init__(self, seconds: float = 0.2, most: int = 64, bad: frozenset[int] = frozenset()) -> None:
        self.seconds, self.most, self.bad = seconds, most, bad
        self.lists: list[list[int]] = []
        self.error: Exception | None = None
        self.open = self.ended = 0

    async def send(self, values: Sequence[int]) -> list[int]:
        self.lists.append(list(values))
        self.open += 1
        try:
            await asyncio.sleep(self.seconds)
            if self.error is not None:
                raise self.error
            if self.bad & set(values) or len(values) > self.most:
                raise ListRefused(KeyError("bad input"))
            return [10 * value for value in values]
        finally:
            self.open -= 1


class Seen:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.waits: list[float] = []
        self.deepest = self.now = 0

    def sent(self, size: int, waited: float) -> None:
        self.sizes.append(size)
        self.waits.append(waited)

    def answered(self, seconds: float) -> None:
        assert seconds >= 0

    def depth(self, waiting: int) -> None:
        self.now = waiting
        self.deepest = max(self.deepest, waiting)


def batcher(server: ListServer, seen: Seen | None = None, **policy: Any) -> ListBatcher[int, int]:
    return ListBatcher(server.send, lambda value: 1, BatchPolicy(**policy), seen)


async def outcomes(made: ListBatcher[int, int], values: Sequence[int]) -> list[Any]:
    return await asyncio.gather(*[made.ask(value) for value in values], return_exceptions=True)


def test_callers_at_once_share_full_lists_and_get_their_own_answers() -> None:
    async def main() -> None:
        server, seen = ListServer(), Seen()
        made = batcher(server, seen)
        assert await outcomes(made, range(150)) == [10 * value for value in range(150)]
        assert seen.sizes == [64, 64, 22] and seen.now == 0 and seen.deepest <= 64
        assert max(seen.waits) <= 0.05 and made.idle

    run(main)


@pytest.mark.parametrize(("rate", "longest", "fewest"), [(10, 0.005, 1), (100, 0.05, 2), (1000, 0.05, 30)])
def test_no_request_waits_longer_than_50_ms_and_when_it_is_quiet_5_ms(rate: int, longest: float, fewest: int) -> None:
    async def main() -> None:
        server, seen, rng = ListServer(), Seen(), random.Random(1)
        made = batcher(server, seen)
        asked = []
        for value in range(10 * rate if rate < 1000 else 3000):
            asked.append(asyncio.create_task(made.ask(value)))
            await asyncio.sleep(rng.expovariate(rate))
        await asyncio.gather(*asked)
        late = sorted(seen.waits)
        assert late[-1] <= 0.05 and late[int(0.95 * len(late))] <= longest
        assert sum(seen.sizes) / len(seen.sizes) >= fewest

    run(main)


def test_an_input_at_fault_is_found_and_the_others_are_answered() -> None:
    async def main() -> None:
        server = ListServer(bad=frozenset({5, 40}))
        found = await outcomes(batcher(server), range(64))
        assert [type(found[value]) for value in (5, 40)] == [KeyError, KeyError]
        assert [found[value] for value in range(64) if value not in (5, 40)] == [
            10 * value for value in range(64) if value not in (5, 40)
        ]
        assert len(server.lists) <= 1 + 2 * 2 * 6

    run(main)


def test_a_failure_is_that_of_each_input_and_is_not_bisected() -> None:
    async def main() -> None:
        server = ListServer()
        server.error = ConnectionError("gone")
        assert {type(found) for found in await outcomes(batcher(server), range(64))} == {ConnectionError}
        assert len(server.lists) == 1

    run(main)


def test_a_server_that_takes_fewer_is_sent_fewer() -> None:
    async def main() -> None:
        server = ListServer(most=32)
        made = batcher(server)
        assert await outcomes(made, range(64)) == [10 * value for value in range(64)]
        server.lists.clear()
        await outcomes(made, range(64))
        assert [len(each) for each in server.lists] == [32, 32]

    run(main)


def test_who_leaves_before_the_list_is_sent_is_not_in_it() -> None:
    async def main() -> None:
        server = ListServer()
        made = batcher(server)
        asked = [asyncio.create_task(made.ask(value)) for value in range(3)]
        await asyncio.sleep(0)
        asked[1].cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert server.lists == [[0, 2]] and made.idle

    run(main)


def test_a_request_for_which_nobody_waits_is_ended() -> None:
    async def main() -> None:
        server = ListServer(seconds=10.0)
        made = batcher(server)
        asked = [asyncio.create_task(made.ask(value)) for value in range(2)]
        await asyncio.sleep(1.0)
        asked[0].cancel()
        await asyncio.sleep(1.0)
        assert server.open == 1
        asked[1].cancel()
        await asyncio.sleep(0.1)
        assert server.open == 0 and made.idle

    run(main)


def test_a_part_of_a_refused_list_for_which_nobody_waits_is_ended() -> None:
    """Those who have their answers already do not keep the rest of the list going."""

    async def main() -> None:
        server = ListServer(seconds=10.0, bad=frozenset({0}))
        made = batcher(server)
        asked = [asyncio.create_task(made.ask(value)) for value in (1, 2, 3, 0)]
        await asyncio.sleep(25.0)  # refused after 10 s, the first half answered after 20
        assert [task.done() for task in asked] == [True, True, False, False] and server.open == 1
        for task in asked[2:]:
            task.cancel()
        await asyncio.sleep(0.1)
        assert server.open == 0 and made.idle

    run(main)


def test_while_all_calls_are_under_way_lists_get_fuller_and_the_queue_is_bounded() -> None:
    async def main() -> None:
        server, seen = ListServer(), Seen()
        made = batcher(server, seen, calls=1, waiting=100)
        asked = []
        for value in range(60):
            asked.append(asyncio.create_task(made.ask(value)))
            await asyncio.sleep(0.01)
        assert await asyncio.gather(*asked) == [10 * value for value in range(60)]
        assert len(seen.sizes) <= 5
        found = await outcomes(made, range(300))
        assert sum(isinstance(one, BatcherFull) for one in found) == 300 - 64 - 100
        assert server.open == 0

    run(main)


def test_closing_ends_everything() -> None:
    async def main() -> None:
        server = ListServer(seconds=10.0)
        made = batcher(server, limits=ListLimits(inputs=4), calls=1)
        asked = [asyncio.create_task(made.ask(value)) for value in range(10)]
        await asyncio.sleep(1.0)
        await made.close()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(one) for one in found} == {BatcherClosed} and server.open == 0
        with pytest.raises(BatcherClosed):
            await made.ask(1)

    run(main)


def test_a_caller_who_leaves_in_the_midst_of_a_bisection_is_left_out() -> None:
    async def main() -> None:
        server = ListServer(bad=frozenset({0}))
        made = batcher(server, limits=ListLimits(inputs=8))
        asked = [asyncio.create_task(made.ask(value)) for value in range(8)]
        await asyncio.sleep(0.3)
        asked[7].cancel()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(found[0], KeyError) and found[1:7] == [10 * value for value in range(1, 7)]
        assert not any(7 in each for each in server.lists[2:])

    run(main)


def test_inputs_that_become_due_within_a_millisecond_are_answered_on_uvloop() -> None:
    async def scenario() -> None:
        lists = batcher(ListServer(seconds=0.001), wait=WaitPolicy(longest=0.0004, quiet=0.0002))
        assert await outcomes(lists, range(10)) == [10 * number for number in range(10)]
        await lists.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
