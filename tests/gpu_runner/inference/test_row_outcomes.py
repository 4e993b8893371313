"""What becomes of answered rows: an outcome, the same row asked again, or a dead letter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches
from support.virtual_time import run

from gpu_runner.bounded_http.bounded_read import Admit
from gpu_runner.client.protocol import Completion, Repair, RowRejected
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
        assert (fixed.output, fixed.tries) == ('{"a": 2}', 3)
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
        assert (dead.error, dead.output, dead.finish_reason, dead.tries) == ("schema_invalid", None, None, 3)
        assert dead.error_message is not None and '"a"' in dead.error_message
        assert (dead.prompt_tokens, dead.completion_tokens) == (9, 15)
        assert engine.asked["r1"] == 3

    run(main)


def test_a_repair_that_does_not_fit_the_context_is_an_answer_that_misses_the_schema() -> None:
    async def main() -> None:
        sink = Sink()
        too_long = RowRejected("context_length_exceeded", "maximum context length is 512 tokens")
        engine = FakeEngine({"r0": too_long, "r1": ["{}", too_long]}, generation=JSON_GENERATION)
        await make_feed(2, sink).serve(engine, ORIGIN, 4)
        unasked, unrepaired = sink.outcomes()["r0"], sink.outcomes()["r1"]
        assert (unasked.error, unasked.tries) == ("context_length_exceeded", 1)
        assert (unrepaired.error, unrepaired.tries) == ("schema_invalid", 2)
        assert unrepaired.error_message is not None and '"a"' in unrepaired.error_message
        assert "longer than the engine's context" in unrepaired.error_message

    run(main)


class FilteredEngine(FakeEngine):
    """A content filter ends the answer to `r1`."""

    async def generate(
        self,
        prompt: bytes,
        *,
        repair: Repair | None = None,
        admit: Admit | None = None,
        fields: bytes = b"",
        max_tokens: int | None = None,
        free: bool = False,
        user: bool = False,
    ) -> Completion:
        found = await super().generate(prompt, repair=repair, admit=admit)
        return replace(found, finish_reason="content_filter", filtered=True) if prompt == b'"r1"' else found


@pytest.mark.parametrize("generation", [JSON_GENERATION, Generation("completion", "m")], ids=["a schema", "none"])
def test_an_answer_that_a_content_filter_ended_is_a_dead_letter_that_was_paid(generation: Generation) -> None:
    async def main() -> None:
        sink = Sink()
        engine = FilteredEngine({"r0": '{"a": 1}', "r1": '{"a'}, generation=generation)
        await make_feed(2, sink).serve(engine, ORIGIN, 4)
        dead = sink.outcomes()["r1"]
        assert (dead.error, dead.output, dead.tries, dead.completion_tokens) == ("content_filter", None, 1, 5)
        assert dead.error_message == "a content filter ended the answer after 3 characters"
        assert sink.outcomes()["r0"].ok and engine.asked["r1"] == 1

    run(main)


def test_an_outcome_says_which_model_answered_and_a_dead_letter_which_one_was_asked() -> None:
    async def main() -> None:
        sink = Sink()
        engine = NamedModels({"r2": RowRejected("rejected_400", "no")})
        await make_feed(3, sink).serve(engine, ORIGIN, 4)
        assert {key: one.origin.model for key, one in sink.outcomes().items()} == {
            "r0": "m-r0",
            "r1": "m-r1",
            "r2": "m",
        }
        assert all(replace(one.origin, model="m") == ORIGIN for one in sink.outcomes().values())

    run(main)


class NamedModels(FakeEngine):
    """Each answer names a model of its own."""

    async def _run(self, text: str, repair: Repair | None, admit: Admit | None) -> Completion:
        return replace(await super()._run(text, repair, admit), model=f"m-{text}")
