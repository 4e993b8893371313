"""From the queue to the engine and back: tries, engines that are away, time to live, collapse and cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from support.http_server import http_server
from support.online_calls import OnlineCalls, online_calls
from support.redis_server import RedisServer, needs_redis, redis_server
from support.timing import PATIENCE

from batch_assets.api.interactive.engine_directory import EngineTarget
from batch_assets.api.online.answers import redis_cache
from batch_assets.api.online.answers.answer_cache import CacheAway, LocalCache, answer_key, sealed, unsealed
from batch_assets.api.online.answers.collapse import CollapsedRequests
from batch_assets.api.online.dispatcher import DispatchRequest
from batch_assets.api.online.online_metrics import OnlineFigures
from batch_assets.api.online.queues.redis_commands import client
from batch_assets.api.online.queues.redis_streams import key
from batch_assets.api.online.queues.tasks import TaskKind
from batch_assets.api.online.request import read_answer

CHAT = "/v1/chat/completions"
ANSWER = (
    b'{"choices":[{"index":0,"message":{"content":"hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1}}'
)
ASK = {"input": "hello", "model": "tiny"}
SURE = {**ASK, "params": {"temperature": 0}}
HIT = "batch_assets_online_cache_total"

Say = Callable[[int], tuple[int, bytes]]  # of the number of the request: status and body


class Engine:
    """Says what a test wants; `gate`: answers wait for it."""

    def __init__(self, say: Say = lambda number: (200, ANSWER)) -> None:
        self.say, self.count = say, 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.page = b""

    async def answer(self, request: web.Request) -> web.Response:
        self.count += 1
        number = self.count
        await self.gate.wait()
        code, body = self.say(number)
        return web.Response(status=code, body=body, content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.page)


def serve(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scenario: Callable[[OnlineCalls, Engine], Coroutine[Any, Any, None]],
    say: Say = lambda number: (200, ANSWER),
    **environment: Any,
) -> None:
    async def run() -> None:
        engine = Engine(say)
        routes = {CHAT: engine.answer, "/metrics": engine.metrics}
        async with http_server(routes) as url, online_calls(tmp_path, [url], monkeypatch, **environment) as site:
            try:
                await scenario(site, engine)
            finally:
                engine.gate.set()

    asyncio.run(run())


async def until(true: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + 20 * PATIENCE
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "body"), [(500, b"{}"), (200, b"garbage"), (200, b'{"choices":[]}'), (200, b'{"data":[]}')]
)
def test_two_failed_tries_and_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, body: bytes
) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        found = await site.ended(await site.accepted(SURE))
        assert (found["status"], found["tries"], engine.count) == ("SUCCESS", 2, 3)
        assert site.figure("batch_assets_online_retries_total", failure="broken") == 2
        again = await site.ended(await site.accepted(SURE))
        assert again["cached"] and engine.count == 3, "only the answer is kept"

    serve(tmp_path, monkeypatch, scenario, lambda number: (200, ANSWER) if number > 2 else (code, body))


def test_three_failed_tries_are_a_dead_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        found = await site.ended(await site.accepted(ASK))
        assert (found["status"], found["tries"], found["error"]["code"]) == ("FAILED", 3, "engine_error")
        assert engine.count == 3 and found["output"] is None

    serve(tmp_path, monkeypatch, scenario, lambda number: (500, b"{}"))


def test_what_the_engine_refuses_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        found = await site.ended(await site.accepted(ASK))
        assert (found["status"], found["error"]) == ("FAILED", {"code": "request_refused", "message": "too long"})
        assert engine.count == 1

    serve(tmp_path, monkeypatch, scenario, lambda number: (400, b'{"error":{"message":"too long"}}'))


def test_an_engine_that_is_full_or_away_costs_no_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        found = await site.ended(await site.accepted(ASK))
        assert (found["status"], found["tries"], engine.count) == ("SUCCESS", 0, 5)
        directory = site.door.inner.state.proxy.directory
        (target,) = directory.targets()
        directory.withdraw(target)
        directory.announce(EngineTarget("http://127.0.0.1:1", "tiny"))
        task_id = await site.accepted(ASK)
        await until(lambda: site.figure("batch_assets_online_retries_total", failure="away") >= 6)
        assert (await site.result(task_id, 0))["status"] == "PENDING"
        directory.announce(target)
        assert (await site.ended(task_id))["tries"] == 0

    serve(tmp_path, monkeypatch, scenario, lambda number: (200, ANSWER) if number > 4 else (503, b"{}"))


def test_a_request_that_nobody_answers_in_time_is_dropped_and_answered_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        engine.gate.clear()
        found = await site.ended(await site.accepted({**ASK, "ttl_seconds": 0.1}))
        assert (found["status"], found["error"]["code"]) == ("FAILED", "expired")
        assert not await site.door.inner.state.online.queue.dead_letters(10)

    serve(tmp_path, monkeypatch, scenario)


def test_identical_requests_in_flight_are_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        engine.gate.clear()
        ids = [await site.accepted(SURE) for _ in range(8)]
        others = [await site.accepted({**SURE, "cache": "never"}), await site.accepted(ASK), await site.accepted(ASK)]
        await until(lambda: engine.count == 4)
        engine.gate.set()
        found = [await site.ended(task_id) for task_id in ids + others]
        assert {one["status"] for one in found} == {"SUCCESS"} and engine.count == 4
        assert [one["cached"] for one in found].count(True) == 7
        assert site.figure(HIT, outcome="collapsed") == 7 and site.figure(HIT, outcome="miss") == 1
        assert (await site.ended(await site.accepted({**ASK, "cache": "allow"})))["cached"] is False
        assert (await site.ended(await site.accepted({**ASK, "cache": "allow"})))["cached"] is True

    serve(tmp_path, monkeypatch, scenario)


def test_who_asked_for_others_may_end_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        engine.gate.clear()
        short = await site.accepted({**SURE, "ttl_seconds": PATIENCE})  # to be sent in, on a busy machine
        await until(lambda: engine.count == 1)
        long = await site.accepted(SURE)
        assert (await site.ended(short))["error"]["code"] == "expired"
        await until(lambda: engine.count == 2)
        engine.gate.set()
        assert (await site.ended(long))["status"] == "SUCCESS"

    serve(tmp_path, monkeypatch, scenario)


def test_tenants_share_answers_only_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        async def cached(tenant: str) -> bool:
            tenants[0] = tenant
            return bool((await site.ended(await site.accepted(SURE)))["cached"])

        assert not await cached("acme") and await cached("acme")
        assert not await cached("other") and await cached("labs") and not await cached("third")

    tenants = ["acme"]

    async def authenticate(request: Any) -> Any:
        from batch_assets.api.requests.callers import ALL_SCOPES, Caller

        return Caller(tenants[0], None, ALL_SCOPES)

    async def with_tenants(site: OnlineCalls, engine: Engine) -> None:
        site.door.inner.state.authenticate = authenticate
        await scenario(site, engine)

    serve(tmp_path, monkeypatch, with_tenants, CACHE_GROUPS="acme+labs")


class BrokenCache(LocalCache):
    """Is away at every call."""

    async def get(self, key: str) -> bytes | None:
        raise CacheAway

    async def put(self, key: str, value: bytes) -> None:
        raise CacheAway

    async def end(self, key: str) -> None:
        raise CacheAway


class LateCache(LocalCache):
    """Another process keeps its answer, and is done, just after the first look."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.looks, self.ended = 0, 0

    async def get(self, key: str) -> bytes | None:
        self.looks += 1
        if self.looks > 1:
            return await super().get(key)
        await self.put(key, sealed(key, ANSWER))
        return None

    async def end(self, key: str) -> None:
        self.ended += 1


