"""Rows as files of a Batch API: each gets its line, whatever the provider makes of it, and none is sent twice."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web
from support.fake_batch_api import FakeBatchApi, completion, error_line, fake_batch_api, line
from support.http_server import status

from gpu_runner.batch_api.batch_calls import SKEW_SECONDS
from gpu_runner.batch_api.batch_client import BatchClient
from gpu_runner.batch_api.submitted_batches import SubmittedBatch
from gpu_runner.client.protocol import Completion, EngineLost, EngineRefused, RequestDenied, RowRejected, Transient
from gpu_runner.request_limits import BatchLimits
from gpu_runner.rows import Generation

MODEL = "m"
LIMITS = BatchLimits(gather_seconds=0.05, poll_seconds=0.05)
CHAT = Generation("chat", MODEL, {"max_tokens": 8})


@dataclass
class Records:
    """In memory."""

    kept: dict[str, SubmittedBatch] = field(default_factory=dict)
    read: Counter[str] = field(default_factory=Counter)

    def keep(self, batch: SubmittedBatch) -> None:
        self.kept[batch.key] = batch

    def all(self, besides: Collection[str] = ()) -> Sequence[SubmittedBatch]:
        found = [record for key, record in self.kept.items() if key not in besides]
        self.read.update(record.key for record in found)
        return found

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.kept.pop(key, None)


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test on an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runner.batch_api.batch_client.FIRST_POLL_SECONDS", 0.01)
    monkeypatch.setattr("gpu_runner.batch_api.batch_client.QUEUE_SECONDS", 0.05)
    monkeypatch.setattr("gpu_runner.batch_api.patient_calls.FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr("gpu_runner.batch_api.patient_calls.GONE_SECONDS", 0.1)
    monkeypatch.setattr("gpu_runner.batch_api.patient_calls.LOOK_AFTER_SECONDS", (0.0, 0.05))


def client(api: FakeBatchApi, records: Records, limits: BatchLimits = LIMITS, **more: Any) -> BatchClient:
    labels = {"dataset": "d"}
    return BatchClient(api.url, CHAT, api_key="s3cret", batches=limits, records=records, labels=labels, **more)


def prompt(number: int) -> bytes:
    return json.dumps([{"role": "user", "content": f"question {number}"}]).encode()


async def ask(engine: BatchClient, *numbers: int) -> list[Completion | BaseException]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*(engine.generate(prompt(one)) for one in numbers), return_exceptions=True)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110  (neither the provider nor the records have an event)
            await asyncio.sleep(0.01)


def echo(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Each row's question as its answer, the last one first."""
    texts = [(one, one["body"]["messages"][0]["content"]) for one in reversed(asked)]
    return [line(one, completion(f"re: {text}", prompt_tokens_details={"cached_tokens": 2})) for one, text in texts], []


def texts(found: Sequence[Completion | BaseException]) -> list[object]:
    return [one.output if isinstance(one, Completion) else type(one).__name__ for one in found]


@on_a_loop
async def test_rows_are_answered_by_the_lines_of_one_batch_whatever_their_order() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, records) as engine:
        assert (await engine.info()).model == MODEL
        found = await ask(engine, 1, 2, 3, 2)
        assert texts(found) == ["re: question 1", "re: question 2", "re: question 3", "re: question 2"]
        assert isinstance(found[0], Completion)
        assert (found[0].prompt_tokens, found[0].completion_tokens, found[0].cached_tokens) == (5, 3, 2)
        (batch,) = api.batches.values()
        assert batch["endpoint"] == "/v1/chat/completions" and batch["completion_window"] == "24h"
        assert (
            batch["metadata"]["dataset"] == "d" and "s3cret" not in json.dumps(batch) and api.keys == {"Bearer s3cret"}
        )
        assert api.asked[0]["body"]["max_tokens"] == 8
        assert len({one["custom_id"] for one in api.asked}) == 4
        assert [record.batch_id for record in records.all()] == ["batch-0"]
        await engine.settle()
        assert not records.kept


@on_a_loop
async def test_a_batch_is_no_larger_than_the_provider_takes_it_and_only_so_many_are_open() -> None:
    limits = replace(LIMITS, max_requests=2, max_open=1)
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records(), limits) as engine:
        assert texts(await ask(engine, *range(5))) == [f"re: question {one}" for one in range(5)]
        assert [len(api.lines(batch["input_file_id"])) for batch in api.batches.values()] == [2, 2, 1]
    limits = replace(LIMITS, max_file_bytes=1024)
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records(), limits) as engine:
        long = json.dumps([{"role": "user", "content": "x" * 2000}]).encode()
        with pytest.raises(RowRejected, match="request_too_large"):
            await engine.generate(long)
        await ask(engine, *range(6))
        assert len(api.batches) > 1 and all(
            len(api.files[one["input_file_id"]]) <= 1024 for one in api.batches.values()
        )


