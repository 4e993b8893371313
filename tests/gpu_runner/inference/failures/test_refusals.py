"""Which refusals are the rows' own and which end the run: the rule as a table, over statuses, shares and windows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from aiohttp import web
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches
from support.http_server import ANSWER, http_server
from support.virtual_time import run

from gpu_runner.client.engine_client import EngineClient
from gpu_runner.client.protocol import EngineRefused, RowRejected, error_of
from gpu_runner.inference.feed import Feed
from gpu_runner.rows import Generation, Task

STATUSES = [400, 402, 409, 413, 418, 422, 451]


def refusal(status: int, words: str = "not this one") -> Exception:
    return error_of(status, {}, orjson.dumps({"error": {"message": words}}))


class Server(FakeEngine):
    """`refuse(number of the request, row)` is raised for a row; `probe_error` for a request without a row's text."""

    refuse: Callable[[int, str], Exception | None] = staticmethod(lambda number, row: None)
    probe_error: Exception | None = None
    probes = 0

    async def generate(self, prompt: bytes, **options: Any) -> Any:
        if (error := self.refuse(self.asked.total(), orjson.loads(prompt))) is not None:
            self.asked[orjson.loads(prompt)] += 1
            raise error
        return await super().generate(prompt, **options)

    async def probe(self, prompt: bytes, *, content: bool, fields: bytes = b"") -> None:
        self.probes += 1
        error = self.refuse(self.asked.total(), orjson.loads(prompt)) if content else self.probe_error
        if error is not None:
            raise error


def no_quota() -> Exception:
    error = {"message": "You exceeded your current quota.", "type": "insufficient_quota", "code": "insufficient_quota"}
    return error_of(429, {"Retry-After": "20"}, orjson.dumps({"error": error}))


def make_feed(rows: int, sink: Sink) -> Feed:
    return Feed(iter(batches(rows)), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0))


