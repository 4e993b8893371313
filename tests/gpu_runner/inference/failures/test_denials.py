"""A row answered 401, 403, 404, 405 or a redirect: evidence decides whether the row or the engine is meant."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from aiohttp import web
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches
from support.http_server import ANSWER, http_server
from support.virtual_time import run

from gpu_runner.client.engine_client import EngineClient
from gpu_runner.client.protocol import EngineLost, EngineRefused, RowRejected, Transient, error_of
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.rows import Generation

STATUSES = [301, 302, 307, 308, 401, 403, 404, 405]


def denied(status: int = 403) -> Exception:
    return error_of(status, {"Location": "http://127.0.0.1:1/"}, b'{"error": {"message": "moderated"}}')


class Gate(FakeEngine):
    """Denies the rows of `rules`; its canary is answered as `canary_error` says."""

    canary_error: Exception | None = None
    prompts: Counter[str] | None = None

    async def canary(self, prompt: bytes | None = None) -> None:
        await super().canary(prompt)
        if prompt is not None:
            self.prompts = self.prompts or Counter()
            self.prompts[orjson.loads(prompt)] += 1
            await self.look_at(orjson.loads(prompt))
        elif self.canary_error is not None:
            raise self.canary_error

    async def look_at(self, text: str) -> None:
        """Raises for a prompt that is denied."""
        rule = self.rules.get(text)
        if isinstance(rule, Exception):
            raise rule


def make_feed(rows: int, sink: Sink, **options: Any) -> Feed:
    policy = FeedPolicy(**options)
    return Feed(iter(batches(rows)), on_row=sink.on_row, on_batch=sink.on_batch, policy=policy, rng=random.Random(0))


@pytest.mark.parametrize("status", STATUSES)
def test_one_denied_row_is_one_dead_letter_that_names_the_status(status: int) -> None:
    async def main() -> None:
        sink, engine = Sink(), Gate({"r3": denied(status)})
        await make_feed(200, sink).serve(engine, ORIGIN, 8)
        dead = sink.outcomes()["r3"]
        assert (dead.error, dead.error_message, dead.tries) == (f"rejected_{status}", "moderated", 1)
        assert sink.dead().keys() == {"r3"} and engine.asked["r3"] == 1
        assert len(sink.rows) == 200

    run(main)


@pytest.mark.parametrize("status", STATUSES)
def test_an_engine_that_denies_rows_and_canary_is_refused_and_no_row_is_charged(status: int) -> None:
    async def main() -> None:
        sink, engine = Sink(), Gate({f"r{i}": denied(status) for i in range(200)}, slots=8)
        engine.canary_error = denied(status)
        feed = make_feed(200, sink)
        started = asyncio.get_running_loop().time()
        with pytest.raises(EngineRefused, match=str(status)):
            await feed.serve(engine, ORIGIN, 2)
        assert asyncio.get_running_loop().time() - started < 5
        assert sink.rows == [] and feed.counts.charged == 0
        assert engine.asked.total() <= 8 and engine.canaries == 1  # one window, not the dataset
        await feed.serve(FakeEngine(), ORIGIN, 8)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


def test_a_key_that_is_revoked_in_mid_run_ends_serving_and_harms_no_row() -> None:
    class Revoked(Gate):
        async def generate(self, prompt: bytes, **options: Any) -> Any:
            if self.canary_error is not None:
                raise self.canary_error
            return await super().generate(prompt, **options)

        async def look_at(self, text: str) -> None:
            if self.canary_error is not None:
                raise self.canary_error

    async def main() -> None:
        sink, engine = Sink(), Revoked(seconds=1)
        feed = make_feed(600, sink)
        asyncio.get_running_loop().call_later(3.5, setattr, engine, "canary_error", denied(401))
        with pytest.raises(EngineRefused, match="key"):
            await feed.serve(engine, ORIGIN, 16)
        await feed.serve(FakeEngine(), ORIGIN, 16)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}
        assert len(sink.rows) == 600

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.2, 20.0])
def test_a_third_of_the_rows_denied_costs_few_canaries(seconds: float) -> None:
    async def main() -> None:
        wanted = {f"r{i}" for i in range(0, 2000, 3)}
        sink, engine = Sink(), Gate({name: denied() for name in wanted}, seconds=seconds)
        feed = make_feed(2000, sink)
        await feed.serve(engine, ORIGIN, 64)
        assert sink.dead() == dict.fromkeys(wanted, "rejected_403")
        assert feed.counts.requests == 2000
        assert engine.canaries <= 60

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("window", [2, 16, 256])
def test_an_engine_that_denies_every_row_but_answers_the_canary_is_refused_and_no_row_is_charged(window: int) -> None:
    async def main() -> None:
        rows = max(1000, 12 * window)
        sink, engine = Sink(), Gate({f"r{i}": denied() for i in range(rows)})
        feed = make_feed(rows, sink)
        with pytest.raises(EngineRefused, match="rejected_403"):
            await feed.serve(engine, ORIGIN, window)
        assert sink.rows == [] and feed.counts.charged == 0
        assert feed.counts.requests <= 5 * max(32, 2 * window)
        await feed.serve(FakeEngine(), ORIGIN, 256)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


def test_a_few_rows_that_are_all_denied_are_dead_letters_while_the_canary_answers() -> None:
    async def main() -> None:
        sink, engine = Sink(), Gate({f"r{i}": denied() for i in range(30)})
        await make_feed(30, sink).serve(engine, ORIGIN, 8)
        assert set(sink.dead().values()) == {"rejected_403"} and len(sink.rows) == 30

    run(main)


class Closing(Gate):
    """From a moment on every row is denied; requests without a row's prompt go on to be answered."""

    closed = False

    async def generate(self, prompt: bytes, **options: Any) -> Any:
        await self.look_at(orjson.loads(prompt))
        return await super().generate(prompt, **options)

    async def look_at(self, text: str) -> None:
        if self.closed:
            raise denied()