@on_a_loop
async def test_the_next_client_takes_the_answers_of_a_batch_that_a_killed_one_has_sent() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo, ends=False) as api:
        async with client(api, records) as killed:
            waiting = asyncio.create_task(ask(killed, 1, 2, 3))
            await until(lambda: any(record.batch_id for record in records.all()))
            waiting.cancel()
        api.ends = True
        async with client(api, records) as engine:
            assert texts(await ask(engine, 2, 1)) == ["re: question 2", "re: question 1"]
            await engine.settle()
            assert len(records.kept) == 1, "a line of it may still be asked for"
            assert texts(await ask(engine, 3, 4)) == ["re: question 3", "re: question 4"]
            assert len(api.asked) == 4
            await engine.settle()
        assert not records.kept


@on_a_loop
async def test_a_batch_whose_creation_was_not_heard_of_is_found_by_its_metadata() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo, ends=False) as api:
        async with client(api, records) as killed:
            waiting = asyncio.create_task(ask(killed, 1))
            await until(lambda: any(record.batch_id for record in records.all()))
            waiting.cancel()
        (record,) = records.all()
        records.keep(record.model_copy(update={"batch_id": ""}))
        api.ends = True
        async with client(api, records) as engine:
            assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 1


@on_a_loop
async def test_a_lost_answer_to_a_creation_makes_no_second_batch() -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:

        async def created_but_not_said(request: web.Request) -> web.StreamResponse:
            await api._batches(request, ["batches"])
            return web.Response(status=502)

        api.refusals["batches"] = [created_but_not_said]
        assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 1


@on_a_loop
async def test_a_record_of_a_batch_that_is_gone_does_not_stop_its_rows() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo) as api:
        async with client(api, records) as engine:
            await ask(engine, 1)
        api.batches.clear()
        async with client(api, records) as engine:
            assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 1 and len(records.kept) == 1


@on_a_loop
async def test_rows_of_a_batch_of_another_run_whose_answers_are_deleted_are_sent_again_at_once() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo) as api:
        async with client(api, records) as engine:
            await ask(engine, 1, 2)
        (old,) = records.kept
        api.deleted.add("output-batch-0")
        async with client(api, records) as engine:
            assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 2 and old not in records.kept