def test_an_answer_that_comes_between_a_look_and_the_right_to_ask_is_taken() -> None:
    async def scenario() -> None:
        cache = LateCache()
        dispatcher: Any = SimpleNamespace(identity=lambda model: model, ask=None)  # no engine is to be asked
        requests = CollapsedRequests(dispatcher, cache, {}, OnlineFigures(CollectorRegistry()))
        request = DispatchRequest(TaskKind.CHAT, "tiny", b"{}", 1, 0.0, "")
        answer, cached = await requests.ask("acme", request, reusable=True)
        assert (answer.body, cached, cache.ended) == (ANSWER, True, 1)

    asyncio.run(scenario())


def test_garbage_in_the_cache_and_a_cache_that_is_away_count_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        requests = site.door.inner.state.online._consumer._requests
        cache: LocalCache = requests._cache
        await site.ended(await site.accepted(SURE))
        (key,) = cache._kept
        for garbage in (b"", b"\xff" * 10, sealed("other", ANSWER), sealed(key, ANSWER)[:-1]):
            await cache.put(key, garbage)
            found = await site.ended(await site.accepted(SURE))
            assert (found["status"], found["cached"], found["output"]) == ("SUCCESS", False, "hi")
        assert site.figure(HIT, outcome="corrupt") == 4 and engine.count == 5
        requests._cache = BrokenCache(time.monotonic)
        assert (await site.ended(await site.accepted(SURE)))["status"] == "SUCCESS"
        assert site.figure(HIT, outcome="bypassed") == 1

    serve(tmp_path, monkeypatch, scenario)