def test_rows_that_are_all_denied_from_some_moment_on_stop_the_run_and_none_is_charged() -> None:
    async def main() -> None:
        sink, engine = Sink(), Closing(seconds=1)
        feed = make_feed(3000, sink)
        asyncio.get_running_loop().call_later(3.5, setattr, engine, "closed", True)
        with pytest.raises(EngineRefused, match="403"):
            await feed.serve(engine, ORIGIN, 32)
        assert sink.rows and all(outcome.ok for _, outcome in sink.rows)
        assert engine.prompts is not None and engine.prompts.total() == 1
        assert feed.counts.requests <= len(sink.rows) + 12 * 32

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.2, 20.0])
def test_a_long_stretch_of_rows_that_are_denied_does_not_stop_the_run(seconds: float) -> None:
    async def main() -> None:
        wanted = {f"r{i}" for i in range(300, 1500)}
        sink, engine = Sink(), Gate({name: denied() for name in wanted}, seconds=seconds)
        feed = make_feed(2000, sink)
        await feed.serve(engine, ORIGIN, 32)
        assert sink.dead() == dict.fromkeys(wanted, "rejected_403")
        assert feed.counts.requests == 2000 and engine.canaries <= 80

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "seconds"), [(0.5, 0.2), (0.5, 20.0), (0.75, 20.0), (0.95, 0.2), (0.95, 20.0)])
def test_many_denied_rows_are_dead_letters_while_others_are_answered(share: float, seconds: float) -> None:
    async def main() -> None:
        draw = random.Random(1)
        wanted = {f"r{i}" for i in range(1000) if draw.random() < share}
        sink, engine = Sink(), Gate({name: denied() for name in wanted}, seconds=seconds)
        feed = make_feed(1000, sink)
        await feed.serve(engine, ORIGIN, 64)
        assert sink.dead() == dict.fromkeys(wanted, "rejected_403")
        assert feed.counts.requests == 1000

    run(main)