@on_a_loop
async def test_hostile_files_cost_only_the_rows_whose_lines_are_bad() -> None:
    def answer(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        good, _missing, expired, wrong, denied, garbage, limited = asked
        unknown = {**line(good), "custom_id": "who"}
        output = [
            unknown,
            b"not json\n",
            b"[1]\n",
            b'{"custom_id": ' + b"9" * 10_000_000 + b"}\n",
            line(good, completion("first")),
            line(good, completion("second")),
            line(wrong, {"choices": []}),
            line(denied, {"error": {"message": "moderation", "code": "refused"}}, 400),
            line(limited, {"error": {"message": "slow down"}}, 429),
            {**line(garbage), "response": {"status_code": "200"}},
        ]
        return output, [error_line(expired, "batch_expired")]

    async with fake_batch_api(MODEL, answer=answer) as api, client(api, Records()) as engine:
        found = await ask(engine, *range(7))
    assert isinstance(found[0], Completion) and found[0].output == "first"
    codes = [(type(one), getattr(one, "code", "")) for one in found[1:]]
    assert codes == [
        (Transient, "missing_in_batch"),
        (Transient, "batch_expired"),
        (Transient, "garbage_body"),
        (RequestDenied, "rejected_400"),
        (Transient, "garbage_line"),
        (Transient, "http_429"),
    ]


@on_a_loop
async def test_a_missing_output_file_is_missing_rows() -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:
        end = api.end

        def without_file(batch: dict[str, Any]) -> None:
            end(batch)
            batch["output_file_id"] = "../../files"

        api.end = without_file  # type: ignore[method-assign]
        (error,) = await ask(engine, 1)
    assert isinstance(error, Transient) and error.code == "missing_in_batch"


@on_a_loop
async def test_of_an_output_file_without_end_no_more_is_read_than_was_agreed() -> None:
    limits = replace(LIMITS, max_output_bytes=100_000)

    def answer(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        return [line(asked[0]), b"x" * 200_000 + b"\n", line(asked[1])], []

    async with fake_batch_api(MODEL, answer=answer) as api, client(api, Records(), limits) as engine:
        found = await ask(engine, 1, 2)
    assert texts(found) == ["an answer", "Transient"]


@pytest.mark.parametrize(
    ("path", "refusal", "expected"),
    [
        ("files", status(401, '{"error": {"message": "wrong key s3cret"}}'), EngineRefused),
        ("batches", status(429, '{"error": {"code": "insufficient_quota", "message": "pay"}}'), RequestDenied),
        ("batches", status(400, '{"error": {"message": "no such endpoint"}}'), EngineRefused),
    ],
)
@on_a_loop
async def test_what_refuses_every_batch_is_said_at_once(path: str, refusal: Any, expected: type[Exception]) -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:
        api.refusals[path] = [refusal]
        (error,) = await ask(engine, 1)
        assert type(error) is expected and "s3cret" not in f"{error}"
        assert not isinstance(error, RequestDenied) or error.of_account


@on_a_loop
async def test_a_batch_that_fails_says_why_and_is_forgotten() -> None:
    records, errors = Records(), [{"code": "invalid_json_line", "message": "line 1", "param": None, "line": 1}]
    async with (
        fake_batch_api(MODEL, status="failed", errors=errors) as api,
        client(api, records) as engine,
    ):
        (error,) = await ask(engine, 1)
        assert isinstance(error, EngineRefused) and "invalid_json_line" in f"{error}"
        assert not records.kept


@on_a_loop
async def test_a_full_queue_of_the_account_is_waited_for() -> None:
    errors = [{"code": "token_limit_exceeded", "message": "enqueued token limit"}]
    async with (
        fake_batch_api(MODEL, answer=echo, status="failed", errors=errors) as api,
        client(api, Records()) as engine,
    ):
        asking = asyncio.create_task(ask(engine, 1))
        await until(lambda: len(api.batches) == 2)
        api.status = "completed"
        assert texts(await asking) == ["re: question 1"]


@on_a_loop
async def test_lines_that_are_all_refused_alike_are_not_the_rows_fault() -> None:
    def answer(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        return [], [line(one, {"error": {"message": "no such model"}}, 404) for one in asked]

    async with fake_batch_api(MODEL, answer=answer) as api, client(api, Records()) as engine:
        found = await ask(engine, *range(10))
    assert {type(one) for one in found} == {EngineRefused}


@on_a_loop
async def test_a_withdrawn_batch_is_cancelled_and_what_it_finished_is_kept() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo, ends=False, finished=2) as api, client(api, records) as engine:
        asking = [asyncio.create_task(engine.generate(prompt(one))) for one in range(5)]
        await until(lambda: any(record.batch_id for record in records.all()))
        await asyncio.wait_for(engine.withdraw(), 10)
        assert api.batches["batch-0"]["status"] == "cancelled"
        assert [one.done() for one in asking] == [True, True, False, False, False]
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await engine.settle()
        assert not records.kept


@on_a_loop
async def test_a_batch_that_does_not_end_in_its_window_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runner.batch_api.batch_client.CANCEL_SECONDS", 0.1)
    limits, records = replace(LIMITS, window_seconds=0.1), Records()
    async with fake_batch_api(MODEL, answer=echo, ends=False) as api, client(api, records, limits) as engine:
        (error,) = await ask(engine, 1)
        assert isinstance(error, Transient) and error.code == "batch_cancelled"
        assert api.batches["batch-0"]["status"] == "cancelled"


@on_a_loop
async def test_tasks_that_no_batch_takes_are_refused() -> None:
    async with fake_batch_api(MODEL) as api:
        engine = BatchClient(
            api.url, Generation("rerank", MODEL, {}), batches=LIMITS, records=Records(), labels={"dataset": "d"}
        )
        async with engine:
            with pytest.raises(EngineRefused, match="task rerank"):
                await engine.info()


@on_a_loop
async def test_a_provider_that_writes_states_in_capitals_and_answers_with_a_job_is_understood() -> None:
    async with fake_batch_api(MODEL, answer=echo, status="COMPLETED") as api, client(api, Records()) as engine:
        batches = api._batches

        async def answers(request: web.Request, path: list[str]) -> web.StreamResponse:
            answer = await batches(request, path)
            assert isinstance(answer, web.Response) and answer.text is not None
            return web.json_response({"job": json.loads(answer.text), "warning": ""})

        api._batches = answers  # type: ignore[method-assign]
        assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 1


@on_a_loop
async def test_no_batch_is_created_before_the_provider_has_read_its_file() -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:
        api.file_states = ["pending", "pending", "running"]
        assert texts(await ask(engine, 1)) == ["re: question 1"]


@on_a_loop
async def test_a_creation_that_was_not_answered_is_found_also_where_the_list_comes_late_or_has_no_metadata() -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:

        async def created_but_not_said(request: web.Request) -> web.StreamResponse:
            await api._batches(request, ["batches"])
            for batch in api.batches.values():
                batch["metadata"] = None
            return web.Response(status=504)

        async def not_listed(request: web.Request) -> web.StreamResponse:
            return web.json_response([])

        api.refusals["batches"] = [created_but_not_said, not_listed]
        assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 1


@on_a_loop
async def test_a_batch_and_a_file_that_are_not_there_for_a_moment_cost_no_row_a_second_time() -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:
        files = api._files
        hidden = [status(404)]

        async def later(request: web.Request, path: list[str]) -> web.StreamResponse:
            return await (hidden.pop()(request) if path[-1] == "content" and hidden else files(request, path))

        api._files = later  # type: ignore[method-assign]

        async def created(request: web.Request) -> web.StreamResponse:
            api.refusals["batches"] = [status(404, '{"error": {"message": "no such batch"}}')]
            return await api._batches(request, ["batches"])

        api.refusals["batches"] = [created]
        assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 1 and not hidden


@on_a_loop
async def test_a_batch_that_does_not_say_yet_where_its_answers_are_is_looked_at_again() -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:
        end = api.end

        def without_file(batch: dict[str, Any]) -> None:
            end(batch)
            batch["request_counts"] = {"total": 1, "completed": 1, "failed": 0}
            batch["status"], batch["output_file_id"], found = "completed", None, batch["output_file_id"]
            asyncio.get_running_loop().call_later(0.05, batch.update, {"output_file_id": found})

        api.end = without_file  # type: ignore[method-assign]
        assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 1


@on_a_loop
async def test_the_answers_of_a_batch_that_failed_half_way_are_taken() -> None:
    def answer(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        return [line(asked[0])], []

    async with fake_batch_api(MODEL, answer=answer, status="failed") as api, client(api, Records()) as engine:
        found = await ask(engine, 1, 2)
    assert texts(found) == ["an answer", "Transient"]


@on_a_loop
async def test_a_batch_that_is_more_than_the_queue_takes_is_sent_in_parts_and_leaves_no_input_file() -> None:
    errors = [{"code": "token_limit_exceeded", "message": "enqueued token limit"}]
    async with (
        fake_batch_api(MODEL, answer=echo, errors=errors, most_lines=3) as api,
        client(api, Records()) as engine,
    ):
        assert texts(await ask(engine, *range(10))) == [f"re: question {one}" for one in range(10)]
        await until(lambda: len(api.deleted) == len(api.batches))
        done = [one for one in api.batches.values() if one["status"] == "completed"]
        assert sum(len(api.lines(one["input_file_id"])) for one in done) == 10
        assert api.deleted == {one["input_file_id"] for one in api.batches.values()}


@on_a_loop
async def test_a_queue_that_stays_full_for_a_day_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runner.batch_api.batch_client.QUEUE_SECONDS", 0.0)
    monkeypatch.setattr("gpu_runner.batch_api.batch_client.FIRST_POLL_SECONDS", 0.0)
    errors = [{"code": "token_limit_exceeded", "message": "enqueued token limit"}]
    limits = replace(LIMITS, gather_seconds=0.001, poll_seconds=0.001)
    async with (
        fake_batch_api(MODEL, answer=echo, status="failed", errors=errors) as api,
        client(api, Records(), limits) as engine,
    ):
        depths: set[int] = set()
        end = api.end

        def watched(batch: dict[str, Any]) -> None:
            depths.add(max(map(chain_of, asyncio.all_tasks())))
            end(batch)

        api.end = watched  # type: ignore[method-assign]
        asking = asyncio.create_task(ask(engine, 1))
        await until(lambda: len(api.batches) >= 30)
        api.status, api.errors = "completed", []
        assert texts(await asking) == ["re: question 1"]
    assert max(depths) < 20, "what waits grows with every refusal"


def chain_of(task: asyncio.Task[Any]) -> int:
    """How many coroutines wait for one another in a task."""
    found = 0
    inner: Any = task.get_coro()
    while inner is not None:
        found, inner = found + 1, getattr(inner, "cr_await", None)
    return found


@on_a_loop
async def test_a_provider_that_says_429_for_long_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runner.batch_api.patient_calls.SILENT_SECONDS", 0.1)
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:
        api.refusals["batches"] = [status(429)] * 12
        assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 1


@on_a_loop
async def test_a_batch_that_can_no_longer_be_cancelled_is_taken_as_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(LIMITS, window_seconds=0.1)
    async with fake_batch_api(MODEL, answer=echo, ends=False) as api, client(api, Records(), limits) as engine:
        batches = api._batches

        async def finalizing(request: web.Request, path: list[str]) -> web.StreamResponse:
            if path[-1] == "cancel":
                api.ends = True
                return web.json_response({"error": {"message": "cannot cancel"}}, status=409)
            return await batches(request, path)

        api._batches = finalizing  # type: ignore[method-assign]
        assert texts(await ask(engine, 1)) == ["re: question 1"]


@on_a_loop
async def test_an_encoded_file_and_a_full_disk_cost_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runner.batch_api.patient_calls.SILENT_SECONDS", 0.05)
    records = Records()
    async with fake_batch_api(MODEL, answer=echo) as api:
        files = api._files

        async def encoded(request: web.Request, path: list[str]) -> web.StreamResponse:
            answer = await files(request, path)
            if path[-1] == "content":
                answer.headers["Content-Encoding"] = "gzip"
            return answer

        api._files = encoded  # type: ignore[method-assign]
        async with client(api, records) as engine:
            (error,) = await ask(engine, 1)
            assert isinstance(error, EngineLost) and "garbage_body" in f"{error}"
        api._files = files  # type: ignore[method-assign]
        async with client(api, records) as engine:
            engine._folder = engine._folder / "not there"
            (error,) = await ask(engine, 1)
            assert isinstance(error, EngineLost) and "cannot be kept" in f"{error}"
        async with client(api, records) as engine:
            assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 1


@on_a_loop
async def test_rows_of_a_batch_that_could_not_be_looked_at_take_its_lines_when_they_are_asked_again() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo, ends=False) as api:
        async with client(api, records) as killed:
            waiting = asyncio.create_task(ask(killed, 1, 2))
            await until(lambda: any(record.batch_id for record in records.all()))
            waiting.cancel()
        api.ends = True
        async with client(api, records) as engine:
            api.refusals["batches"] = [status(429, '{"error": {"code": "insufficient_quota", "message": "pay"}}')]
            (error,) = await ask(engine, 1)
            assert isinstance(error, RequestDenied) and error.of_account
            assert texts(await ask(engine, 1, 2)) == ["re: question 1", "re: question 2"]
        assert len(api.batches) == 1


@on_a_loop
async def test_a_client_that_is_withdrawn_while_it_uploads_creates_no_batch() -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:
        uploading, go_on = asyncio.Event(), asyncio.Event()
        files = api._files

        async def slow(request: web.Request, path: list[str]) -> web.StreamResponse:
            uploading.set()
            await go_on.wait()
            return await files(request, path)

        api._files = slow  # type: ignore[method-assign]
        asking = asyncio.create_task(engine.generate(prompt(1)))
        await uploading.wait()
        leaving = asyncio.create_task(engine.withdraw(5))
        await asyncio.sleep(0)
        go_on.set()
        await leaving
        assert not api.batches and api.deleted == set(api.files)
        asking.cancel()


@on_a_loop
async def test_a_cancel_that_is_not_answered_is_said_again() -> None:
    async with (
        fake_batch_api(MODEL, answer=echo, ends=False, finished=1) as api,
        client(api, records := Records()) as engine,
    ):
        asking = [asyncio.create_task(engine.generate(prompt(one))) for one in range(3)]
        await until(lambda: any(record.batch_id for record in records.all()))
        batches, failures = api._batches, [status(503), status(503)]

        async def unwilling(request: web.Request, path: list[str]) -> web.StreamResponse:
            return await (failures.pop()(request) if path[-1] == "cancel" and failures else batches(request, path))

        api._batches = unwilling  # type: ignore[method-assign]
        await engine.withdraw(10)
        assert not failures and api.batches["batch-0"]["status"] == "cancelled"
        for one in asking:
            one.cancel()


@on_a_loop
async def test_lines_that_are_refused_for_different_reasons_are_the_rows_own() -> None:
    def answer(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        reasons = ["moderation", "this picture cannot be read"]
        said = [{"error": {"message": reasons[number % 2]}} for number in range(len(asked))]
        return [], [line(one, body, 400) for one, body in zip(asked, said, strict=True)]

    async with fake_batch_api(MODEL, answer=answer) as api, client(api, Records()) as engine:
        found = await ask(engine, *range(10))
    assert {type(one) for one in found} == {RequestDenied}


def nobody_asks(record: SubmittedBatch) -> bool:
    """Nobody asks for rows of any batch."""
    return True


@on_a_loop
async def test_files_at_the_provider_are_deleted_when_the_rows_are_written_elsewhere() -> None:
    def answer(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        return [line(asked[0])], [line(asked[1], {"error": {"message": "moderation"}}, 400)]

    records = Records()
    async with fake_batch_api(MODEL, answer=answer) as api, client(api, records) as engine:
        await ask(engine, 1, 2)
        assert not {"output-batch-0", "error-batch-0"} & api.deleted, "a killed worker would need them"
        await engine.settle()
        assert not records.kept and api.deleted == set(api.files)


@on_a_loop
async def test_an_upload_is_written_down_before_it_is_begun_and_what_a_killed_one_left_is_deleted() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo) as api:
        async with client(api, records) as killed:
            uploaded = asyncio.Event()

            async def not_said(request: web.Request) -> web.StreamResponse:
                await api._files(request, ["files"])
                uploaded.set()
                await asyncio.sleep(60)
                raise AssertionError

            api.refusals["files"] = [not_said]
            waiting = asyncio.create_task(ask(killed, 1))
            await uploaded.wait()
            waiting.cancel()
        (intent,) = records.all()
        assert (intent.input_file_id, intent.batch_id, intent.labels) == ("", "", {"dataset": "d"})
        async with client(api, records) as engine:
            assert texts(await ask(engine, 1)) == ["re: question 1"]
            await engine.settle()
            assert list(records.kept) == [intent.key], "its run may be at work"
            await engine.settle(nobody_asks)
        assert not records.kept and len(api.batches) == 1 and api.deleted == set(api.files)


@on_a_loop
async def test_a_record_stays_until_its_files_could_be_deleted() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo) as api:
        async with client(api, records) as killed:
            assert texts(await ask(killed, 1)) == ["re: question 1"]
        (record,) = records.all()

        async def away(request: web.Request) -> web.StreamResponse:
            raise web.HTTPServiceUnavailable

        async with client(api, records) as engine:
            api.refusals["files"] = [away]
            await engine.settle(nobody_asks)
            assert list(records.kept) == [record.key]
            await engine.settle(nobody_asks)
        assert not records.kept and api.deleted == set(api.files)


@on_a_loop
async def test_the_window_of_a_batch_begins_when_it_is_created() -> None:
    records, now = Records(), [1000.0]
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, records, clock=lambda: now[0]) as engine:

        async def takes_long(request: web.Request) -> web.StreamResponse:
            now[0] += 10_000
            return await api._files(request, ["files"])

        api.refusals["files"] = [takes_long]
        assert texts(await ask(engine, 1)) == ["re: question 1"]
        (record,) = records.all()
        assert record.created_at == 11_000


@on_a_loop
async def test_an_upload_whose_answer_is_lost_leaves_no_second_file() -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:

        async def taken_but_not_said(request: web.Request) -> web.StreamResponse:
            await api._files(request, ["files"])
            return web.Response(status=502)

        api.refusals["files"] = [taken_but_not_said]
        assert texts(await ask(engine, 1)) == ["re: question 1"]
        await until(lambda: {"file-0", "file-1"} <= api.deleted)
        assert len(api.batches) == 1


@on_a_loop
async def test_a_refused_upload_leaves_no_record() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, records) as engine:
        api.refusals["files"] = [status(413)]
        (error,) = await ask(engine, 1)
        assert isinstance(error, EngineRefused) and "lower batch.max_file_bytes" in f"{error}"
        assert not records.kept


