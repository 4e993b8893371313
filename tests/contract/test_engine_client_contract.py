"""The client of the feed against the simulator and against real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import jsonschema_rs
import orjson
import pytest
from conftest import CONTEXT, DIMENSIONS, IDLE_SECONDS, Served

from gpu_runner.engine import EngineClient, EngineRefused, Repair, RowRejected, Transient
from gpu_runner.rows import Generation

T = TypeVar("T")

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}},
    "required": ["color", "sure"],
    "additionalProperties": False,
}


def chat(content: str) -> bytes:
    return orjson.dumps([{"role": "user", "content": content}])


def with_client(engine: Served, use: Callable[[EngineClient], Awaitable[T]], task: Any = "chat", **changes: Any) -> T:
    """Run `use` with a client of the engine; changes go to the generation, `api_key` and `model` included."""
    api_key = changes.pop("api_key", engine.api_key)
    generation = Generation(task, changes.pop("model", engine.model), **changes)

    async def run() -> T:
        async with EngineClient(engine.url, generation, api_key=api_key) as client:
            return await use(client)

    return asyncio.run(run())


def test_a_chat_row_becomes_a_completion(engine: Served) -> None:
    sampling = {"max_tokens": 7, "ignore_eos": True, "temperature": 0}
    found = with_client(engine, lambda client: client.generate(chat("Hello there")), sampling=sampling)
    assert (found.finish_reason, found.completion_tokens) == ("length", 7)
    assert isinstance(found.output, str) and found.prompt_tokens > 0


def test_a_text_row_becomes_a_completion(engine: Served) -> None:
    sampling = {"max_tokens": 7, "ignore_eos": True}
    found = with_client(engine, lambda client: client.generate(b'"Hello"'), "completion", sampling=sampling)
    assert (found.finish_reason, found.completion_tokens) == ("length", 7)


def test_a_text_to_embed_becomes_a_unit_vector(embedder: Served) -> None:
    found = with_client(embedder, lambda client: client.generate(b'"one apple"'), "embedding")
    assert isinstance(found.output, tuple) and len(found.output) == DIMENSIONS
    assert math.hypot(*found.output) == pytest.approx(1, abs=1e-3)
    assert (found.finish_reason, found.completion_tokens) == ("stop", 0) and found.prompt_tokens > 0


def test_a_row_with_a_schema_gets_json_that_fits_also_when_it_is_repaired(engine: Served) -> None:
    async def both(client: EngineClient) -> list[Any]:
        repair = Repair(answer="no", problem="not JSON", attempt=1)
        return [await client.generate(chat("Color?")), await client.generate(chat("Color?"), repair=repair)]

    for found in with_client(engine, both, json_schema=SCHEMA, sampling={"max_tokens": 100}):
        assert found.finish_reason == "stop"
        assert jsonschema_rs.is_valid(SCHEMA, orjson.loads(found.output))


def test_hundreds_of_rows_at_once_are_all_answered(engine: Served) -> None:
    async def one(client: EngineClient, number: int) -> Any:
        """These engines close a connection that was idle for a second: asked again, as the feed does."""
        for _ in range(3):
            with contextlib.suppress(Transient):
                return await client.generate(chat(f"Question {number}"))
        return await client.generate(chat(f"Question {number}"))

    async def many(client: EngineClient) -> list[Any]:
        return await asyncio.gather(*[one(client, number) for number in range(300)])

    found = with_client(engine, many, sampling={"max_tokens": 16, "ignore_eos": True})
    assert [one.completion_tokens for one in found] == [16] * 300


@pytest.mark.parametrize("length", [10 * CONTEXT, 1000 * CONTEXT])
def test_a_row_beyond_the_context_is_rejected_for_good(engine: Served, length: int) -> None:
    with pytest.raises(RowRejected) as rejected:
        with_client(engine, lambda client: client.generate(chat("x" * length)))
    assert rejected.value.code == "context_length_exceeded"
    assert str(CONTEXT) in rejected.value.message


def test_a_row_that_fills_the_context_has_no_room_for_an_answer(engine: Served) -> None:
    prompt = orjson.dumps([9] * CONTEXT)
    with pytest.raises(RowRejected) as rejected:
        with_client(engine, lambda client: client.generate(prompt), "completion")
    assert rejected.value.code.startswith(("rejected_400", "context_length_exceeded"))


def test_sampling_out_of_range_rejects_the_row(engine: Served) -> None:
    with pytest.raises(RowRejected) as rejected:
        with_client(engine, lambda client: client.generate(chat("x")), sampling={"temperature": 3})
    assert rejected.value.code == "rejected_400" and "temperature" in rejected.value.message


@pytest.mark.parametrize("wrong", [{"model": "another"}, {"api_key": "wrong"}, {"api_key": None}])
def test_a_wrong_model_or_key_refuses_every_row_and_the_hand_shake(engine: Served, wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineRefused):
        with_client(engine, lambda client: client.generate(chat("x")), **wrong)
    with pytest.raises(EngineRefused):
        with_client(engine, lambda client: client.info(), **wrong)


def test_the_hand_shake_tells_who_serves(engine: Served) -> None:
    info = with_client(engine, lambda client: client.info())
    assert (info.model, info.max_model_len) == (engine.model, CONTEXT)
    assert info.simulated == (engine.kind == "simulator")
    assert info.version


@pytest.mark.parametrize("task", ["chat", "completion"])
def test_the_canary_proves_that_the_engine_generates(engine: Served, task: str) -> None:
    before = engine.total("generation_tokens_total")
    with_client(engine, lambda client: client.canary(), task)
    assert engine.total("generation_tokens_total") == before + 1


def test_the_canary_proves_that_the_engine_embeds(embedder: Served) -> None:
    before = embedder.total("prompt_tokens_total")
    with_client(embedder, lambda client: client.canary(), "embedding")
    assert embedder.total("prompt_tokens_total") > before


def test_load_and_health_are_read_while_rows_run(engine: Served) -> None:
    async def look(client: EngineClient) -> tuple[Any, Any, Any]:
        before = await client.load()
        rows = asyncio.gather(*[client.generate(chat(f"Question {n}")) for n in range(100)])
        busy = before
        # A busy vLLM has been seen to stall for seconds, so the rows must run for longer than one look.
        while not rows.done() and (busy is None or busy.running == 0):
            await asyncio.sleep(0.005)
            busy = await client.load()
        assert await client.healthy()
        await rows
        return before, busy, await client.load()

    before, busy, after = with_client(engine, look, sampling={"max_tokens": 700, "ignore_eos": True})
    assert 0 < busy.running + busy.waiting <= 100 and 0 < busy.kv_usage < 1
    assert after.generated_tokens - before.generated_tokens == 100 * 700
    assert (after.running, after.waiting) == (0, 0)


def test_a_connection_that_the_engine_closed_in_idleness_costs_no_row(engine: Served) -> None:
    async def pause(client: EngineClient) -> list[Any]:
        first = await asyncio.gather(*[client.generate(chat(f"Question {n}")) for n in range(20)])
        await asyncio.sleep(IDLE_SECONDS + 0.3)
        return [*first, *await asyncio.gather(*[client.generate(chat(f"Question {n}")) for n in range(20)])]

    assert len(with_client(engine, pause, sampling={"max_tokens": 4})) == 40


def test_an_engine_that_is_not_there_never_took_the_row(engine: Served) -> None:
    gone = Served(engine.kind, "http://127.0.0.1:9", engine.model, engine.pid)
    with pytest.raises(Transient) as failed:
        with_client(gone, lambda client: client.generate(chat("x")))
    assert (failed.value.code, failed.value.taken) == ("connect_failed", False)
    assert not with_client(gone, lambda client: client.healthy())
