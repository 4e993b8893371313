"""What every request meets is known while none is answered: the status, the server's words, since when."""

from __future__ import annotations

import asyncio
import random

import orjson
import pytest
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches
from support.virtual_time import run

from gpu_runner.client.protocol import EngineError, EngineLost, Transient, error_of, not_an_answer
from gpu_runner.inference.failures.failing_requests import FailureRecord
from gpu_runner.inference.feed import Feed

BASE64 = orjson.dumps({"data": [{"index": 0, "embedding": "AAAA"}]})


def make_feed(rows: int, sink: Sink) -> Feed:
    return Feed(iter(batches(rows)), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "status", "reason"),
    [
        (error_of(429, {}, b'{"error":{"message":"Rate limit reached"}}'), "http_429", 429, "Rate limit reached"),
        (error_of(500, {}, b"boom\n at line 3"), "http_500", 500, "boom at line 3"),
        (not_an_answer("chat", {}, b"<html>"), "garbage_body", 200, "6 bytes of a web page (HTML), no JSON"),
        (not_an_answer("chat", {}, b'{"error":"busy"}'), "error_answer", 200, "busy"),
        (not_an_answer("embedding", {}, BASE64), "garbage_body", 200, "a vector written as text (base64), expected"),
        (Transient("connection_lost", "ClientPayloadError"), "connection_lost", None, "ClientPayloadError"),
    ],
)
def test_what_every_request_meets_is_told_until_one_is_answered(
    error: EngineError, code: str, status: int | None, reason: str
) -> None:
    async def main() -> None:
        assert isinstance(error, Transient)
        sink, engine, loop = Sink(), FakeEngine(), asyncio.get_running_loop()
        feed = make_feed(1000, sink)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 16))
        await asyncio.sleep(1)
        engine.outage, began = error, loop.time()
        await asyncio.sleep(30)
        failing = feed.failing(loop.time() - 10)
        assert failing is not None and (failing.code, failing.status) == (code, status)
        assert failing.sentence.startswith(reason) and failing.requests >= 16
        assert began <= failing.since <= began + 1 and feed.failing(began - 1) is None
        engine.outage = None
        await serving
        assert feed.failing(loop.time()) is None and len(sink.outcomes()) == 1000

    run(main)


def test_one_row_that_fails_among_others_is_nothing_to_tell() -> None:
    async def main() -> None:
        engine, loop = FakeEngine({"r3": Transient("http_500")}, seconds=60), asyncio.get_running_loop()
        serving = asyncio.create_task(make_feed(50, Sink()).serve(engine, ORIGIN, 16))
        feed = make_feed(50, Sink())
        other = asyncio.create_task(feed.serve(engine, ORIGIN, 16))
        await asyncio.sleep(30)
        assert feed.failing(loop.time()) is None
        for task in (serving, other):
            task.cancel()
        await asyncio.gather(serving, other, return_exceptions=True)

    run(main)


def test_an_engine_that_is_given_up_says_what_its_last_request_met_and_the_next_one_goes_on_counting() -> None:
    async def main() -> None:
        feed, engine = make_feed(100, Sink()), FakeEngine(metrics=False)
        engine.outage = Transient("http_429", "Rate limit reached", status=429, taken=False)
        for _ in range(2):
            with pytest.raises(
                EngineLost, match=r"every request failed for \d+ s, the last one with http_429: Rate limit"
            ):
                await feed.serve(engine, ORIGIN, 16)
        feed.not_ready(EngineLost("not_ready", "http_503: loading", status=503))
        failing = feed.failing(1.0)
        assert failing is not None and failing.since < 1.0 and failing.requests > 128
        assert failing.reason == "not_ready (status 503): http_503: loading"

    run(main)


def test_the_sentence_has_no_text_of_a_prompt_and_stays_while_only_figures_change() -> None:
    record = FailureRecord()
    for at, name in enumerate(("request 17 of 'my secret'", "request 18 of 'my secret'")):
        record.failed(Transient("http_500", name), "http_500", name, float(at), b'"this is my secret text"')
    failing = record.failing()
    assert failing is not None and (failing.sentence, failing.requests) == ("request 17 of […]", 2)
    assert failing.describe(0.0).endswith(": http_500: request 17 of […]")