async def left_by_a_killed_one(api: FakeBatchApi, records: Records, *numbers: int) -> None:
    """A batch that was created, of which the record does not say so."""
    api.ends = False
    async with client(api, records) as killed:
        waiting = asyncio.create_task(ask(killed, *numbers))
        await until(lambda: any(record.batch_id for record in records.all()))
        waiting.cancel()
    (record,) = records.all()
    records.keep(record.model_copy(update={"batch_id": ""}))
    api.ends = True


@pytest.mark.parametrize("shown", [None, {}, {"project": "the provider's own"}])
@on_a_loop
async def test_a_batch_is_found_by_its_input_file_where_its_metadata_is_not_kept(shown: dict[str, str] | None) -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo) as api:
        await left_by_a_killed_one(api, records, 1)
        api.batches["batch-0"]["metadata"] = shown
        async with client(api, records) as engine:
            assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 1


@on_a_loop
async def test_a_provider_that_lists_no_batches_is_asked_again_with_the_same_key() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo, lists=False) as api:
        await left_by_a_killed_one(api, records, 1)
        (record,) = records.all()
        named = {"dataset": "d", "range": "of another run"}
        async with BatchClient(api.url, CHAT, batches=LIMITS, records=records, labels=named) as engine:
            await engine.canary()
            assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert list(api.once) == [record.key] and len(api.batches) == 1