CASES: dict[str, tuple[int, int, Callable[[int, str], bool], bool, int | None]] = {
    # rows, window, which requests are refused, whether one without a row's text is too, dead letters or None: run ends
    "one row of one": (1, 8, lambda n, row: True, False, 1),
    "one row of one, by its settings": (1, 8, lambda n, row: True, True, None),
    "one row of many": (300, 16, lambda n, row: row == "r7", False, 1),
    "one row of many, and every request without a row": (300, 16, lambda n, row: row == "r7", True, 1),
    "one in a hundred": (1000, 64, lambda n, row: row.endswith("77"), False, 10),
    "one in a hundred, and every request without a row": (1000, 64, lambda n, row: row.endswith("77"), True, 10),
    "a third": (600, 16, lambda n, row: int(row[1:]) % 3 == 0, False, 200),
    "the first forty": (600, 16, lambda n, row: int(row[1:]) < 40, False, 40),
    "the last forty": (600, 16, lambda n, row: int(row[1:]) >= 560, False, 40),
    "all of a few, by their texts": (10, 8, lambda n, row: True, False, 10),
    "all of a few, by their settings": (10, 8, lambda n, row: True, True, None),
    "all of 120 in one window, by their settings": (120, 256, lambda n, row: True, True, None),
    "all of 120 in one window, by their texts": (120, 256, lambda n, row: True, False, None),
    "all of 1,000, by their settings": (1000, 16, lambda n, row: True, True, None),
    "all of 1,000, by their texts": (1000, 16, lambda n, row: True, False, None),
    "all after 320": (1000, 16, lambda n, row: n >= 320, True, None),
    "all after 320, but what is short": (1000, 16, lambda n, row: n >= 320, False, None),
    "19 of 20 after 320": (2000, 16, lambda n, row: n >= 320 and n % 20 != 0, True, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("status", [400, 402])
@pytest.mark.parametrize("case", CASES)
def test_the_rule(case: str, status: int) -> None:
    rows, window, which, probe_too, dead = CASES[case]

    async def main() -> None:
        sink, engine = Sink(), Server()
        engine.refuse = lambda number, row: refusal(status) if which(number, row) else None
        engine.probe_error = refusal(status) if probe_too else None
        feed = make_feed(rows, sink)
        if dead is not None:
            await feed.serve(engine, ORIGIN, window)
            assert len(sink.rows) == rows and list(sink.dead().values()) == [f"rejected_{status}"] * dead
            assert feed.counts.requests == rows and engine.probes <= 3 + rows // 20
            return
        with pytest.raises(EngineRefused, match=f'{status}.*The server says: "not this one"'):
            await feed.serve(engine, ORIGIN, window)
        assert [outcome.error for _, outcome in sink.rows if not outcome.ok] == []
        assert feed.counts.charged == 0
        await feed.serve(FakeEngine(), ORIGIN, window)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


@pytest.mark.parametrize("status", STATUSES)
def test_one_row_at_fault_is_one_dead_letter_with_the_server_s_words(status: int) -> None:
    async def main() -> None:
        sink, engine = Sink(), Server()
        engine.refuse = lambda number, row: refusal(status) if row == "r3" else None
        await make_feed(200, sink).serve(engine, ORIGIN, 8)
        letter = sink.outcomes()["r3"]
        assert (letter.error, letter.error_message, letter.tries) == (f"rejected_{status}", "not this one", 1)
        assert sink.dead().keys() == {"r3"} and engine.asked["r3"] == 1

    run(main)


def test_prompts_that_are_too_long_are_dead_letters_whatever_their_share() -> None:
    async def main() -> None:
        sink, engine = Sink(), Server()
        engine.refuse = lambda number, row: RowRejected("context_length_exceeded", "too long")
        await make_feed(300, sink).serve(engine, ORIGIN, 16)
        assert len(sink.dead()) == 300 and engine.probes == 0

    run(main)


def test_a_canary_that_is_refused_for_another_reason_says_nothing_of_the_rows() -> None:
    async def main() -> None:
        sink, engine = Sink(), Server()
        engine.refuse = lambda number, row: refusal(400, f"invalid text in {row}") if row in ("r0", "r1") else None
        engine.probe_error = refusal(400, "unsupported parameter: 'seed'")
        await make_feed(2, sink).serve(engine, ORIGIN, 8)
        assert set(sink.dead()) == {"r0", "r1"}

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("answered", [0, 320])
@pytest.mark.parametrize("task", ["completion", "embedding"])
def test_an_account_without_quota_ends_the_run_at_once_and_charges_no_row(answered: int, task: Task) -> None:
    async def main() -> None:
        sink, engine = Sink(), Server(generation=Generation(task, "m"))
        engine.refuse = lambda number, row: no_quota() if number >= answered else None
        engine.probe_error = no_quota()
        feed = make_feed(1000, sink)
        with pytest.raises(EngineRefused, match=r'429 \(insufficient_quota\).*"You exceeded your current quota\."'):
            await feed.serve(engine, ORIGIN, 16)
        assert asyncio.get_running_loop().time() < 10
        assert feed.counts.requests <= answered + 128 and feed.counts.charged == 0
        assert all(outcome.ok for _, outcome in sink.rows)
        await feed.serve(FakeEngine(), ORIGIN, 16)
        assert sink.dead() == {}

    run(main)


def test_one_account_of_several_without_quota_costs_no_row_its_answer() -> None:
    async def main() -> None:
        sink, engine = Sink(), Server()
        engine.refuse = lambda number, row: no_quota() if number % 3 == 0 else None
        await make_feed(600, sink).serve(engine, ORIGIN, 16)
        assert sink.dead() == {} and len(sink.outcomes()) == 600
        assert {outcome.tries for outcome in sink.outcomes().values()} == {1}

    run(main)


def test_a_row_that_alone_is_refused_for_quota_ends_as_a_dead_letter() -> None:
    async def main() -> None:
        sink, engine = Sink(), Server()
        engine.refuse = lambda number, row: no_quota() if row == "r7" else None
        await make_feed(300, sink).serve(engine, ORIGIN, 16)
        assert sink.dead() == {"r7": "rejected_429"} and engine.asked["r7"] == 13  # 10 that nobody charged, and 3

    run(main)


def test_rows_that_one_engine_refuses_are_another_s_to_answer_at_the_same_time() -> None:
    async def main() -> None:
        sink, broke = Sink(), Server()
        broke.refuse = lambda number, row: refusal(402, "no credit")
        broke.probe_error = refusal(402, "no credit")
        feed = make_feed(400, sink)
        good = asyncio.create_task(feed.serve(FakeEngine(seconds=1), ORIGIN, 16))
        with pytest.raises(EngineRefused, match="402"):
            await feed.serve(broke, ORIGIN, 16)
        await good
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


def test_a_refusal_of_all_names_the_server_s_sentence_and_no_prompt_and_no_key() -> None:
    generation = Generation("completion", "m")
    asked: list[str] = []

    async def refuse(request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        asked.append(prompt)
        if len(asked) <= 40:
            return web.json_response(ANSWER | {"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]})
        words = f"no credit for '{prompt}' of {request.headers['Authorization']}"
        return web.json_response({"error": {"message": words}}, status=402)

    async def main() -> None:
        sink = Sink()
        async with (
            http_server({"/v1/completions": refuse}) as url,
            EngineClient(url, generation, api_key="sk-secret") as engine,
        ):
            with pytest.raises(EngineRefused, match="no credit for ") as ended:
                await make_feed(300, sink).serve(engine, ORIGIN, 8)
        assert "Bearer [API key]" in str(ended.value) and "secret" not in str(ended.value)
        assert not any(f"'{prompt}'" in str(ended.value) for prompt in asked if prompt != "ping")
        assert all(outcome.ok for _, outcome in sink.rows) and len(sink.rows) >= 40

    asyncio.run(main())
