"""The calls of OpenAI's Batch API: upload, create, look, find, cancel, download, delete. Bounded in bytes and time.

Every call raises what a request of a row raises: Transient, RequestDenied, RowRejected, EngineRefused. Messages are the
provider's words. `download` raises EngineLost where this computer cannot keep what comes.

Source: https://platform.openai.com/docs/api-reference/batch and .../files.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import orjson
from yarl import URL

from gpu_runner.bounded_http.bounded_read import (
    BUFFER_BYTES,
    ERROR_BYTES,
    PAGE_BYTES,
    READ_BYTES,
    BodyTooLarge,
    UnaskedEncoding,
    encoding_of,
    read_beginning,
    read_body,
)
from gpu_runner.bounded_http.tls_files import TlsFiles, ssl_of
from gpu_runner.client.engine_connections import failure_below_http, watched_socket
from gpu_runner.client.protocol import EngineLost, RequestDenied, Transient, error_code, error_of
from gpu_runner.client.server_sentence import server_sentence

T = TypeVar("T")

KEY = "batch_assets_key"  # in a batch's metadata
PAGES, PAGE = 100, 100  # of a list that is looked through
SKEW_SECONDS = 2 * 86_400.0  # between our clock and a provider's, at most
CALL_SECONDS, FILE_SECONDS, SILENT_SECONDS = 30.0, 3600.0, 60.0
ID_LETTERS = 2048  # gateways put what they know of a file into its id
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
# OpenAI's and Azure's, where too many tokens or requests of an account wait in batches already.
QUEUE_FULL = frozenset({"token_limit_exceeded", "request_limit_exceeded"})
NO_LIST = frozenset({404, 405})
UNREAD = frozenset({"pending", "notrunning", "running", "processing"})  # Azure's, of a file that no batch may have yet


class QueueFull(Transient):
    """A batch is not created, as the account's queue takes no more. `message`: the provider's words."""


@dataclass(frozen=True, slots=True)
class InputError:
    """Why an input file is refused. `line`: of the file, from 1; 0: none is named."""

    code: str
    message: str
    line: int


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch as its provider describes it. `status`: in OpenAI's letters. `completed`, `failed`: lines that were
    answered, and that were not, where it says.
    """

    batch_id: str
    status: str
    output_file_id: str = ""
    error_file_id: str = ""
    errors: tuple[InputError, ...] = ()
    completed: int = 0
    failed: int = 0

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.status in ENDED

    @property
    def lacks_output(self) -> bool:
        """Whether it has answers, and does not say yet in which file."""
        return self.completed > 0 and not self.output_file_id

    @property
    def code(self) -> str:
        """Of the first of its errors; "" without one."""
        return self.errors[0].code if self.errors else ""

    @property
    def lines(self) -> int:
        """How many lines its files have at least."""
        return self.completed + (self.failed if self.status == "completed" and self.error_file_id else 0)

    @classmethod
    def read(cls, found: Any) -> BatchState:
        """From a batch object, or from the `job` that some providers answer with. Raises Transient for what is none."""
        if isinstance(found, dict) and isinstance(found.get("job"), dict):
            found = found["job"]
        if not isinstance(found, dict) or not _word(found, "id") or not _word(found, "status"):
            raise Transient("garbage_body", "expected a batch object", status=200)
        errors = found.get("errors")
        listed = errors.get("data") if isinstance(errors, dict) else None
        files = _word(found, "output_file_id"), _word(found, "error_file_id")
        status = _word(found, "status").lower()  # some write COMPLETED
        return cls(
            _word(found, "id"),
            "cancelled" if status == "canceled" else status,
            *files,
            tuple(map(_input_error, listed)) if isinstance(listed, list) else (),
            *(_count(found.get("request_counts"), name) for name in ("completed", "failed")),
        )