@on_a_loop
async def test_a_list_that_is_refused_once_is_asked_for_again() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo) as api:
        await left_by_a_killed_one(api, records, 1)
        async with client(api, records) as engine:
            api.refusals["batches"] = [status(404)]
            assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 1


@on_a_loop
async def test_a_batch_behind_many_newer_ones_is_found_and_older_ones_are_not_looked_through() -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo) as api:
        await left_by_a_killed_one(api, records, 1)
        now = api.batches["batch-0"]["created_at"]
        others = {f"other-{one}": {"status": "completed", "created_at": now + one - 3000} for one in range(6000)}
        ours = {"batch-0": api.batches["batch-0"]}
        some = {name: {"id": name, **one} for name, one in others.items()}
        api.batches = dict(list(some.items())[:3000]) | ours | dict(list(some.items())[3000:])
        async with client(api, records) as engine:
            assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 6001
        pages = 0
        listed = api._page

        def counted(request: web.Request, oldest_first: list[dict[str, Any]]) -> web.StreamResponse:
            nonlocal pages
            pages += 1
            return listed(request, oldest_first)

        api._page = counted  # type: ignore[method-assign]
        async with client(api, records) as engine:
            assert await engine._api_calls.find("f" * 32, "", now + 4400 + SKEW_SECONDS) is None
        assert pages == 1


