"""HTTP client of one OpenAI-compatible inference server (normally `vllm serve`).

One `EngineClient` per engine, used by one event loop. It sends single requests and says what came of each;
it never retries a row, with one exception that is no try: a connection that the server had already closed
because it was idle (request_progress.py). vLLM and llama.cpp do that after 5 s, and on a loaded machine the
client learns of it only by the reset that its next request meets.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import aiohttp
import orjson
from yarl import URL

from gpu_runner.bounded_http.bounded_read import (
    BUFFER_BYTES,
    ERROR_BYTES,
    PAGE_BYTES,
    Admit,
    BodyTooLarge,
    UnaskedEncoding,
    check_values,
    read_beginning,
    read_body,
)
from gpu_runner.bounded_http.tls_files import TlsFiles, ssl_of
from gpu_runner.client.answers import answer_numbers
from gpu_runner.client.answers.answer_limit import answer_limit, list_limit
from gpu_runner.client.engine_connections import (
    KEEP_ALIVE_SECONDS,
    allow_open_files,
    failure_below_http,
    never_connected,
    watched_socket,
)
from gpu_runner.client.engine_info import EngineInfo, model_entry, not_a_list
from gpu_runner.client.engine_load import EngineLoad, MalformedMetrics, parse_metrics
from gpu_runner.client.input_lists import read_outputs
from gpu_runner.client.llama_cpp import SILENT_CONNECTIONS, LlamaCppCard, llama_cpp_generation
from gpu_runner.client.protocol import (
    NOT_BELOW_V1,
    PATHS,
    Completion,
    EngineError,
    EngineLost,
    EngineRefused,
    Repair,
    RequestDenied,
    Requests,
    RowRejected,
    Transient,
    error_of,
    read_answer,
)
from gpu_runner.client.reasoning_tags import without_reasoning
from gpu_runner.client.request_progress import RequestProgress, request_trace
from gpu_runner.client.server_sentence import server_sentence
from gpu_runner.client.structured_outputs import server_problem, sglang_generation
from gpu_runner.client.trace_context import trace_headers
from gpu_runner.reachability import Reachability, always_open
from gpu_runner.rows import POOLED, Generation

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

T = TypeVar("T")
# Reads an HTTP answer, with leave for a large one.
ReadAnswer = Callable[[aiohttp.ClientResponse, Admit | None], Awaitable[T]]

# aiohttp warns from 1 MiB on that writing a body at once may block the loop; prompts of that size are rare.
LARGE_BODY = 1 << 20
# Of vLLM (entrypoints/generate/base/serving.py, 0.32; not in 0.26, vllm#51089). It counts more than `priority` in the
# body, which vLLM has had for longer but other servers may refuse. Without priority scheduling vLLM ignores both.
PRIORITY_HEADER = "X-Vllm-Priority"
BATCH_PRIORITY = 100


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


class EngineClient:
    """One engine. Async context manager; `generate` may be called from any number of tasks at once.

    `endpoint` is the server's address with or without the trailing `/v1`. `answer_bytes` is what the answer to one row
    may have at most; without it as much as `sampling` asks for (bounded_read.py). `reachability`: of the way to it.
    `priority` of all requests, for engines with priority scheduling: the lowest number comes first, without one a
    request has 0. vLLM before it read the header gets it in the body, once `info` has found that it is vLLM.
    `tls`: certificates of ours and of authorities; None: those of the system. Raises TlsFilesError.
    """

    def __init__(
        self,
        endpoint: str,
        generation: Generation,
        *,
        api_key: str | None = None,
        time_outs: TimeOuts = TimeOuts(),
        answer_bytes: int | None = None,
        reachability: Callable[[], Reachability] = always_open,
        priority: int | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        base = URL(endpoint.rstrip("/"))
        if base.scheme not in ("http", "https") or not base.host:
            raise ValueError("expected an engine endpoint like http://host:8000 or https://host/v1")
        api = base if base.name == "v1" else base / "v1"
        self.generation = generation
        self.reachability = reachability
        self._requests = Requests(generation)
        self._of_user, self._user_requests = generation.of_user, self._requests
        if self._of_user is not None:
            self._user_requests = Requests(self._of_user)
        self._root = api.parent
        self._api = api
        above = api.parent if generation.task in NOT_BELOW_V1 else api
        self._generate_url = self._address(above, PATHS[generation.task])
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._api_key = (api_key or "").encode()
        if priority is not None:
            self._headers[PRIORITY_HEADER] = str(priority)
        ssl_of(tls)  # raises for files that cannot be used, before anything is asked
        self._tls = tls
        self._priority = priority
        self._body_end = b"}"
        self._time_outs = time_outs
        self._answer_bytes = answer_bytes
        self._limit = answer_bytes or answer_limit(generation)
        self._context: int | None = None
        self._has_metrics = True
        self._silent_connections: asyncio.Semaphore | None = None
        self._session: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        allow_open_files()
        self._session = self._open(
            aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, ttl_dns_cache=300, socket_factory=watched_socket
            )
        )
        self._fresh = self._open(aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=watched_socket))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections, also when it is canceled meanwhile; requests still under way end with an error."""
        sessions = [s for s in (self._session, self._fresh) if s is not None]
        self._session = self._fresh = None
        async with contextlib.AsyncExitStack() as closing:
            for session in sessions:
                closing.push_async_callback(session.close)

    def _open(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            skip_auto_headers=("User-Agent",),
            auto_decompress=False,
            read_bufsize=BUFFER_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=self._time_outs.request, sock_connect=self._time_outs.connect),
            trace_configs=[request_trace()],
        )

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
        """Asks for one row. Raises RowRejected, Transient or RequestDenied.

        `admit` is awaited with a number of bytes before an answer of that size is read. `fields`: request fields of
        the row's own, a JSON object; `max_tokens` goes before them, and no more than the engine's context is asked
        for, where that is known. `free`: the answer need not have the form that outputs have. `user`: it is what the
        user says next, asked for as the generation's `user_model` says.
        """
        if user and self._of_user is not None:
            limit = self._answer_bytes or answer_limit(self._of_user, self._context)
            return await self._ask(self._user_requests.body(prompt), admit, partial(self._completion_within, limit))
        if max_tokens is not None and self._context is not None:
            max_tokens = min(max_tokens, self._context - 1)
        body = self._requests.body(prompt, repair, fields, max_tokens, free=free)
        if not fields:
            return await self._ask(body, admit, self._completion)
        limit = self._answer_bytes or answer_limit(self._requests.with_fields(fields), self._context)
        return await self._ask(body, admit, partial(self._completion_within, limit))

    @property
    def takes_lists(self) -> bool:
        """Whether `generate_list` may be called: several texts may be embedded, or scored, by one request."""
        return self.generation.task in POOLED - {"rerank"}

    def list_kind(self, prompt: bytes) -> object:
        """Prompts of one kind may go in one list: here all of them."""
        return self.generation.task

    async def generate_list(self, prompts: Sequence[bytes], *, admit: Admit | None = None) -> list[Completion]:
        """Asks for the outputs of several texts by one request. Raises like `generate`: for all of them."""
        weights = [len(prompt) for prompt in prompts]
        limit = list_limit(self._limit, len(prompts))

        async def read(answer: aiohttp.ClientResponse, admit: Admit | None) -> list[Completion]:
            body = await self._checked(answer, limit, admit)
            return read_outputs(self.generation.task, answer.status, answer.headers, body, weights)

        return await self._ask(self._requests.body_of_list(prompts), admit, read)

    async def canary(self, prompt: bytes | None = None) -> None:
        """Has the engine generate one token, to a row's prompt if there is one: proof that it works. Raises like
        `generate`.
        """
        await self._ask(self._requests.canary(prompt), None, self._completion)

    async def probe(self, prompt: bytes, *, content: bool, fields: bytes = b"") -> None:
        """Asks for a row's prompt with all settings of a row, or for short texts in its place. Raises like `generate`.

        What is refused for its settings is refused at once: the answer itself need not be waited for.
        """
        await self._ask(self._requests.probe(prompt, content=content, fields=fields), None, self._completion)

    async def _ask(self, body: bytes, admit: Admit | None, read: ReadAnswer[T]) -> T:
        if self._session is None or self._fresh is None:
            raise RuntimeError("EngineClient is not open: use `async with`")
        progress = RequestProgress(self._silent_connections)
        if self._body_end != b"}":
            body = body.removesuffix(b"}") + self._body_end
        try:
            return await self._post(self._session, body, progress, admit, read)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if never_connected(error) or not progress.closed_in_idleness(asyncio.get_running_loop().time()):
                raise failure_below_http(error) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise failure_below_http(error) from error
        try:
            return await self._post(self._fresh, body, RequestProgress(self._silent_connections), admit, read)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise failure_below_http(error) from error

    async def _post(
        self,
        session: aiohttp.ClientSession,
        body: bytes,
        progress: RequestProgress,
        admit: Admit | None,
        read: ReadAnswer[T],
    ) -> T:
        data = body if len(body) < LARGE_BODY else io.BytesIO(body)
        with progress:
            async with session.post(
                self._generate_url,
                data=data,
                headers=trace_headers(),
                allow_redirects=False,
                trace_request_ctx=progress,
                ssl=ssl_of(self._tls),
            ) as answer:
                return await read(answer, admit)

    async def _completion(self, answer: aiohttp.ClientResponse, admit: Admit | None) -> Completion:
        return await self._completion_within(self._limit, answer, admit)

    async def _completion_within(self, limit: int, answer: aiohttp.ClientResponse, admit: Admit | None) -> Completion:
        found = await self._checked(answer, limit, admit)
        completion = read_answer(self.generation.task, answer.status, answer.headers, found)
        rule = self.generation.reasoning_tags
        return completion if rule is None else without_reasoning(completion, rule)

    async def _checked(self, answer: aiohttp.ClientResponse, limit: int, admit: Admit | None) -> bytes:
        """The body of an answer, not more than `limit` bytes, not more values than those can be."""
        try:
            found = await self._body_of(answer, limit, admit)
            if len(found) > PAGE_BYTES:
                check_values(found, limit)
        except (BodyTooLarge, ValueError) as error:
            raise RowRejected("answer_too_large", f"expected at most {limit:,} bytes, found {error}") from error
        except UnaskedEncoding as error:
            raise RequestDenied("content_encoding", _encoded(error)) from error
        return found

    async def _body_of(self, answer: aiohttp.ClientResponse, limit: int, admit: Admit | None = None) -> bytes:
        """The body of an answer, or the beginning of an error's, without our key: its words are shown."""
        if answer.status == 200:
            return await read_body(answer, limit, admit)
        found = await read_beginning(answer, ERROR_BYTES)
        return found.replace(self._api_key, b"[API key]") if self._api_key else found

    async def info(self) -> EngineInfo:
        """Asks who serves here. Raises EngineRefused when the wanted model is not served, EngineLost when
        nothing answers or the server is not ready.
        """
        wanted = self.generation.asked_model
        try:
            page = await self._page(self._address(self._api, "models"))
            version = await self._version()
        except Transient as error:
            words = server_sentence(error.message)
            detail = f"{error.code}: {words}" if words else error.code
            raise EngineLost("not_ready", detail, status=error.status) from error
        except RowRejected as error:
            raise not_a_list() from error
        entry = model_entry(page, wanted)
        if self._of_user is not None:
            model_entry(page, self._of_user.asked_model)
        longest = answer_numbers.context_length(entry.get("max_model_len"))
        owner = answer_numbers.short_name(entry.get("owned_by"))
        simulated = "simulat" in f"{version} {owner}".lower() or entry.get("simulated") is True
        if simulated and self.generation.task in POOLED - {"embedding"}:
            raise EngineRefused(
                f"task {self.generation.task}: expected vLLM with a model that pools, found an engine simulator, which "
                "only writes and embeds. Use an engine of fleet.yaml"
            )
        if card := LlamaCppCard.read(entry):
            longest, version = card.context, card.version
            self._speak_llama_cpp(longest)
        elif owner == "sglang":
            self._requests = Requests(self.generation, sglang_generation)
        elif problem := server_problem(self.generation, owner):
            raise EngineRefused(problem)
        self._context = longest
        self._limit = self._answer_bytes or answer_limit(self.generation, longest)
        if owner == "vllm" and self._priority is not None:
            self._body_end = b',"priority":%d}' % self._priority
        return EngineInfo(wanted, version, longest, simulated)

    def _speak_llama_cpp(self, context: int | None) -> None:
        """From now on requests have llama.cpp's names, and few connections are opened at once.

        Raises EngineRefused for what it cannot do.
        """
        self._silent_connections = asyncio.Semaphore(SILENT_CONNECTIONS)
        try:
            dialect = partial(llama_cpp_generation, context=context)
            self._requests = Requests(self.generation, dialect)
            self._user_requests = self._requests if self._of_user is None else Requests(self._of_user, dialect)
        except ValueError as error:
            raise EngineRefused(
                f"sampling: expected request fields that llama.cpp has, found {error}. Leave them out of the dataset, "
                "or use another engine"
            ) from None

    async def _version(self) -> str:
        try:
            answer = orjson.loads(await self._page(self._address(self._root, "version")))
        except (EngineRefused, RowRejected, orjson.JSONDecodeError):
            return ""
        return answer_numbers.short_name(answer.get("version")) if isinstance(answer, dict) else ""

    async def load(self) -> EngineLoad | None:
        """The engine's load from /metrics; None for ever when the server has neither vLLM's metrics nor llama.cpp's.

        Raises Transient or EngineLost when the page cannot be had now, or is malformed.
        """
        if not self._has_metrics:
            return None
        try:
            load = parse_metrics(*await self._fetch(self._address(self._root, "metrics")))
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
        return (await self._fetch(url))[0]

    async def _fetch(self, url: URL) -> tuple[bytes, Mapping[str, str]]:
        """Body and headers of a small page. Raises as `_ask`."""
        if self._session is None:
            raise RuntimeError("EngineClient is not open: use `async with`")
        limit = aiohttp.ClientTimeout(total=self._time_outs.info)
        try:
            async with self._session.get(
                url, allow_redirects=False, timeout=limit, trace_request_ctx=RequestProgress(), ssl=ssl_of(self._tls)
            ) as answer:
                body = await self._body_of(answer, PAGE_BYTES)
                if answer.status != 200:
                    raise error_of(answer.status, answer.headers, body)
                return body, answer.headers
        except (BodyTooLarge, UnaskedEncoding) as error:
            raise RowRejected("garbage_body", str(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = failure_below_http(error)
            if isinstance(failure, Transient) and not failure.taken:
                raise EngineLost("unreachable", failure.code) from error
            raise failure from error


def _encoded(error: UnaskedEncoding) -> str:
    return (
        f"expected answers without Content-Encoding, as asked for, found {error}: have the engine, or the proxy before "
        "it, send them as they are"
    )