class BatchCalls:
    """One provider. `api`: its address with `/v1`. To be closed."""

    def __init__(self, api: URL, api_key: str | None, tls: TlsFiles | None, connect_seconds: float) -> None:
        self._api, self._tls, self._api_key = api, tls, (api_key or "").encode()
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=8, socket_factory=watched_socket),
            headers=headers,
            skip_auto_headers=("User-Agent",),
            auto_decompress=False,
            read_bufsize=BUFFER_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=CALL_SECONDS, sock_connect=connect_seconds),
        )

    async def close(self) -> None:
        """End all calls."""
        await self._session.close()

    async def upload(self, file: Path, name: str) -> tuple[str, bool]:
        """(The id of a new input file, whether a batch may have it already)."""
        with file.open("rb") as body:
            form = aiohttp.FormData()
            form.add_field("purpose", "batch")
            form.add_field("file", body, filename=name, content_type="application/jsonl")
            found = await self._json("POST", "files", data=form, seconds=FILE_SECONDS)
        if not (file_id := _word(found, "id")):
            raise Transient("garbage_body", "expected a file object", status=200)
        return file_id, _word(found, "status").lower() not in UNREAD

    async def is_read(self, file_id: str) -> bool:
        """Whether a batch may have the input file."""
        found = await self._json("GET", f"files/{_escaped(file_id)}")
        return _word(found, "status").lower() not in UNREAD

    async def delete(self, file_id: str) -> None:
        """The account has the file no longer."""
        await self._json("DELETE", f"files/{_escaped(file_id)}")

    async def create(self, file_id: str, path: str, window: str, metadata: Mapping[str, str]) -> BatchState:
        """A new batch of the file. Some providers make no second one of the same key. Raises QueueFull, too."""
        asked = {"input_file_id": file_id, "endpoint": path, "completion_window": window, "metadata": dict(metadata)}
        again = {"Idempotency-Key": metadata[KEY]} if KEY in metadata else {}
        return BatchState.read(await self._json("POST", "batches", json=asked, headers=again, queued=True))

    async def look(self, batch_id: str) -> BatchState:
        """The batch as it is now."""
        return BatchState.read(await self._json("GET", f"batches/{_escaped(batch_id)}"))

    async def cancel(self, batch_id: str) -> None:
        """No further row of it is begun; what is finished is kept."""
        await self._json("POST", f"batches/{_escaped(batch_id)}/cancel")

    async def find(self, key: str, file_id: str, since: float) -> BatchState | None:
        """The batch with this key in its metadata, or of this input file, as not every provider keeps metadata.
        `since`: no batch of before (Unix seconds) is meant.
        """
        async for page in self._pages("batches"):
            for one in page:
                metadata = one.get("metadata") if isinstance(one, dict) else None
                same = isinstance(metadata, dict) and metadata.get(KEY) == key
                if same or (file_id and _word(one, "input_file_id") == file_id):
                    return BatchState.read(one)
            if _all_before(page, since - SKEW_SECONDS):
                return None
        return None

    async def files_named(self, name: str, since: float) -> list[str]:
        """Ids of the input files of this name. `since`: as for `find`."""
        found = []
        async for page in self._pages("files", "&purpose=batch"):
            found += [_word(one, "id") for one in page if _word(one, "filename") == name]
            if _all_before(page, since - SKEW_SECONDS):
                break
        return [one for one in found if one]

    async def _pages(self, what: str, query: str = "") -> AsyncIterator[list[Any]]:
        """Of a list, mostly the newest first; so many of them at most."""
        after = ""
        for _ in range(PAGES):
            more = f"&after={_escaped(after)}" if after else ""
            page = await self._json("GET", f"{what}?limit={PAGE}{query}{more}")
            page = {"data": page} if isinstance(page, list) else page  # some answer with the list itself
            listed = page.get("data") if isinstance(page, dict) else None
            if not isinstance(listed, list):
                raise Transient("garbage_body", f"expected a list of {what}", status=200)
            yield listed
            before, after = after, _word(listed[-1], "id") if listed else ""
            if after in ("", before) or page.get("has_more") is not True:
                return

    async def answers(self) -> None:
        """Raises unless the API answers, with this key; one that lists no batches shows the second later."""
        try:
            await self._json("GET", "batches?limit=1")
        except RequestDenied as error:
            if error.status not in NO_LIST:
                raise

    async def download(self, file_id: str, into: Path, most: int) -> bool:
        """What a file holds, but no more than `most` bytes. Returns whether that is all of it."""
        path = f"files/{_escaped(file_id)}/content"
        limit = aiohttp.ClientTimeout(total=FILE_SECONDS, sock_read=SILENT_SECONDS)
        taken = 0
        try:
            async with self._asked("GET", path, timeout=limit) as answer:
                if encoding := encoding_of(answer):
                    answer.close()
                    raise UnaskedEncoding(encoding)
                with _kept(into.open, "wb") as file:
                    async for part in answer.content.iter_chunked(READ_BYTES):
                        _kept(file.write, part[: most - taken])
                        taken += len(part)
                        if taken > most:
                            answer.close()
                            return False
                    _kept(file.flush)
        except UnaskedEncoding as error:
            raise Transient("garbage_body", str(error), status=200) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise failure_below_http(error) from error
        return True

    async def _json(self, method: str, path: str, *, seconds: float = CALL_SECONDS, **more: Any) -> Any:
        try:
            async with self._asked(method, path, timeout=aiohttp.ClientTimeout(total=seconds), **more) as answer:
                found = await read_body(answer, PAGE_BYTES)
        except (BodyTooLarge, UnaskedEncoding) as error:
            raise Transient("garbage_body", str(error), status=200) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise failure_below_http(error) from error
        try:
            return orjson.loads(found)
        except orjson.JSONDecodeError as error:
            raise Transient("garbage_body", "expected JSON", status=200) from error

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, *, queued: bool = False, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """`queued`: a refusal may mean that the account's queue is full."""
        url = URL(f"{self._api}".rstrip("/") + f"/{path}", encoded=True)
        async with self._session.request(method, url, allow_redirects=False, ssl=ssl_of(self._tls), **more) as answer:
            if not 200 <= answer.status < 300:
                said = await read_beginning(answer, ERROR_BYTES)
                said = said.replace(self._api_key, b"[API key]") if self._api_key else said
                error = error_of(answer.status, answer.headers, said)
                if queued and answer.status < 500 and error_code(said) in QUEUE_FULL:
                    raise QueueFull("queue_full", getattr(error, "message", ""), taken=False, status=answer.status)
                raise error
            yield answer