@on_a_loop
async def test_a_creation_that_is_under_way_already_is_waited_for() -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:

        async def created_but_refused(request: web.Request) -> web.StreamResponse:
            await api._batches(request, ["batches"])
            return web.json_response({"error": {"message": "a request with this key is under way"}}, status=409)

        api.refusals["batches"] = [created_but_refused]
        assert texts(await ask(engine, 1)) == ["re: question 1"]
        assert len(api.batches) == 1


@pytest.mark.parametrize("refused", [400, 429])
@on_a_loop
async def test_a_full_queue_at_creation_is_waited_for_with_shorter_batches(refused: int) -> None:
    records = Records()
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, records) as engine:
        create = api._create

        def full(asked: dict[str, Any], key: str) -> web.StreamResponse:
            if len(api.lines(asked["input_file_id"])) <= 3:
                return create(asked, key)
            error = {"message": "Enqueued token limit reached", "code": "token_limit_exceeded"}
            return web.json_response({"error": error}, status=refused)

        api._create = full  # type: ignore[method-assign]
        assert texts(await ask(engine, *range(10))) == [f"re: question {one}" for one in range(10)]
        assert len(api.asked) == 10
        await engine.settle()
        assert not records.kept and api.deleted == set(api.files)


@on_a_loop
async def test_a_cut_output_file_is_read_again_before_its_rows_count_as_missing() -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:
        end, whole = api.end, dict[str, bytes]()

        def cut(batch: dict[str, Any]) -> None:
            end(batch)
            batch["request_counts"] = {"total": 3, "completed": 3, "failed": 0}
            name = batch["output_file_id"]
            whole[name], api.files[name] = api.files[name], api.files[name][:-40]
            asyncio.get_running_loop().call_later(0.2, api.files.update, whole)

        api.end = cut  # type: ignore[method-assign]
        assert texts(await ask(engine, 1, 2, 3)) == [f"re: question {one}" for one in (1, 2, 3)]
        assert len(api.batches) == 1


