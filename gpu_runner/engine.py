"""HTTP client of one OpenAI-compatible inference server (normally `vllm serve`).

One `EngineClient` per engine, used by one event loop. It sends single requests and says what came of each;
it never retries a row, with one exception that is no try: a kept-alive connection that the server had
already closed. vLLM closes idle connections after 5 s, and on a loaded machine the
client learns of it only by the reset that its next request meets.
"""

from __future__ import annotations

import asyncio
import io
import resource
import socket
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import aiohttp
import orjson
from yarl import URL

from gpu_runner import addresses, answer_numbers
from gpu_runner.bounded_read import (
    BUFFER_BYTES,
    ERROR_BYTES,
    PAGE_BYTES,
    Admit,
    BodyTooLarge,
    UnaskedEncoding,
    answer_limit,
    check_values,
    read_beginning,
    read_body,
)
from gpu_runner.rows import Generation
from gpu_runner.wire import (
    PATHS,
    Completion,
    EngineError,
    EngineLoad,
    EngineLost,
    EngineRefused,
    MalformedMetrics,
    Repair,
    RequestDenied,
    Requests,
    RowRejected,
    Transient,
    error_of,
    parse_metrics,
    read_answer,
)

__all__ = [
    "Completion",
    "EngineClient",
    "EngineError",
    "EngineInfo",
    "EngineLoad",
    "EngineLost",
    "EngineRefused",
    "Repair",
    "RequestDenied",
    "RowRejected",
    "TimeOuts",
    "Transient",
]

# Below the 5 s after which uvicorn closes an idle connection, so that we mostly close first.
KEEP_ALIVE_SECONDS = 4.0
# A close in idleness meets a request within a moment of sending; a later reset broke a request at work.
IDLE_CLOSE_SECONDS = 5.0
# aiohttp warns from 1 MiB on that writing a body at once may block the loop; prompts of that size are rare.
LARGE_BODY = 1 << 20