def _kept(call: Callable[..., T], *given: Any) -> T:
    """The call of a local file. Raises EngineLost: a full disk is no failure of the network."""
    try:
        return call(*given)
    except OSError as error:
        why = f"the batch's files cannot be kept: {error.strerror or type(error).__name__}"
        raise EngineLost("not_ready", why) from error


def _escaped(word: str) -> str:
    """As one part of a path: what a provider calls something is outside data."""
    return quote(word, safe="").replace(".", "%2E")


def _word(found: Any, key: str) -> str:
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, str) and 0 < len(value) <= ID_LETTERS and value.isprintable() else ""


def _input_error(error: Any) -> InputError:
    said = error.get("message") if isinstance(error, dict) else None
    message = server_sentence(said if isinstance(said, str) else "")
    return InputError(_word(error, "code"), message, _count(error, "line"))


def _count(counts: Any, name: str) -> int:
    found = counts.get(name) if isinstance(counts, dict) else None
    return found if type(found) is int and found > 0 else 0


def _all_before(page: list[Any], moment: float) -> bool:
    """Whether the list is sorted with the newest first, and this page and all after it are of before the moment."""
    made = [one.get("created_at") if isinstance(one, dict) else None for one in page]
    times = [at for at in made if isinstance(at, int | float)]
    return len(times) == len(page) > 1 and times[0] < moment and times == sorted(times, reverse=True)
