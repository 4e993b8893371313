"""Requests of batches that are over: of one row, and of several rows of several batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from batch_assets.api.execution.stops import STOPPED, StoppableEngine, Stops, marked
from gpu_runner.client.protocol import Completion, RowRejected
from gpu_runner.client.verbatim_client import VerbatimClient


class Client:
    """Answers each body with itself, once it may."""

    def __init__(self) -> None:
        self.may_answer, self.asked = asyncio.Event(), list[list[bytes]]()

    async def generate_list(self, prompts: Sequence[bytes], *, admit: Any = None) -> list[Completion]:
        self.asked.append(list(prompts))
        await self.may_answer.wait()
        return [Completion(prompt.decode(), "stop", 1, 0) for prompt in prompts]


def test_a_list_with_a_row_of_a_batch_that_is_over_is_refused_before_it_and_meanwhile() -> None:
    async def scenario() -> None:
        client, stops = Client(), Stops()
        engine = StoppableEngine(cast(VerbatimClient, client), stops)
        prompts = [marked("one", b"a"), marked("other", b"b c"), marked("one", b"d")]
        asking = asyncio.create_task(engine.generate_list(prompts))
        await asyncio.sleep(0)
        assert client.asked == [[b"a", b"b c", b"d"]] and stops.names == 2
        stops.stop("unknown")
        await asyncio.sleep(0)
        assert not asking.done()
        stops.stop("other")
        with pytest.raises(RowRejected, match=STOPPED):
            await asking
        with pytest.raises(RowRejected, match=STOPPED):
            await engine.generate_list(prompts[1:])
        assert len(client.asked) == 1, "nothing is sent for a batch that is over"
        client.may_answer.set()
        assert [one.output for one in await engine.generate_list([prompts[0], prompts[2]])] == ["a", "d"]
        stops.forget("other")
        stops.forget("unknown")
        assert stops.names == 0

    asyncio.run(scenario())