@dataclass(frozen=True, slots=True)
class TimeOuts:
    """Seconds. `connect`: a listening server accepts within milliseconds, a full backlog retries the SYN after
    1, 3 and 7 s. `request`: a row may wait behind three times the engine's slots and then write thousands of
    tokens, so the limit only catches rows that never end. `info`: small pages, but a busy API server has been
    seen to stall for 5 s.
    """

    connect: float = 10.0
    request: float = 1800.0
    info: float = 10.0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What serves us. `version` is empty when the server does not tell; `simulated` is its own word."""

    model: str
    version: str
    max_model_len: int | None
    simulated: bool


class EngineClient:
    """One engine. Async context manager; `generate` may be called from any number of tasks at once.

    `endpoint` is the server's address with or without the trailing `/v1`. `answer_bytes` is what the answer to one row
    may have at most; without it as much as `sampling` asks for (bounded_read.py).
    """

    def __init__(
        self,
        endpoint: str,
        generation: Generation,
        *,
        api_key: str | None = None,
        time_outs: TimeOuts = TimeOuts(),
        answer_bytes: int | None = None,
    ) -> None:
        base = URL(endpoint.rstrip("/"))
        if base.scheme not in ("http", "https") or not base.host:
            raise ValueError("expected an engine endpoint like http://host:8000 or https://host/v1")
        api = base if base.name == "v1" else base / "v1"
        self.generation = generation
        self._requests = Requests(generation)
        self._root = api.parent
        self._api = api
        self._generate_url = self._address(api, PATHS[generation.task])
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._time_outs = time_outs
        self._answer_bytes = answer_bytes
        self._limit = answer_bytes or answer_limit(generation)
        self._has_metrics = True
        self._session: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        allow_open_files()
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(_note_new_connection)
        self._session = self._open(
            aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, ttl_dns_cache=300, socket_factory=_watched_socket
            ),
            [trace],
        )
        self._fresh = self._open(aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_watched_socket), [])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections; requests still under way end with an error."""
        sessions = [s for s in (self._session, self._fresh) if s is not None]
        self._session = self._fresh = None
        for session in sessions:
            await session.close()

    def _open(self, connector: aiohttp.TCPConnector, traces: list[aiohttp.TraceConfig]) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            skip_auto_headers=("User-Agent",),
            auto_decompress=False,
            read_bufsize=BUFFER_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=self._time_outs.request, sock_connect=self._time_outs.connect),
            trace_configs=traces,
        )

    async def generate(self, prompt: bytes, *, repair: Repair | None = None, admit: Admit | None = None) -> Completion:
        """Asks for one row. Raises RowRejected, Transient or RequestDenied.

        `admit` is awaited with a number of bytes before an answer of that size is read.
        """
        return await self._ask(self._requests.body(prompt, repair), admit)

    async def canary(self) -> None:
        """Has the engine generate one token: proof that it works. Raises like `generate`."""
        await self._ask(self._requests.canary(), None)

    async def _ask(self, body: bytes, admit: Admit | None) -> Completion:
        if self._session is None or self._fresh is None:
            raise RuntimeError("EngineClient is not open: use `async with`")
        loop = asyncio.get_running_loop()
        started = loop.time()
        context = _Sending()
        try:
            return await self._post(self._session, body, context, admit)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if context.new_connection or loop.time() - started > IDLE_CLOSE_SECONDS or _never_connected(error):
                raise _failure(error) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failure(error) from error
        try:
            return await self._post(self._fresh, body, context, admit)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failure(error) from error

    async def _post(
        self, session: aiohttp.ClientSession, body: bytes, context: _Sending, admit: Admit | None
    ) -> Completion:
        data = body if len(body) < LARGE_BODY else io.BytesIO(body)
        async with session.post(
            self._generate_url, data=data, allow_redirects=False, trace_request_ctx=context
        ) as answer:
            try:
                found = await self._body_of(answer, self._limit, admit)
                if len(found) > PAGE_BYTES:
                    check_values(found, self._limit)
            except (BodyTooLarge, ValueError) as error:
                raise RowRejected(
                    "answer_too_large", f"expected at most {self._limit:,} bytes, found {error}"
                ) from error
            except UnaskedEncoding as error:
                raise RequestDenied("content_encoding", _encoded(error)) from error
            return read_answer(self.generation.task, answer.status, answer.headers, found)

    @staticmethod
    async def _body_of(answer: aiohttp.ClientResponse, limit: int, admit: Admit | None = None) -> bytes:
        """The body of an answer, or the beginning of an error's."""
        if answer.status == 200:
            return await read_body(answer, limit, admit)
        return await read_beginning(answer, ERROR_BYTES)

    async def info(self) -> EngineInfo:
        """Asks who serves here. Raises EngineRefused when the wanted model is not served, EngineLost when
        nothing answers or the server is not ready.
        """
        wanted = self.generation.model
        try:
            body = await self._page(self._address(self._api, "models"))
            version = await self._version()
            check_values(body, PAGE_BYTES)
            models = {name: entry for entry in orjson.loads(body)["data"] if (name := _name(entry))}
        except Transient as error:
            raise EngineLost("not_ready", error.code) from error
        except (ValueError, LookupError, TypeError, RowRejected) as error:
            raise EngineRefused("expected a list of models at /v1/models, found something else") from error
        if wanted not in models:
            found = ", ".join(name[:80] for name in sorted(models)[:5]) or "none"
            raise EngineRefused(
                f"expected model {wanted}, found {found}: start the engine with this model or correct the dataset's"
            )
        entry = models[wanted]
        longest = answer_numbers.context_length(entry.get("max_model_len"))
        self._limit = self._answer_bytes or answer_limit(self.generation, longest)
        owner = answer_numbers.short_name(entry.get("owned_by"))
        simulated = "simulat" in f"{version} {owner}".lower() or entry.get("simulated") is True
        return EngineInfo(wanted, version, longest, simulated)

    async def _version(self) -> str:
        try:
            answer = orjson.loads(await self._page(self._address(self._root, "version")))
        except (EngineRefused, RowRejected, orjson.JSONDecodeError):
            return ""
        return answer_numbers.short_name(answer.get("version")) if isinstance(answer, dict) else ""

    async def load(self) -> EngineLoad | None:
        """The engine's load from /metrics; None for ever when the server has no vLLM metrics.

        Raises Transient or EngineLost when the page cannot be had now, or is malformed.
        """
        if not self._has_metrics:
            return None
        try:
            load = parse_metrics(await self._page(self._address(self._root, "metrics")))
        except (EngineRefused, RowRejected):
            load = None
        except MalformedMetrics as error:
            raise Transient("garbage_body", "a page of metrics with figures that cannot be") from error
        self._has_metrics = load is not None
        return load

    async def healthy(self) -> bool:
        """Whether the server answers /health without a server error. It says nothing about progress."""
        try:
            await self._page(self._address(self._root, "health"))
        except (EngineRefused, RowRejected):
            return True  # a server without this page: it answers
        except (Transient, EngineLost):
            return False
        return True

    @staticmethod
    def _address(base: URL, page: str) -> URL:
        return URL(f"{base}".rstrip("/") + f"/{page}", encoded=True)

    async def _page(self, url: URL) -> bytes:
        if self._session is None:
            raise RuntimeError("EngineClient is not open: use `async with`")
        limit = aiohttp.ClientTimeout(total=self._time_outs.info)
        try:
            async with self._session.get(
                url, allow_redirects=False, timeout=limit, trace_request_ctx=_Sending()
            ) as answer:
                body = await self._body_of(answer, PAGE_BYTES)
                if answer.status != 200:
                    raise error_of(answer.status, answer.headers, body)
                return body
        except (BodyTooLarge, UnaskedEncoding) as error:
            raise RowRejected("garbage_body", str(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = _failure(error)
            if isinstance(failure, Transient) and not failure.taken:
                raise EngineLost("unreachable", failure.code) from error
            raise failure from error


def _name(entry: Any) -> str:
    """The name of a line of /v1/models; empty when it has none that can be one."""
    return answer_numbers.short_name(entry.get("id")) if isinstance(entry, dict) else ""


def _encoded(error: UnaskedEncoding) -> str:
    return (
        f"expected answers without Content-Encoding, as asked for, found {error}: have the engine, or the proxy before "
        "it, send them as they are"
    )


def _watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose kernel asks after 10 s of silence whether the peer is there, and gives up after 25 s.

    A request waits for minutes without a byte; middleboxes drop such connections without telling anybody.
    """
    family, kind, protocol, _, resolved = address
    addresses.refuse(
        str(resolved[0])
    )  # here, where it is connected to: a name may lead elsewhere each time it is asked
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


class _Sending:
    """What became known while a request was sent."""

    __slots__ = ("new_connection",)

    def __init__(self) -> None:
        self.new_connection = False


async def _note_new_connection(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceConnectionCreateEndParams
) -> None:
    context.trace_request_ctx.new_connection = True


def _never_connected(error: BaseException) -> bool:
    return isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def _failure(error: BaseException) -> EngineError:
    """The error of ours for a failure below HTTP. Its text names the kind only: addresses may be secret."""
    if refused := addresses.refused(error):
        return EngineRefused(str(refused))
    if isinstance(error, aiohttp.ClientSSLError):
        return EngineRefused("expected a valid TLS certificate, found one that fails verification: check the address")
    if _never_connected(error):
        return Transient("connect_failed", type(error).__name__, taken=False)
    if isinstance(error, TimeoutError):
        return Transient("timeout", "no answer within the time-out")
    if isinstance(error, aiohttp.InvalidURL):
        return EngineRefused("expected a valid engine endpoint: check the address")
    return Transient("connection_lost", type(error).__name__)


def allow_open_files(wanted: int = 65_536) -> int:
    """Raises this process's soft limit of open files as far as allowed (one connection per row in flight).

    Returns the limit in force.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return wanted if soft == resource.RLIM_INFINITY else soft