@pytest.mark.parametrize(
    ("ended", "code", "taken"),
    [
        ("expired", "batch_expired", False),
        ("cancelled", "batch_cancelled", False),
        ("completed", "missing_in_batch", True),
    ],
)
@on_a_loop
async def test_rows_that_a_batch_has_not_come_to_are_not_to_blame(ended: str, code: str, taken: bool) -> None:
    def answer(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        return [line(asked[0])], []

    async with fake_batch_api(MODEL, answer=answer, status=ended) as api, client(api, Records()) as engine:
        first, second = await ask(engine, 1, 2)
    assert isinstance(first, Completion)
    assert isinstance(second, Transient) and (second.code, second.taken) == (code, taken)


@on_a_loop
async def test_what_a_batch_says_of_itself_while_it_runs_does_not_matter() -> None:
    nothing = {"total": 0, "completed": 0, "failed": 0}
    extra = {"request_counts": nothing, "expires_at": 1, "usage": None, "output_file_id": None, "error_file_id": None}
    async with fake_batch_api(MODEL, answer=echo, extra=extra) as api, client(api, Records()) as engine:
        assert texts(await ask(engine, 1)) == ["re: question 1"]
        odd = {"request_counts": {"completed": "many", "failed": -1}, "expires_at": "no", "errors": {"data": {}}}
        api.extra = odd
        assert texts(await ask(engine, 2)) == ["re: question 2"]


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([{"code": "too_many_tasks", "message": "50,000"}], "too_many_tasks.*Lower batch.max_requests_per_batch"),
        ([{"code": "invalid_json_line", "message": None, "line": 1}], "invalid_json_line"),
        (["?"], "no reason was given"),
    ],
)
@on_a_loop
async def test_an_input_that_is_refused_is_said_in_a_sentence(errors: list[Any], said: str) -> None:
    async with fake_batch_api(MODEL, status="failed", errors=errors) as api, client(api, Records()) as engine:
        with pytest.raises(EngineRefused, match=said):
            await engine.generate(prompt(1))
        assert api.deleted == set(api.files)


