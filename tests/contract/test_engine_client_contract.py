"""The client of the feed against the simulator, llama.cpp and real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import jsonschema_rs
import orjson
import pytest
from support.contract_engines import CONTEXT, DIMENSIONS, EMBEDDING_CONTEXT, IDLE_SECONDS, Served
from support.fake_engine import ORIGIN, Sink

from gpu_runner.client.engine_client import EngineClient, EngineRefused, Repair, RequestDenied, RowRejected, Transient
from gpu_runner.client.structured_outputs import output_check
from gpu_runner.inference.feed import Feed
from gpu_runner.rows import Batch, Generation, Row

T = TypeVar("T")

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}},
    "required": ["color", "sure"],
    "additionalProperties": False,
}


def chat(content: str) -> bytes:
    return orjson.dumps([{"role": "user", "content": content}])


async def patient(client: EngineClient, number: int) -> Any:
    """One row of many. A connection may break on a loaded machine: asked again, as the feed does."""
    for _ in range(3):
        with contextlib.suppress(Transient):
            return await client.generate(chat(f"Question {number}"))
    return await client.generate(chat(f"Question {number}"))


def with_client(engine: Served, use: Callable[[EngineClient], Awaitable[T]], task: Any = "chat", **changes: Any) -> T:
    """Run `use` with a client of the engine; changes go to the generation, `api_key` and `model` included."""
    api_key = changes.pop("api_key", engine.api_key)
    generation = Generation(task, changes.pop("model", engine.model), **changes)

    async def run() -> T:
        async with EngineClient(engine.url, generation, api_key=api_key) as client:
            return await use(client)

    return asyncio.run(run())


def test_a_chat_row_becomes_a_completion(any_engine: Served) -> None:
    sampling = {"max_tokens": 7, "ignore_eos": True, "temperature": 0}
    found = with_client(any_engine, lambda client: client.generate(chat("Hello there")), sampling=sampling)
    assert (found.finish_reason, found.completion_tokens) == ("length", 7)
    assert isinstance(found.output, str) and found.prompt_tokens > 0


def test_a_text_row_becomes_a_completion(any_engine: Served) -> None:
    sampling = {"max_tokens": 7, "ignore_eos": True}
    found = with_client(any_engine, lambda client: client.generate(b'"Hello"'), "completion", sampling=sampling)
    assert (found.finish_reason, found.completion_tokens) == ("length", 7)


def test_a_text_to_embed_becomes_a_unit_vector(any_embedder: Served) -> None:
    found = with_client(any_embedder, lambda client: client.generate(b'"one apple"'), "embedding")
    assert isinstance(found.output, tuple) and len(found.output) == DIMENSIONS
    assert math.hypot(*found.output) == pytest.approx(1, abs=1e-3)
    assert (found.finish_reason, found.completion_tokens) == ("stop", 0) and found.prompt_tokens > 0


def test_several_texts_by_one_request_are_the_vectors_of_each(any_embedder: Served) -> None:
    texts = [b'"one apple"', b'"two apples and a pear"', b'"Oslo"']

    async def both(client: EngineClient) -> tuple[list[Any], list[Any]]:
        return await client.generate_list(texts), [await client.generate(text) for text in texts]

    together, alone = with_client(any_embedder, both, "embedding")
    for one, same in zip(together, alone, strict=True):
        assert math.dist(one.output, same.output) < 0.05 and one.completion_tokens == 0
    assert sum(one.prompt_tokens for one in together) == sum(one.prompt_tokens for one in alone)


def test_of_a_list_with_a_text_that_is_too_long_the_others_get_their_vectors(any_embedder: Served) -> None:
    texts = {f"r{i}": f"text number {i}" for i in range(20)} | {"long": "one " * 2 * EMBEDDING_CONTEXT, "empty": ""}
    rows = tuple(Row("b", name, name, orjson.dumps(text)) for name, text in texts.items())
    sink = Sink()

    async def serve(client: EngineClient) -> None:
        await client.info()
        await Feed(iter([Batch("b", rows)]), on_row=sink.on_row, on_batch=sink.on_batch).serve(client, ORIGIN, 64)

    with_client(any_embedder, serve, "embedding")
    assert sink.dead() == {"long": "context_length_exceeded"}
    assert len(sink.outcomes()) == 22
    assert {len(one.output or ()) for one in sink.outcomes().values() if one.ok} == {DIMENSIONS}


def test_a_row_with_a_schema_gets_json_that_fits_also_when_it_is_repaired(any_engine: Served) -> None:
    async def both(client: EngineClient) -> list[Any]:
        repair = Repair(answer="no", problem="not JSON", attempt=1)
        return [await client.generate(chat("Color?")), await client.generate(chat("Color?"), repair=repair)]

    for found in with_client(any_engine, both, json_schema=SCHEMA, sampling={"max_tokens": 100}):
        assert found.finish_reason == "stop"
        assert jsonschema_rs.is_valid(SCHEMA, orjson.loads(found.output))


FORMS: list[dict[str, Any]] = [{"choice": ["red", 'say "green"']}, {"regex": "[0-9]{3}-(ab|c)"}]


@pytest.mark.parametrize("form", [*FORMS, {"grammar": 'root ::= ("x" | "yy") "z"'}], ids=lambda form: next(iter(form)))
def test_a_row_with_choices_a_pattern_or_a_grammar_has_that_form(any_engine: Served, form: dict[str, Any]) -> None:
    async def after_info(client: EngineClient) -> Any:
        await client.info()
        return (await client.generate(chat("Color?"))).output, output_check(client.generation)

    asked = {"structured_outputs": form, "sampling": {"max_tokens": 100}}
    if "regex" in form and any_engine.kind == "llama_cpp":
        with pytest.raises(EngineRefused, match=r"output.regex: llama.cpp has grammars"):
            with_client(any_engine, after_info, **asked)
        return
    output, check = with_client(any_engine, after_info, **asked)
    if check is not None:
        assert check(output) is None
    elif any_engine.kind != "simulator":  # which reads no grammars
        assert output in ("xz", "yyz")


def test_hundreds_of_rows_at_once_are_all_answered(any_engine: Served) -> None:
    async def many(client: EngineClient) -> list[Any]:
        return await asyncio.gather(*[patient(client, number) for number in range(200)])

    found = with_client(any_engine, many, sampling={"max_tokens": 16, "ignore_eos": True})
    assert [one.completion_tokens for one in found] == [16] * 200


@pytest.mark.parametrize("length", [10 * CONTEXT, 1000 * CONTEXT])
def test_a_row_beyond_the_context_is_rejected_for_good(any_engine: Served, length: int) -> None:
    with pytest.raises(RowRejected) as rejected:
        with_client(any_engine, lambda client: client.generate(chat("x" * length)))
    assert rejected.value.code == "context_length_exceeded"
    assert str(CONTEXT) in rejected.value.message


def test_a_row_that_fills_the_context_has_no_room_for_an_answer(any_engine: Served) -> None:
    prompt = orjson.dumps([9] * CONTEXT)
    with pytest.raises((RowRejected, RequestDenied)) as rejected:
        with_client(any_engine, lambda client: client.generate(prompt), "completion")
    assert rejected.value.code.startswith(("rejected_400", "context_length_exceeded"))


def test_sampling_out_of_range_refuses_the_request(engine: Served) -> None:
    with pytest.raises(RequestDenied) as rejected:
        with_client(engine, lambda client: client.generate(chat("x")), sampling={"temperature": 3})
    assert rejected.value.code == "rejected_400" and "temperature" in rejected.value.message


@pytest.mark.parametrize("wrong", [{"model": "another"}, {"api_key": "wrong"}, {"api_key": None}])
def test_a_wrong_model_or_key_refuses_every_row_and_the_hand_shake(any_engine: Served, wrong: dict[str, Any]) -> None:
    if any_engine.kind != "llama_cpp" or "api_key" in wrong:  # it answers under any name
        with pytest.raises(EngineRefused):
            with_client(any_engine, lambda client: client.generate(chat("x")), **wrong)
    with pytest.raises(EngineRefused):
        with_client(any_engine, lambda client: client.info(), **wrong)


def test_the_hand_shake_tells_who_serves(any_engine: Served) -> None:
    info = with_client(any_engine, lambda client: client.info())
    assert (info.model, info.max_model_len) == (any_engine.model, CONTEXT)
    assert info.simulated == (any_engine.kind == "simulator")
    assert info.version


@pytest.mark.parametrize("task", ["chat", "completion"])
def test_the_canary_proves_that_the_engine_generates(any_engine: Served, task: str) -> None:
    before = any_engine.load().generated_tokens
    with_client(any_engine, lambda client: client.canary(), task)
    assert any_engine.load().generated_tokens == before + 1


def test_the_canary_proves_that_the_engine_embeds(any_embedder: Served) -> None:
    before = any_embedder.prompt_tokens()
    with_client(any_embedder, lambda client: client.canary(), "embedding")
    assert any_embedder.prompt_tokens() > before


def test_load_and_health_are_read_while_rows_run(any_engine: Served) -> None:
    async def look(client: EngineClient) -> tuple[Any, Any, Any]:
        before = await client.load()
        rows = asyncio.gather(*[patient(client, number) for number in range(count)])
        busy = before
        # A busy vLLM has been seen to stall for seconds, so the rows must run for longer than one look.
        while not rows.done() and (busy is None or busy.running == 0):
            await asyncio.sleep(0.005)
            busy = await client.load()
        assert await client.healthy()
        await rows
        return before, busy, await client.load()

    count = 30 if any_engine.kind == "llama_cpp" else 100  # it has 16 slots, and this computer's cores
    before, busy, after = with_client(any_engine, look, sampling={"max_tokens": 700, "ignore_eos": True})
    assert 0 < busy.running + busy.waiting <= count
    assert 0 < busy.kv_usage < 1 or any_engine.kind == "llama_cpp"  # it does not tell
    assert before.started_at == after.started_at is not None
    assert before.progress < after.progress
    assert count * 700 <= after.generated_tokens - before.generated_tokens < (count + 2) * 700
    assert (after.running, after.waiting) == (0, 0)


def test_a_connection_that_the_engine_closed_in_idleness_costs_no_row(any_engine: Served) -> None:
    async def pause(client: EngineClient) -> list[Any]:
        first = await asyncio.gather(*[client.generate(chat(f"Question {n}")) for n in range(20)])
        await asyncio.sleep(IDLE_SECONDS + 0.3)
        return [*first, *await asyncio.gather(*[client.generate(chat(f"Question {n}")) for n in range(20)])]

    assert len(with_client(any_engine, pause, sampling={"max_tokens": 4})) == 40


def test_an_engine_that_is_not_there_never_took_the_row(any_engine: Served) -> None:
    gone = Served(any_engine.kind, "http://127.0.0.1:9", any_engine.model, any_engine.pid)
    with pytest.raises(Transient) as failed:
        with_client(gone, lambda client: client.generate(chat("x")))
    assert (failed.value.code, failed.value.taken) == ("connect_failed", False)
    assert not with_client(gone, lambda client: client.healthy())