def test_metrics_of_the_queue_are_those_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        engine.gate.clear()
        for number in range(1, 6):
            await site.accepted(ASK)
            depths = [site.figure("batch_assets_online_queue_depth", state=one) for one in ("waiting", "claimed")]
            assert sum(depths) == number
        engine.gate.set()

    serve(tmp_path, monkeypatch, scenario, CONCURRENCY="2")


@pytest.mark.slow
def test_engines_that_are_full_slow_admission_to_429(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        engine.page = b"vllm:num_requests_running 4\nvllm:num_requests_waiting 9\nvllm:kv_cache_usage_perc 0.99\n"
        engine.gate.clear()
        ids = [await site.accepted(ASK) for _ in range(8)]
        async with asyncio.timeout(20 * PATIENCE):
            while (answer := await site.submit(ASK)).status_code == 202:
                ids.append(answer.json()["task_id"])
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1 and int(answer.headers["retry-after-ms"]) > 0
        assert site.figure("batch_assets_online_fullness") >= 0.9
        engine.gate.set()
        assert {(await site.ended(task_id))["status"] for task_id in ids} == {"SUCCESS"}

    serve(tmp_path, monkeypatch, scenario, CONCURRENCY="4")


@pytest.mark.slow
def test_a_queue_that_is_full_refuses_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Engine) -> None:
        engine.gate.clear()
        answers = [await site.submit({**ASK, "input": "0"}, idempotency_key="first")]
        answers += [await site.submit({**ASK, "input": f"{number}"}) for number in range(1, 30)]
        accepted = [one.json()["task_id"] for one in answers if one.status_code == 202]
        again = [await site.submit({**ASK, "input": "0"}, idempotency_key="first") for _ in range(3)]
        assert [one.json() for one in again] == [{"task_id": accepted[0]}] * 3, "a repeated key needs no room"
        other = await site.submit(ASK, idempotency_key="first")
        assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")
        assert (await site.submit(ASK, idempotency_key="new")).status_code == 429
        assert 18 <= len(accepted) <= 20 and {one.status_code for one in answers} == {202, 429}
        engine.gate.set()
        assert {(await site.ended(task_id))["status"] for task_id in accepted} == {"SUCCESS"}
        async with asyncio.timeout(20 * PATIENCE):
            while (await site.submit(ASK)).status_code != 202:
                await site.result(accepted[0], 0)

    serve(tmp_path, monkeypatch, scenario, MOST_WAITING="20", CONCURRENCY="4")


def test_what_was_accepted_is_answered_by_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.gate.clear()
        async with http_server({CHAT: engine.answer}) as url:
            async with online_calls(tmp_path, [url], monkeypatch, CONCURRENCY="2") as site:
                ids = [await site.accepted({**ASK, "input": f"{number}"}) for number in range(6)]
                await until(lambda: engine.count == 2)
            engine.gate.set()
            async with online_calls(tmp_path, [url], monkeypatch) as site:
                found = [await site.ended(task_id) for task_id in ids]
                assert {one["status"] for one in found} == {"SUCCESS"}
                assert [one["tries"] for one in found] == [0] * 6, "to end in order costs no try"

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as found:
        yield found


@needs_redis
def test_two_services_over_redis_ask_once_and_know_each_others_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: RedisServer
) -> None:
    monkeypatch.setattr(redis_cache, "LOOK_SECONDS", 10.0)  # a machine that is busy is not away

    async def scenario() -> None:
        engine = Engine()
        engine.gate.clear()
        async with (
            http_server({CHAT: engine.answer}) as url,
            online_calls(tmp_path / "a", [url], monkeypatch, redis=server.url, CONCURRENCY="4") as one,
            online_calls(tmp_path / "b", [url], monkeypatch, redis=server.url, CONCURRENCY="4") as two,
        ):
            ids = [await site.accepted(SURE, idempotency_key=f"{number}") for number in range(8) for site in (one, two)]
            assert len(set(ids)) == 8, "a key is one task, wherever it is sent"
            await until(lambda: engine.count >= 1)
            waiting = [asyncio.create_task(site.ended(task_id)) for task_id in ids for site in (one, two)]
            engine.gate.set()
            found = await asyncio.gather(*waiting)
            assert {result["output"] for result in found} == {"hi"} and engine.count == 1

    asyncio.run(scenario())


