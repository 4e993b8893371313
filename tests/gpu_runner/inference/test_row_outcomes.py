"""What becomes of answered rows: an outcome, the same row asked again, or a dead letter."""

from __future__ import annotations

import random

from support.fake_engine import ORIGIN, FakeEngine, Sink, batches
from support.virtual_time import run

from gpu_runner.inference.feed import Feed
from gpu_runner.rows import Generation


def make_feed(rows: int, sink: Sink) -> Feed:
    return Feed(iter(batches(rows)), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0))


SCHEMA = {"type": "object", "required": ["a"]}


JSON_GENERATION = Generation("completion", "m", {}, SCHEMA, repair_tries=2)


def test_an_answer_that_breaks_the_schema_is_repaired() -> None:
    async def main() -> None:
        sink = Sink()
        rules: dict[str, object] = {f"r{i}": '{"a": 1}' for i in range(10)}
        engine = FakeEngine(rules | {"r1": ["{}", "[", '{"a": 2}']}, generation=JSON_GENERATION)
        feed = make_feed(10, sink)
        await feed.serve(engine, ORIGIN, 4)
        fixed = sink.outcomes()["r1"]
        assert (fixed.output, fixed.tries) == ('{"a": 2}', 1)
        assert (fixed.prompt_tokens, fixed.completion_tokens) == (9, 15)
        assert [repair.attempt for repair in engine.repairs] == [1, 2]
        assert engine.repairs[0].answer == "{}" and '"a"' in engine.repairs[0].problem
        assert sink.outcomes()["r2"].completion_tokens == 5
        assert feed.counts.repairs == 2

    run(main)


def test_an_answer_that_never_fits_the_schema_is_a_dead_letter() -> None:
    async def main() -> None:
        sink = Sink()
        engine = FakeEngine({"r1": "{}", "r0": '{"a": 1}'}, generation=JSON_GENERATION)
        await make_feed(2, sink).serve(engine, ORIGIN, 4)
        dead = sink.outcomes()["r1"]
        assert (dead.error, dead.output, dead.finish_reason, dead.tries) == ("schema_invalid", None, None, 1)
        assert dead.error_message is not None and '"a"' in dead.error_message
        assert (dead.prompt_tokens, dead.completion_tokens) == (9, 15)
        assert engine.asked["r1"] == 3

    run(main)
