"""Feed and client together, over HTTP, against the simulated engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.fake_engine import ORIGIN, Sink
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.timing import PATIENCE

from gpu_runner.client.engine_client import EngineClient, EngineLost, EngineRefused
from gpu_runner.inference.failures.retry import RetryPolicy
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.rows import Batch, Generation, Row

CHAT = Generation("chat", "tiny", {"max_tokens": 50})
# Ten times the real pace.
POLICY = FeedPolicy(
    retry=RetryPolicy(backoff_min=0.2, backoff_max=3.0, proof_lag=0.1, proof_health=0.6),
    poll_seconds=0.1,
    stall_seconds=3.0,
    dead_seconds=0.3,
)


def source(rows: int, marks: dict[int, str] | None = None, size: int = 250) -> Iterator[Batch]:
    """Chat rows named 0, 1, …; a mark is part of its row's prompt."""
    for start in range(0, rows, size):
        key = f"{start // size:05d}"
        made = []
        for i in range(start, min(rows, start + size)):
            text = f"question {i} {(marks or {}).get(i, '')}"
            made.append(Row(key, str(i), f"key-{i}", orjson.dumps([{"role": "user", "content": text}])))
        yield Batch(key, tuple(made))


def make_feed(batches: Iterator[Batch], sink: Sink, policy: FeedPolicy = POLICY) -> Feed:
    return Feed(batches, on_row=sink.on_row, on_batch=sink.on_batch, policy=policy, rng=random.Random(0))


async def serve(feed: Feed, url: str, generation: Generation = CHAT, max_num_seqs: int | None = 64) -> None:
    async with EngineClient(url, generation) as engine:
        await engine.info()
        await feed.serve(engine, ORIGIN, max_num_seqs)


def with_engine(main: Any, *arguments: str) -> None:
    with simulated_engine("--speed", "20", "--max-num-seqs", "64", *arguments) as engine:

        async def whole() -> None:
            async with asyncio.timeout(60 * PATIENCE):
                await main(engine)

        asyncio.run(whole())


@pytest.mark.slow
def test_a_dataset_goes_through_a_simulated_engine() -> None:
    async def main(engine: SimulatedEngine) -> None:
        sink = Sink()
        await serve(make_feed(source(1000), sink), engine.url)
        outcomes = sink.outcomes()
        assert len(outcomes) == 1000 and sink.dead() == {}
        assert all(outcome.completion_tokens > 0 for outcome in outcomes.values())
        assert engine.get("/simulator/stats")["requests"] == 1000

    with_engine(main)


@pytest.mark.slow
def test_one_percent_of_each_kind_of_bad_row_dies_and_nobody_else() -> None:
    kinds = {
        "http_500": "http_500",
        "http_429": "http_429",
        "http_503": "http_503",
        "reset": "connection_lost",
        "reset_mid_body": "connection_lost",
        "garbage": "garbage_body",
        "broken_finish": "unfinished",
        "too_long": "context_length_exceeded",
    }

    async def main(engine: SimulatedEngine) -> None:
        engine.set_faults(*({"kind": kind, "match": {"contains": f"mark-{kind}."}} for kind in kinds))
        places = iter(random.Random(0).sample(range(1500), 15 * len(kinds)))
        marks = {next(places): f"mark-{kind}." for kind in kinds for _ in range(15)}
        sink = Sink()
        await serve(make_feed(source(1500, marks), sink), engine.url)
        assert sink.dead() == {str(i): kinds[mark[5:-1]] for i, mark in marks.items()}
        assert {outcome.tries for outcome in sink.outcomes().values() if outcome.ok} == {1}

    with_engine(main)


@pytest.mark.slow
def test_dropped_idle_connections_cost_no_try() -> None:
    async def main(engine: SimulatedEngine) -> None:
        engine.set_faults({"kind": "drop_idle", "match": {"rate": 0.2}, "times": 1})
        sink = Sink()
        feed = make_feed(source(1000), sink)
        await serve(feed, engine.url)
        assert engine.get("/simulator/faults")["applied"]["drop_idle"] > 50
        assert feed.counts.failures == 0
        assert {outcome.tries for outcome in sink.outcomes().values()} == {1}

    with_engine(main)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["crash", "engine_dead"])
def test_rows_survive_the_death_of_their_engine(fault: str, tmp_path: Path) -> None:
    async def main(first: SimulatedEngine) -> None:
        first.set_faults({"kind": fault, "exit_after": 0.5, "match": {"at_request": 500}})
        sink = Sink()
        # Answers from before the death may be read a good while after it on a busy machine: the real lag.
        patient = replace(POLICY, retry=replace(POLICY.retry, proof_lag=RetryPolicy().proof_lag))
        feed = make_feed(source(1000), sink, patient)
        with pytest.raises(EngineLost):
            await serve(feed, first.url)
        done = feed.counts.ok
        assert 100 < done < 500
        with simulated_engine("--speed", "20", "--max-num-seqs", "64") as second:
            await serve(feed, second.url)
            assert second.get("/simulator/stats")["requests"] == 1000 - done
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    with_engine(main)


