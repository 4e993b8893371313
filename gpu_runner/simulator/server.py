"""The HTTP face of the simulated engine: vLLM's endpoints, and faults carried out."""

from __future__ import annotations

import asyncio
import hmac
import os
import signal
import socket
import struct
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from weakref import WeakSet

import orjson
from aiohttp import web

from gpu_runner.simulator import replies, vllm_metrics
from gpu_runner.simulator.engine import Engine, EngineDead
from gpu_runner.simulator.pieces import Chunks, Stream
from gpu_runner.simulator.replies import ResponseGenerator
from gpu_runner.simulator.request_bodies import Endpoint, Request, parse, too_long
from gpu_runner.simulator.request_errors import ApiError
from gpu_runner.simulator.request_log import FLUSH_SECONDS, RequestLog
from gpu_runner.simulator.responses import ResponseEvents, response_body
from gpu_runner.simulator.scheduler import Sequence
from gpu_runner.simulator.scripted_faults import Fault, FaultPlan

VERSION = "simulated-0.1.0"
JSON = {"Content-Type": "application/json"}
NAMES: dict[Endpoint, str] = {"chat": "chatcmpl-", "completion": "cmpl-", "embedding": "embd-", "response": "resp_"}
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
    "/v1/responses": "response",
}
MAX_BODY = 256 * 2**20
DEAD = ApiError(
    500, "EngineCore encountered an issue. See stack trace (above) for the root cause.", "InternalServerError"
)
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Job:
    """One request on its way through the server."""

    http: web.BaseRequest
    request: Request
    number: int
    name: str
    created: int
    fault: Fault | None = None

    @property
    def fault_kind(self) -> str | None:
        """The kind of fault that this request meets."""
        return self.fault.kind if self.fault else None