@on_a_loop
async def test_the_line_of_a_row_that_was_given_up_while_it_was_read_is_kept_for_the_next_one() -> None:
    def answer(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        return [line(one, completion("long" * 8000)) for one in asked], []

    records = Records()
    async with fake_batch_api(MODEL, answer=answer) as api, client(api, records) as engine:
        reading = asyncio.Event()

        async def no_room(length: int) -> None:
            reading.set()
            await asyncio.sleep(60)

        asking = asyncio.create_task(engine.generate(prompt(1), admit=no_room))
        await reading.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await engine.settle()
        assert len(records.kept) == 1 and "output-batch-0" not in api.deleted
        assert isinstance((await ask(engine, 1))[0], Completion)
        await engine.settle()
        assert not records.kept and len(api.batches) == 1


def refuses_lines(api: FakeBatchApi, bad: Callable[[list[dict[str, Any]]], list[int]]) -> None:
    """Files with lines that `bad` names are refused as a whole."""
    end = api.end

    def checked(batch: dict[str, Any]) -> None:
        named = bad(api.lines(batch["input_file_id"]))
        if not named:
            end(batch)
            return
        errors = [{"code": "invalid_request", "message": "no such picture", "line": one} for one in named]
        batch |= {"status": "failed", "errors": {"object": "list", "data": errors}}

    api.end = checked  # type: ignore[method-assign]


@on_a_loop
async def test_lines_for_which_a_file_is_refused_are_denied_and_the_others_are_sent_again() -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:
        refuses_lines(api, lambda asked: [n + 1 for n, one in enumerate(asked) if "question 3" in json.dumps(one)])
        found = await ask(engine, *range(6))
        assert texts(found) == [f"re: question {one}" if one != 3 else "RequestDenied" for one in range(6)]
        denied = found[3]
        assert isinstance(denied, RequestDenied) and (denied.code, denied.message) == (
            "rejected_400",
            "no such picture",
        )
        assert len(api.batches) == 2
        assert texts(await ask(engine, 3)) == ["RequestDenied"], "the model and the key are right: it is the row"


@pytest.mark.parametrize("named", [lambda asked: [*range(1, len(asked) + 1)], lambda asked: [1], lambda asked: [99]])
@on_a_loop
async def test_what_refuses_every_file_is_not_the_rows_fault(
    named: Callable[[list[dict[str, Any]]], list[int]],
) -> None:
    async with fake_batch_api(MODEL, answer=echo) as api, client(api, Records()) as engine:
        refuses_lines(api, named)
        found = await ask(engine, *range(20))
        assert "EngineRefused" in texts(found) and len(api.batches) <= 6
        with pytest.raises(EngineRefused, match="invalid_request"):
            await engine.generate(prompt(30))


@on_a_loop
async def test_a_record_is_read_once_however_many_batches_are_sent() -> None:
    records, limits = Records(), replace(LIMITS, max_requests=2)
    async with fake_batch_api(MODEL, answer=echo) as api:
        async with client(api, records, limits) as engine:
            await ask(engine, *range(20))
        assert len(records.kept) == 10 and max(records.read.values(), default=0) <= 1
        records.read.clear()
        async with client(api, records, limits) as engine:
            assert texts(await ask(engine, *range(20, 40))) == [f"re: question {one}" for one in range(20, 40)]
        assert set(records.read.values()) == {1}