def test_a_pool_in_which_one_server_of_twenty_takes_our_key_is_refused_early() -> None:
    class Pool(Gate):
        draw = random.Random(2)

        async def look_at(self, text: str) -> None:
            if self.draw.random() < 0.95:
                raise denied(401)

        async def generate(self, prompt: bytes, **options: Any) -> Any:
            await self.look_at(orjson.loads(prompt))
            return await super().generate(prompt, **options)

    async def main() -> None:
        sink, engine = Sink(), Pool()
        with pytest.raises(EngineRefused, match="key"):
            await make_feed(20_000, sink).serve(engine, ORIGIN, 16)
        assert sum(not outcome.ok for _, outcome in sink.rows) <= 64

    run(main)


@pytest.mark.parametrize("rows", [{"r0"}, {"r70"}, {"r199"}, {f"r{i}" for i in range(0, 200, 3)}])
def test_a_gateway_that_denies_every_canary_costs_only_the_rows_that_it_denies(rows: set[str]) -> None:
    async def main() -> None:
        sink, engine = Sink(), Gate({name: denied() for name in rows}, seconds=2)
        engine.canary_error = denied()
        await make_feed(200, sink).serve(engine, ORIGIN, 8)
        assert sink.dead() == dict.fromkeys(rows, "rejected_403") and len(sink.rows) == 200

    run(main)


def test_where_the_source_is_slow_rows_that_are_all_denied_cost_a_bounded_number() -> None:
    def slowly() -> Iterator[Any]:
        for batch in batches(600, 5):
            time.sleep(0.002)
            yield batch

    async def main() -> None:
        sink, engine = Sink(), Gate({f"r{i}": denied() for i in range(600)}, seconds=0.0)
        feed = Feed(slowly(), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0))
        with pytest.raises(EngineRefused):
            await feed.serve(engine, ORIGIN, 8)
        assert len(sink.rows) <= 32

    run(main)


def test_a_canary_that_is_read_and_found_wrong_was_not_denied() -> None:
    async def main() -> None:
        sink, engine = Sink(), Gate({f"r{i}": denied() for i in range(20)})
        engine.canary_error = RowRejected("rejected_400")
        await make_feed(20, sink).serve(engine, ORIGIN, 8)
        assert set(sink.dead().values()) == {"rejected_403"}

    run(main)


def test_denied_rows_wait_while_the_canary_fails_and_are_not_charged_when_the_engine_is_given_up() -> None:
    async def main() -> None:
        sink, engine = Sink(), Gate({f"r{i}": denied() for i in range(20)})
        engine.canary_error = Transient("http_500")
        feed = make_feed(20, sink, stall_seconds=30)
        with pytest.raises(EngineLost):
            await feed.serve(engine, ORIGIN, 8)
        assert sink.rows == []
        await feed.serve(FakeEngine(), ORIGIN, 8)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


def test_denied_rows_on_an_engine_that_dies_have_no_part_in_its_death() -> None:
    async def main() -> None:
        sink, engine = Sink(), Gate({"r0": denied(), "r1": "hang"}, slots=2)
        engine.canary_error = Transient("http_500")
        feed = make_feed(2, sink)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 4))
        await asyncio.sleep(1)
        engine.die()
        with pytest.raises(EngineLost):
            await serving
        await feed.serve(Gate({"r0": denied()}), ORIGIN, 4)
        assert sink.dead() == {"r0": "rejected_403"}
        assert sink.outcomes()["r1"].tries == 1

    run(main)


def test_a_gateway_that_moderates_one_prompt_over_http_costs_that_row_alone() -> None:
    generation = Generation("completion", "m")

    async def moderate(request: web.Request) -> web.Response:
        if (await request.json())["prompt"] == "r7":
            return web.json_response({"error": {"message": "flagged"}}, status=403)
        return web.json_response(ANSWER | {"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]})

    async def main() -> None:
        sink = Sink()
        async with http_server({"/v1/completions": moderate}) as url, EngineClient(url, generation) as engine:
            await make_feed(50, sink).serve(engine, ORIGIN, 8)
        assert sink.dead() == {"r7": "rejected_403"}
        assert len(sink.outcomes()) == 50

    asyncio.run(main())