class SimulatorServer:
    """Answers HTTP requests with the help of an Engine."""

    def __init__(
        self,
        voice: ResponseGenerator,
        engine: Engine,
        plan: FaultPlan,
        log: RequestLog,
        api_key: str | None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """`adapters`: paths of LoRA adapters by the names under which they are served beside the model."""
        self.adapters = adapters or {}
        self.voice = voice
        self.engine = engine
        self.plan = plan
        self.log = log
        self.started = time.time()
        self.speed = engine.clock.rate
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._used: WeakSet[Any] = WeakSet()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._get: dict[str, Handler] = {
            "/health": self._health,
            "/ping": self._health,
            "/version": self._version,
            "/v1/models": self._models,
            "/metrics": self._metrics,
            "/simulator/stats": self._stats,
            "/simulator/faults": self._show_faults,
        }

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one HTTP request; every failure of ours becomes an answer too."""
        path = http.path
        endpoint = ENDPOINTS.get(path)
        if self._authorization is not None and path.startswith("/v1/") and not self._authorized(http):
            return _json({"error": "Unauthorized"}, 401)
        try:
            if endpoint is not None and http.method == "POST":
                return await self._generate(http, endpoint)
            if path in self._get and http.method == "GET":
                return await self._get[path](http)
            if path == "/simulator/faults" and http.method == "POST":
                return await self._set_faults(http)
        except ApiError as error:
            return _json(error.body, error.status, error.headers)
        known = endpoint is not None or path in self._get
        return _json({"detail": "Method Not Allowed"}, 405) if known else _json({"detail": "Not Found"}, 404)

    def start(self) -> None:
        """Let the faults begin that wait for no request."""
        for timer in self._timers:
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(fault.number("after", 0), self._strike, fault) for fault in self.plan.immediate]

    def _authorized(self, http: web.BaseRequest) -> bool:
        given = http.headers.get("Authorization", "").encode()
        return self._authorization is not None and hmac.compare_digest(given, self._authorization)

    # Generation

    async def _generate(self, http: web.BaseRequest, endpoint: Endpoint) -> web.StreamResponse:
        reused = http.transport in self._used
        if not reused and http.transport is not None:
            self._used.add(http.transport)
        body = await http.read()
        try:
            request = parse(endpoint, body, self.voice.model, self.voice.max_model_len, self.adapters)
        except ApiError as error:
            self._finish(self._receive(error.prompt, 0), error.prompt, "refused")
            raise
        request = replace(request, priority=_priority(http, request.priority))
        digest = request.digest
        number = self._receive(digest, request.prompt_tokens)
        name = f"{NAMES[endpoint]}{http.headers.get('X-Request-Id') or uuid.uuid4().hex[:16]}"
        job = Job(http, request, number, name, int(time.time()))
        if self.plan.faults:
            text = "\n".join(prompt.text for prompt in request.prompts)
            job.fault = self.plan.pick(number, digest, text, reused=reused)
        outcome, tokens = "aborted", 0
        try:
            if job.fault is not None:
                await self._before(job)
            response, outcome, tokens = await self._work(job)
            if job.fault is not None:
                outcome = f"fault:{job.fault.kind}"
            return response
        except ApiError:
            outcome = f"fault:{job.fault.kind}" if job.fault else "refused"
            raise
        except EngineDead:
            outcome = "error"
            return _json(DEAD.body, 500)
        except asyncio.CancelledError:
            outcome = f"fault:{job.fault.kind}" if job.fault else "aborted"
            raise
        finally:
            self._finish(number, digest, outcome, request.prompt_tokens, tokens)

    async def _work(self, job: Job) -> tuple[web.StreamResponse, str, int]:
        """Spend the engine's time on a job; returns the answer, its outcome and its tokens."""
        request = job.request
        if request.endpoint == "embedding":
            found = replies.vectors(self.voice, request)
            await self._run([(prompt.tokens, 0) for prompt in request.prompts], request.priority)
            body = replies.embedding_body(request, found, request.model, job.name, job.created)
            return await self._answer(job, body), "embedding", 0
        texts = replies.answers(self.voice, request)
        if job.fault_kind == "wrong_json":
            texts = [replies.without_schema(answer, request.digest) for answer in texts]
        tokens = sum([answer.tokens for answer in texts])
        outcome = texts[0].finish_reason
        if request.stream:
            response, whole = await self._stream(job, texts)
            return response, outcome if whole else "error", tokens
        sizes = [prompt.tokens for prompt in request.prompts for _ in range(request.n)]
        await self._run([(size, answer.tokens) for size, answer in zip(sizes, texts, strict=True)], request.priority)
        finished = job.fault_kind != "broken_finish"
        said = (request.model, job.name, job.created)
        if request.endpoint == "response":
            body = response_body(request, texts[0], *said, finished=finished)
        else:
            body = replies.completion_body(request, texts, *said, finished=finished)
        return await self._answer(job, body), outcome, tokens

    async def _run(self, sizes: list[tuple[int, int]], priority: int) -> None:
        """Put sequences through the engine together; all leave it when this ends, however it ends."""
        sequences: list[Sequence] = []
        try:
            for prompt_tokens, output_tokens in sizes:
                sequences.append(self.engine.submit(prompt_tokens, output_tokens, priority))
            for sequence in sequences:
                await self.engine.wait(sequence)
        finally:
            for sequence in sequences:
                self.engine.abort(sequence)

    async def _answer(self, job: Job, body: bytes) -> web.StreamResponse:
        if job.fault_kind == "reset_mid_body":
            response = web.StreamResponse(headers={**JSON, "Content-Length": str(len(body))})
            await response.prepare(job.http)
            await response.write(body[: len(body) // 2])
            await _reset(job.http)
        if job.fault_kind == "garbage":
            body = body[: len(body) // 2] + b"\x00<oops>"
        return web.Response(body=body, headers=JSON)

    async def _stream(self, job: Job, answers: list[replies.Answer]) -> tuple[web.StreamResponse, bool]:
        """Stream the choices of an answer; also says whether it got to its end."""
        stream, finished = self._events_of(job, answers), job.fault_kind != "broken_finish"
        sequences: list[Sequence] = []
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        try:
            sizes = [prompt.tokens for prompt in job.request.prompts for _ in range(job.request.n)]
            for size, answer in zip(sizes, answers, strict=True):
                sequences.append(self.engine.submit(size, answer.tokens, job.request.priority))
            await response.prepare(job.http)
            if first := stream.first():
                await response.write(first)
            await self._stream_choices(job, stream, sequences, response, finished=finished)
            if last := stream.last(finished=finished):
                await response.write(last)
        except EngineDead:
            if not response.prepared:
                raise
            # vLLM ends a broken stream like a good one, but for the error and the missing finish reason.
            await response.write(b"data: " + orjson.dumps(DEAD.body) + b"\n\ndata: [DONE]\n\n")
            return response, False
        finally:
            for sequence in sequences:
                self.engine.abort(sequence)
        return response, True

    async def _stream_choices(
        self, job: Job, stream: Stream, sequences: list[Sequence], response: web.StreamResponse, *, finished: bool
    ) -> None:
        """Side by side, each to its end."""
        under_way = dict(enumerate(sequences))
        while under_way:
            await self.engine.progress(next(iter(under_way.values())))
            for index, sequence in list(under_way.items()):
                if self.engine.finished(sequence):
                    del under_way[index]
                    await response.write(stream.end(index, finished=finished))
                elif piece := stream.progress(index, self.engine.scheduler.generated(sequence)):
                    await response.write(piece)
                    if job.fault_kind == "reset_mid_body":
                        await _reset(job.http)

    def _events_of(self, job: Job, answers: list[replies.Answer]) -> Stream:
        said = (job.request.model, job.name, job.created)
        if job.request.endpoint == "response":
            return ResponseEvents(job.request, answers[0], *said)
        return Chunks(job.request, answers, *said)

    # Faults

    async def _before(self, job: Job) -> None:
        """Carry out what a fault does before the engine gets to work."""
        fault = job.fault
        assert fault is not None
        if fault.kind == "http_429":
            limited = ApiError(429, "Simulated rate limit.", "RateLimitError")
            limited.headers["Retry-After"] = f"{fault.number('retry_after', 1):g}"
            raise limited
        if fault.kind == "http_500":
            raise ApiError(500, "Simulated internal error.", "InternalServerError")
        if fault.kind == "http_503":
            raise ApiError(503, "Simulated overload.", "ServiceUnavailableError")
        if fault.kind == "too_long":
            raise too_long(self.voice.max_model_len)
        if fault.kind == "hang":
            await asyncio.Event().wait()
        if fault.kind in ("reset", "drop_idle"):
            await _reset(job.http)
        if fault.kind in ("crash", "engine_dead", "stall", "slow"):
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        """Carry out a fault that hits the whole engine."""
        if fault.match is None:
            self.plan.applied[fault.kind] += 1
        loop = asyncio.get_running_loop()
        if fault.kind == "crash":
            self._crash()
        elif fault.kind == "engine_dead":
            self.engine.die()
            loop.call_later(fault.number("exit_after", 3), self._exit_dead)
        else:
            factor = fault.number("factor", 10)
            self.engine.change_rate(0 if fault.kind == "stall" else self.speed / factor)
            if seconds := fault.number("seconds", 0):
                loop.call_later(seconds, self.engine.change_rate, self.speed)

    def _crash(self) -> NoReturn:
        self.log.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def _exit_dead(self) -> None:
        self.log.flush()
        os._exit(1)

    async def _set_faults(self, http: web.BaseRequest) -> web.Response:
        try:
            plan = FaultPlan(orjson.loads(await http.read()), self.plan.seed)
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error)) from error
        self.plan = plan
        self.engine.change_rate(self.speed)
        self.start()
        return _json({"faults": len(plan.faults)})

    async def _show_faults(self, http: web.BaseRequest) -> web.Response:
        rules = [
            {"kind": fault.kind, "match": fault.match, "times": fault.times, **fault.numbers}
            for fault in self.plan.faults
        ]
        return _json({"faults": rules, "applied": dict(self.plan.applied)})

    # The log

    def _receive(self, digest: str, tokens: int) -> int:
        number = self.log.receive(digest, tokens)
        self._flush_soon()
        return number

    def _finish(self, number: int, digest: str, outcome: str, prompt_tokens: int = 0, tokens: int = 0) -> None:
        self.log.finish(number, digest, outcome, prompt_tokens, tokens)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if self._flush_timer is None and self.log.unwritten:
            # Half of what is promised, so that a late timer still keeps the promise.
            self._flush_timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS / 2, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        self.log.flush()

    # Everything else

    async def _health(self, http: web.BaseRequest) -> web.Response:
        return web.Response(status=503 if self.engine.dead else 200)

    async def _version(self, http: web.BaseRequest) -> web.Response:
        return _json({"version": VERSION})

    async def _models(self, http: web.BaseRequest) -> web.Response:
        card = {
            "id": self.voice.model,
            "object": "model",
            "created": int(self.started),
            "owned_by": "simulated",
            "root": self.voice.model,
            "parent": None,
            "max_model_len": self.voice.max_model_len,
            "permission": [],
            "simulated": True,
        }
        adapters = [
            {**card, "id": name, "root": path, "parent": card["id"], "max_model_len": None}
            for name, path in self.adapters.items()
        ]
        return _json({"object": "list", "data": [card, *adapters]})

    async def _metrics(self, http: web.BaseRequest) -> web.Response:
        if not self.engine.dead:
            self.engine.catch_up()
        outcomes = self.log.outcomes
        reasons = {"stop": outcomes["stop"] + outcomes["embedding"], "length": outcomes["length"]}
        reasons |= {"abort": outcomes["aborted"], "error": outcomes["error"]}
        page = vllm_metrics.render(
            self.voice.model, self.engine.scheduler, self.engine.histograms, reasons, self.started
        )
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def _stats(self, http: web.BaseRequest) -> web.Response:
        scheduler = self.engine.scheduler
        more = {"faults": dict(self.plan.applied), "preemptions": scheduler.preemptions, "steps": scheduler.steps}
        return _json({**self.log.summary(), **more, "simulated_seconds": self.engine.clock.now()})


def _priority(http: web.BaseRequest, of_body: int) -> int:
    """The header counts more than the body, as in vLLM; one that is no number says nothing."""
    try:
        return int(http.headers.get("X-Vllm-Priority", of_body))
    except ValueError:
        return of_body


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, headers={**JSON, **(headers or {})})


async def _reset(http: web.BaseRequest) -> NoReturn:
    """Close the connection with a TCP reset and wait until the server cancels this handler for it."""
    if http.transport is not None:
        sock = http.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        http.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError("unreachable")