@needs_redis
def test_garbage_in_the_queue_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: RedisServer
) -> None:
    url = server.url.replace("/0", "/7")

    async def spoil() -> None:
        async with client(url) as redis:
            for shard in range(16):
                for name, packed in (("x", b"\xff"), ("task_" + f"{shard:02x}" + "0" * 30, b'{"tenant": 5}\n')):
                    task = {"state": "open", "packed": packed, "since": 0, "failures": 0, "returned": 0}
                    await redis.hset(key(shard, f"task:{name}"), mapping=task)
                    await redis.xadd(key(shard, "stream"), {"id": name})

    async def scenario() -> None:
        await spoil()
        engine = Engine()
        async with (
            http_server({CHAT: engine.answer}) as engine_url,
            online_calls(tmp_path / "a", [engine_url], monkeypatch, redis=url) as site,
        ):
            for _ in range(3):
                assert (await site.ended(await site.accepted(ASK)))["status"] == "SUCCESS"

    asyncio.run(scenario())


@needs_redis
def test_redis_away_is_said_at_once_and_all_goes_on_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: RedisServer) -> None:
        engine = Engine()
        engine.gate.clear()
        async with (
            http_server({CHAT: engine.answer}) as url,
            online_calls(tmp_path / "a", [url], monkeypatch, redis=server.url, MOST_WAITING="20") as site,
        ):
            held = await site.accepted(ASK)
            await until(lambda: engine.count == 1)
            await asyncio.to_thread(server.kill)
            engine.gate.set()  # the answer comes while nobody can keep it
            for _ in range(3):
                for call in (site.submit(ASK), site.client.get(f"/v1/result/{held}?wait=30")):
                    began = time.monotonic()
                    answer = await call
                    assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_unavailable"
                    assert answer.headers["retry-after"] == "1" and time.monotonic() - began < 5 * PATIENCE
            for _ in range(30):
                assert (await site.submit(ASK)).status_code == 503, "what is not kept fills no queue"
            assert (await site.client.get("/readyz")).status_code == 200
            direct = await site.client.post(CHAT, json={"model": "tiny", "messages": []})
            assert direct.status_code == 200, "other calls go on"
            await until(lambda: site.figure("batch_assets_online_queue_away") == 1)
            await asyncio.to_thread(server.start)
            async with asyncio.timeout(30 * PATIENCE):
                while (answer := await site.submit(ASK)).status_code != 202:
                    assert answer.status_code == 503
            assert (await site.ended(answer.json()["task_id"]))["status"] == "SUCCESS"
            assert (await site.ended(held))["output"] == "hi"
            assert engine.count == 3, "the answer that was there already was kept until it could be stored"

    with redis_server(tmp_path / "redis") as server:
        asyncio.run(scenario(server))


@needs_redis
@pytest.mark.parametrize(
    "settings",
    [
        ("--appendonly", "no"),
        ("--appendonly", "yes", "--appendfsync", "everysec"),
        ("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "allkeys-lru"),
    ],
)
def test_a_redis_that_would_forget_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    async def scenario(server: RedisServer) -> None:
        async with online_calls(tmp_path / "a", ["http://127.0.0.1:1"], monkeypatch, redis=server.url) as site:
            answer = await site.submit(ASK)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_unavailable"

    with redis_server(tmp_path / "redis", *settings) as server:
        asyncio.run(scenario(server))


def test_keys_differ_where_anything_differs() -> None:
    base = ("tenant a", "m", CHAT, b"{}")
    keys = {answer_key(*base)}
    for number in range(4):
        changed: list[Any] = list(base)
        changed[number] = changed[number] + (b"x" if number == 3 else "x")
        keys.add(answer_key(*changed))
    assert len(keys) == 5
    assert answer_key("ab", "c", CHAT, b"") != answer_key("a", "bc", CHAT, b"")
    assert unsealed("k", sealed("k", b"v")) == b"v" and unsealed("j", sealed("k", b"v")) is None


def test_the_cache_of_a_process_is_bounded_and_forgets() -> None:
    async def scenario() -> None:
        now = [0.0]
        cache = LocalCache(lambda: now[0], most_bytes=100)
        await cache.put("a", b"x" * 60)
        await cache.put("b", b"y" * 60)
        assert await cache.get("a") is None and await cache.get("b") is not None
        await cache.put("b", b"z")
        now[0] = 299.0
        assert await cache.get("b") == b"z"
        now[0] = 301.0
        assert await cache.get("b") is None and cache._bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b'{"choices":[{}]}', b'{"choices":[{"message":{"content":5}}]}', b'{"choices":5}']
)
def test_what_is_no_answer_is_none(body: bytes) -> None:
    assert read_answer(TaskKind.CHAT, body) is None
    assert read_answer(TaskKind.EMBEDDING, body) is None
