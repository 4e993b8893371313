"""`/v1/inference` and `/v1/result`: shapes, ids, tenants, keys, results."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from aiohttp import web
from support.http_server import http_server, status
from support.online_calls import OnlineCalls, online_calls
from support.simulated_engine import simulated_engine

from batch_assets.api.access.api_keys import checked_scopes
from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.billing.usage_journal import UsageJournal
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.service_database import Records
from batch_assets.api.online.queues.queue_protocol import Claim, QueueAway
from batch_assets.api.online.queues.tasks import TaskResult
from batch_assets.api.requests.callers import Scope
from batch_assets.api.settings import ModelSettings

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
ASK = {"input": "hello", "model": "tiny", "params": {"max_tokens": 8}}


def chat(text: str = "hi", **more: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", **more}
    return orjson.dumps({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})


class Engine:
    """Answers chats, and remembers what it was asked."""

    def __init__(self, body: bytes | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.body = body or chat()
        self.hold: asyncio.Event | None = None

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(orjson.loads(await request.read()))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.hold is not None:
            await self.hold.wait()
        return web.Response(body=self.body, content_type="application/json")


def serve(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scenario: Callable[[OnlineCalls, Engine], Awaitable[None]],
    engine: Engine | None = None,
    **environment: Any,
) -> None:
    async def run() -> None:
        found = engine or Engine()
        async with (
            http_server({CHAT: found.answer, EMBEDDINGS: found.answer, "/metrics": status(404)}) as url,
            online_calls(tmp_path, [url], monkeypatch, **environment) as site,
        ):
            await scenario(site, found)

    asyncio.run(run())


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def test_a_text_is_a_chat_and_its_answer_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        answer = await site.submit(ASK, traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
        assert answer.status_code == 202 and set(answer.json()) == {"task_id"}
        found = await site.ended(answer.json()["task_id"])
        assert found["status"] == "SUCCESS" and found["output"] == "hi" and found["error"] is None
        assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert found["created_at"] <= found["finished_at"] <= time.time()
        assert (found["tries"], found["cached"]) == (0, False) and "choices" not in found
        assert engine.asked == [{"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}]
        assert engine.headers[0]["traceparent"].startswith("00-4bf92f3577b34da6a3ce929d0e0e4736-")

    serve(tmp_path, monkeypatch, scenario)


def test_what_an_engine_answered_is_charged_once_also_when_the_queue_has_not_said_that_it_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        queue = site.door.inner.state.online.queue
        store, lost = queue.acknowledge, []

        async def acknowledge(claim: Claim, result: TaskResult) -> bool:
            stored = bool(await store(claim, result))
            if not lost:
                lost.append(claim)
                raise QueueAway
            return stored

        monkeypatch.setattr(queue, "acknowledge", acknowledge)
        for _ in range(2):
            assert (await site.ended(await site.accepted({**ASK, "cache": "allow"})))["status"] == "SUCCESS"
        assert len(engine.asked) == len(lost) == 1, "the second is answered from the cache"

    serve(tmp_path, monkeypatch, scenario)
    with contextlib.closing(UsageLedger(Records(f"sqlite:///{tmp_path}/api.db"))) as ledger:
        assert [(line.used.requests, line.used.tokens) for line in ledger.lines()] == [(1, 7)]


def test_an_alias_stands_for_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        state = site.door.inner.state
        state.settings = replace(state.settings, models=ModelSettings(aliases={"fast": "tiny"}))
        assert (await site.ended(await site.accepted({**ASK, "model": "fast"})))["status"] == "SUCCESS"
        assert [asked["model"] for asked in engine.asked] == ["tiny"]

    serve(tmp_path, monkeypatch, scenario)
    with contextlib.closing(UsageLedger(Records(f"sqlite:///{tmp_path}/api.db"))) as ledger:
        assert [line.key.model for line in ledger.lines()] == ["tiny"]


def test_while_usage_cannot_be_recorded_nothing_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        assert "batch_assets_usage_answers_lost 0.0" in site.door.metrics.page().decode()
        monkeypatch.setattr(UsageJournal, "full", True)
        refused = await site.submit(ASK)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "usage_not_recorded")
        asked = await site.client.post(CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": "a"}]})
        assert (asked.status_code, error_of(asked)["code"]) == (503, "usage_not_recorded") and not engine.asked

    serve(tmp_path, monkeypatch, scenario)


def test_messages_are_a_chat_and_more_than_text_is_in_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]

    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        found = await site.ended(await site.accepted({"input": messages, "model": "tiny"}))
        assert engine.asked[0]["messages"] == messages
        assert found["output"] == "hi" and found["choices"][0]["finish_reason"] == "length"

    serve(tmp_path, monkeypatch, scenario, Engine(chat(finish_reason="length")))


def test_texts_are_embeddings_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}]
    body = orjson.dumps({"data": data, "usage": {"prompt_tokens": 2, "total_tokens": 2}})

    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        found = await site.ended(await site.accepted({"input": ["a", "b"], "model": "tiny"}))
        assert found["output"] == [[1.0], [2.0]] and found["usage"]["prompt_tokens"] == 2
        assert engine.asked == [{"model": "tiny", "input": ["a", "b"]}]

    serve(tmp_path, monkeypatch, scenario, Engine(body))


def test_the_simulated_engine_answers_both_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        with simulated_engine("--speed", "100") as engine:
            async with online_calls(tmp_path, [engine.url], monkeypatch) as site:
                text = await site.ended(await site.accepted(ASK))
                vectors = await site.ended(await site.accepted({"input": ["a", "b"], "model": "tiny"}))
                assert isinstance(text["output"], str) and text["usage"]["completion_tokens"] == 8
                assert len(vectors["output"]) == 2 and isinstance(vectors["output"][0][0], float)

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"client_id": "c"}, "input", "missing_required_parameter"),
        ({"input": "x"}, "client_id", "missing_required_parameter"),
        ({"input": "x", "client_id": ""}, "client_id", "invalid_value"),
        ({"input": "x", "client_id": "c", "more": 1}, "more", "unknown_parameter"),
        ({"input": [], "client_id": "c"}, None, "invalid_value"),
        ({"input": 5, "client_id": "c"}, None, "invalid_value"),
        ({"input": ["a", {"role": "user"}], "client_id": "c"}, None, "invalid_value"),
        ({"input": "x", "client_id": "c", "ttl_seconds": 0}, None, "invalid_value"),
        ({"input": "x", "client_id": "c", "ttl_seconds": 1e9}, None, "invalid_value"),
        ({"input": "x", "client_id": "c", "cache": "always"}, "cache", "invalid_value"),
        ({"input": "x", "client_id": "c", "model": ""}, "model", "invalid_value"),
        ({"input": "x", "client_id": "c", "params": {"stream": True}}, "params.stream", "unsupported_parameter"),
        ({"input": "x", "client_id": "c", "params": {"priority": 1}}, "params.priority", "unsupported_parameter"),
        ({"input": "x", "client_id": "c", "params": {"model": "m"}}, "params.model", "unsupported_parameter"),
        ({"input": ["a"] * 2049, "client_id": "c"}, "input", "invalid_value"),
        ({"input": "x", "client_id": "c", "params": {"seed": 10**30}}, None, None),
    ],
)
def test_what_is_wrong_is_said_with_its_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], param: str | None, code: str | None
) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        answer = await site.client.post("/v1/inference", json={"model": "tiny", **body})
        error = error_of(answer)
        assert answer.status_code == 400 and error["code"] == code
        assert param is None or error["param"] == param
        assert not engine.asked

    serve(tmp_path, monkeypatch, scenario)


def test_the_model_may_be_left_out_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        async def known() -> frozenset[str] | None:
            return None if said[0] is None else frozenset(said[0])

        said: list[list[str] | None] = [None]
        models, directory = site.door.inner.state.online._models, site.door.inner.state.proxy.directory
        models._known = known
        cases = [(None, 202), ([], 202), (["a"], 400), (["tiny"], 202)]
        for said[0], expected in cases:
            models._until = 0.0
            assert (await site.submit({"input": "x"})).status_code == expected, said
        (engine_of_tiny,) = directory.targets()
        directory.withdraw(engine_of_tiny)
        models._names = None
        for said[0], expected in [(None, 503), ([], 400), (["a", "b"], 400), (["tiny"], 202)]:
            models._until = 0.0
            assert (await site.submit({"input": "x"})).status_code == expected, said
        models._names, models._until, said[0] = None, 0.0, None
        assert (await site.submit({"input": "x", "model": "later"})).status_code == 202
        said[0], models._until = ["tiny"], 0.0
        unknown = await site.submit({"input": "x", "model": "gpt-9"})
        assert unknown.status_code == 404 and error_of(unknown)["code"] == "model_not_found"

    serve(tmp_path, monkeypatch, scenario)


def test_a_repeated_key_is_the_same_task_and_another_request_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        first = await site.accepted(ASK, idempotency_key="k1")
        assert await site.accepted(ASK, idempotency_key="k1") == first
        await site.ended(first)
        assert await site.accepted(ASK, idempotency_key="k1") == first
        assert await site.accepted({**ASK, "client_id": "other"}, idempotency_key="k1") != first
        assert await site.accepted(ASK) != first
        refused = await site.submit({**ASK, "input": "bye"}, idempotency_key="k1")
        assert refused.status_code == 400 and error_of(refused)["code"] == "idempotency_key_reused"
        assert site.figure("batch_assets_online_accepted_total", repeated="true") == 2

    serve(tmp_path, monkeypatch, scenario)


def test_a_result_is_waited_for_and_the_wait_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        engine.hold = asyncio.Event()
        task_id = await site.accepted(ASK)
        pending = await site.result(task_id, 0.05)
        assert set(pending) == {"task_id", "status", "created_at"} and pending["status"] == "PENDING"
        waiting = asyncio.create_task(site.result(task_id, 60))
        await asyncio.sleep(0)
        engine.hold.set()
        assert (await waiting)["status"] == "SUCCESS"
        for wait in ("-1", "61", "nan", "inf", "x"):
            answer = await site.client.get(f"/v1/result/{task_id}", params={"wait": wait})
            assert answer.status_code == 400, wait

    serve(tmp_path, monkeypatch, scenario)


@pytest.mark.parametrize("task_id", ["task_" + "0" * 32, "x", "task_" + "f" * 32, "%00", "a" * 300])
def test_an_unknown_task_is_404(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task_id: str) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        answer = await site.client.get(f"/v1/result/{task_id}")
        assert answer.status_code == 404 and error_of(answer)["param"] == "task_id"

    serve(tmp_path, monkeypatch, scenario)


def key_for(home: Path, tenant: str, *scopes: str) -> dict[str, str]:
    with contextlib.closing(KeyStore(f"sqlite:///{home / 'api.db'}", time.time)) as store:
        secret = store.create(tenant, checked_scopes(list(scopes)))[1]
    return {"Authorization": f"Bearer {secret}"}


def test_tenants_see_their_own_tasks_only_and_need_the_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acme, other = key_for(tmp_path, "acme"), key_for(tmp_path, "other")
    reader = key_for(tmp_path, "acme", "batches.read")

    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        assert (await site.submit(ASK)).status_code == 401
        assert (await site.submit(ASK, **reader)).status_code == 403
        task_id = await site.accepted(ASK, idempotency_key="k", **acme)
        assert (await site.result(task_id, **acme))["status"] == "SUCCESS"
        for headers, expected in ((other, 404), (reader, 403), ({}, 401)):
            assert (await site.client.get(f"/v1/result/{task_id}?wait=30", headers=headers)).status_code == expected
        assert await site.accepted(ASK, idempotency_key="k", **other) != task_id

    serve(tmp_path, monkeypatch, scenario)


def test_limits_hold_and_tokens_are_settled_by_what_was_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limits.yaml").write_text("default: {requests_per_minute: 1000000, tokens_per_minute: 10000}\n")
    acme = key_for(tmp_path, "acme")

    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        big = {**ASK, "params": {"max_tokens": 9000}}
        assert (await site.result(await site.accepted(big, **acme), **acme))["status"] == "SUCCESS"
        async with asyncio.timeout(20):  # by itself, the bucket has room for this after most of a minute
            while (await site.submit(big, **acme)).status_code != 202:
                assert (await site.client.get("/v1/models", headers=acme)).status_code < 429
        over = await site.submit({**ASK, "params": {"max_tokens": 20_000}}, **acme)
        assert over.status_code == 429 and error_of(over)["code"] == "rate_limit_exceeded"

    serve(tmp_path, monkeypatch, scenario)


def test_dead_letters_are_for_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acme, operator = key_for(tmp_path, "acme"), key_for(tmp_path, "ops", "dead_letters")
    assert Scope.DEAD_LETTERS not in checked_scopes([])

    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        assert (await site.client.get("/v1/dead_letters", headers=acme)).status_code == 403
        engine.body = b"no answer"
        task_id = await site.accepted({**ASK, "input": "secret words"}, **acme)
        async with asyncio.timeout(60):
            while (found := await site.result(task_id, **acme))["status"] == "PENDING":
                pass
        assert (found["status"], found["error"]["code"], found["tries"]) == ("FAILED", "engine_garbage", 3)
        listed = await site.client.get("/v1/dead_letters", headers=operator)
        (letter,) = listed.json()["data"]
        assert (letter["task_id"], letter["tenant"], letter["code"]) == (task_id, "acme", "engine_garbage")
        assert "secret" not in listed.text
        engine.body = chat()
        redriven = await site.client.post("/v1/dead_letters/redrive", json={"task_ids": [task_id]}, headers=operator)
        assert redriven.json() == {"redriven": 1}
        assert (await site.result(task_id, **acme))["status"] == "SUCCESS"
        assert (await site.client.get("/v1/dead_letters", headers=operator)).json() == {"data": []}

    serve(tmp_path, monkeypatch, scenario)


def test_the_calls_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        described = (await site.client.get("/openapi.json")).json()
        submit = described["paths"]["/v1/inference"]["post"]
        assert submit["responses"]["202"]["content"]["application/json"]["schema"]["$ref"].endswith("/Accepted")
        body = submit["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = described["components"]["schemas"][body.rpartition("/")[2]]["properties"]
        assert set(fields) == {"input", "client_id", "model", "params", "ttl_seconds", "cache"}
        result = described["paths"]["/v1/result/{task_id}"]["get"]
        assert result["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Result")

    serve(tmp_path, monkeypatch, scenario)