@pytest.mark.slow
def test_a_stalled_engine_is_given_up_and_one_that_wakes_is_kept() -> None:
    async def main(engine: SimulatedEngine) -> None:
        engine.set_faults({"kind": "stall", "seconds": 0.5, "match": {"at_request": 300}})
        sink = Sink()
        feed = make_feed(source(600), sink)
        await serve(feed, engine.url)
        assert feed.counts.engine_deaths == 0 and len(sink.outcomes()) == 600
        engine.set_faults({"kind": "stall", "match": {"at_request": 700}})
        with pytest.raises(EngineLost, match="stalled"):
            await serve(make_feed(source(600), Sink(), replace(POLICY, stall_seconds=1.5)), engine.url)

    with_engine(main)


@pytest.mark.slow
def test_a_storm_of_429_is_sat_out(tmp_path: Path) -> None:
    async def main(engine: SimulatedEngine) -> None:
        sink = Sink()
        feed = make_feed(source(1000), sink)
        serving = asyncio.create_task(serve(feed, engine.url))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(engine.set_faults, {"kind": "http_429", "retry_after": 0.2})
        await asyncio.sleep(1)
        await asyncio.to_thread(engine.set_faults)
        await serving
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}
        assert feed.counts.requests <= 1.3 * 1000

    with_engine(main)


def test_answers_fit_the_schema_after_repair() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    generation = Generation("chat", "tiny", {"max_tokens": 200}, schema)

    async def main(engine: SimulatedEngine) -> None:
        engine.set_faults(
            {"kind": "wrong_json", "match": {"contains": "never"}}, {"kind": "wrong_json", "match": {"at_request": 1}}
        )
        mended = Sink()
        feed = make_feed(source(1), mended)
        await serve(feed, engine.url, generation)
        assert mended.dead() == {} and feed.counts.repairs == 1
        sink = Sink()
        await serve(make_feed(source(200, {3: "never"}), sink), engine.url, generation)
        assert sink.dead() == {"3": "schema_invalid"}
        assert all("a" in json.loads(str(o.output)) for o in sink.outcomes().values() if o.ok)

    with_engine(main)


def test_embeddings_come_as_vectors() -> None:
    async def main(engine: SimulatedEngine) -> None:
        sink = Sink()
        rows = tuple(Row("b", str(i), f"key-{i}", orjson.dumps(f"text {i}")) for i in range(50))
        await serve(make_feed(iter([Batch("b", rows)]), sink), engine.url, Generation("embedding", "tiny"))
        vectors = [outcome.output for outcome in sink.outcomes().values()]
        assert all(isinstance(v, tuple) and len(v) == 8 for v in vectors)
        assert len(set(vectors)) == 50

    with_engine(main, "--embedding-dim", "8")


@pytest.mark.slow
@pytest.mark.soak("rows")
def test_the_window_settles_at_four_times_the_slots() -> None:
    async def main(engine: SimulatedEngine) -> None:
        sizes = []
        feed = make_feed(source(60_000), Sink())
        serving = asyncio.create_task(serve(feed, engine.url, max_num_seqs=None))
        grown_at = None
        while not serving.done() and (grown_at is None or len(sizes) < grown_at + 40):
            sizes.append(feed.progress().window)
            if grown_at is None and sizes[-1] == 256:
                grown_at = len(sizes)
            await asyncio.wait((serving,), timeout=0.05)
        serving.cancel()
        await asyncio.wait((serving,))
        assert max(sizes) == 256

    with_engine(main)


def test_another_model_or_key_is_refused_before_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "k3y")

    async def main(engine: SimulatedEngine) -> None:
        feed = make_feed(source(10), Sink())
        with pytest.raises(EngineRefused, match="key"):
            await serve(feed, engine.url)
        async with EngineClient(engine.url, replace(CHAT, model="other"), api_key="k3y") as client:
            with pytest.raises(EngineRefused, match="expected model other, found tiny"):
                await client.info()
        async with EngineClient(engine.url, CHAT, api_key="k3y") as client:
            assert (await client.info()).simulated
        assert engine.get("/simulator/stats")["requests"] == 0

    with_engine(main, "--api-key-env", "ENGINE_KEY")


@pytest.mark.slow
def test_cancelling_a_run_frees_the_engine_at_once() -> None:
    async def main(engine: SimulatedEngine) -> None:
        feed = make_feed(source(5000), Sink())
        serving = asyncio.create_task(serve(feed, engine.url))
        await asyncio.sleep(0.5)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        async with EngineClient(engine.url, CHAT) as client:
            while (load := await client.load()) is None or load.running or load.waiting:  # noqa: ASYNC110  (it has no event)
                await asyncio.sleep(0.02)

    with_engine(main)
