"""Files of a dataset repository of the Hugging Face hub, as one commit has them.

A branch or a tag is looked up once; everything is read of the commit that it was then. Files are read in ranges, so
that of Parquet only the wanted columns are fetched, and nothing is copied to the disk. Each answer is bounded in bytes
and in time; what may pass by itself is asked again some times.

Protocol: https://huggingface.co/docs/hub/api (`/api/datasets/…/revision/…`, `/tree/…`, `/resolve/…`); what an error
means is in its headers `X-Error-Code` and `X-Error-Message`.
"""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from batch_assets.snapshot.source.errors import SourceError
from resources.objects.hub_client import TOKEN, TRANSIENT, HubAddress, Passing, hub_address, hub_api, tried_again
from resources.objects.object_interface import StoreError
from resources.objects.ranged_file import RangedFile

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LONGEST_WAIT = 60.0
SILENT_SECONDS, ANSWER_SECONDS = 30.0, 300.0  # without a byte; of an answer as a whole
MOST_FILES, MOST_LISTING_BYTES = 1_000_000, 64 << 20  # of a repository; of one page of its listing
LARGEST_READ, LARGEST_WHOLE = 8 << 20, 16 << 20  # of a file; a server without ranges gives whole ones
_COMMIT = re.compile(r"[0-9a-f]{40}")


def pinned(path: str) -> str:
    """The path with the commit that its revision is now; a path that is not on the hub as it is. Raises SourceError."""
    address = _address(path)
    return path if address is None else str(replace(address, revision=HubCommit.of(address).commit))


def is_commit(path: str) -> bool:
    """Whether a path names files of a commit, which never change."""
    address = _address(path)
    return address is not None and _COMMIT.fullmatch(address.revision) is not None


def _address(path: str) -> HubAddress | None:
    try:
        return hub_address(path)
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a commit: its path in the repository, and its size in bytes."""

    path: str
    size: int


class HubCommit:
    """What a repository holds at one commit. All of it raises SourceError."""

    def __init__(self, address: HubAddress, commit: str, client: _Client) -> None:
        self.address, self.commit, self._client = address, commit, client

    @classmethod
    def of(
        cls,
        address: HubAddress,
        environment: Mapping[str, str] = os.environ,
        sleep: Callable[[float], None] = time.sleep,
    ) -> HubCommit:
        """The commit that the revision of an address is now."""
        try:
            client = _Client(address, hub_api(environment), sleep)
        except StoreError as error:
            raise SourceError(f"{address}: {error}") from None
        if _COMMIT.fullmatch(address.revision):
            return cls(address, address.revision, client)
        where = f"/api/datasets/{address.repo}/revision/{quote(address.revision, safe='')}?expand=sha"
        told = client.json(where)
        commit = told.get("sha") if isinstance(told, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise client.error("expected the commit of a revision, found another answer")
        return cls(address, commit, client)

    def list(self, folder: str = "", *, recursive: bool = True) -> Iterator[HubFile]:
        """Files below a folder in the hub's order, or in it alone; none where there is no such folder."""
        below = f"/{quote(folder, safe='')}" if folder else ""
        where, cursor, found = f"/api/datasets/{self.address.repo}/tree/{self.commit}{below}", "", 0
        while True:
            asked = {"recursive": str(recursive).lower(), "expand": "false"} | ({"cursor": cursor} if cursor else {})
            try:
                answer = self._client.get(f"{where}?{urlencode(asked)}", MOST_LISTING_BYTES)
            except _NoEntry:
                return
            for one in self._client.parsed(answer.body):
                if isinstance(one, dict) and one.get("type") == "file":
                    yield HubFile(str(one["path"]), int(one["size"]))
                found += 1
            if found > MOST_FILES:
                raise self._client.error(f"expected at most {MOST_FILES:,} files below {folder or '/'}, found more")
            # The page after it is asked for at the same hub, with the token: the address that it names may be another.
            (cursor,) = parse_qs(urlsplit(answer.after).query).get("cursor", [""])
            if not cursor:
                return

    def open(self, file: HubFile) -> BinaryIO:
        """A file as a seekable one, read in ranges."""
        return cast(BinaryIO, io.BufferedReader(_ReadAhead(self, file), buffer_size=1 << 16))

    def read(self, file: HubFile, start: int, length: int) -> bytes:
        """Bytes of a file. `length`: LARGEST_READ at most."""
        where = f"/datasets/{self.address.repo}/resolve/{self.commit}/{quote(file.path)}"
        most = length if file.size > LARGEST_WHOLE else file.size
        try:
            answer = self._client.get(where, most, {"Range": f"bytes={start}-{start + length - 1}"})
        except _NoEntry:
            raise self._client.error(f"{file.path}: expected a file that was listed, found none") from None
        if answer.status == 206:
            begin, _, size = answer.range.removeprefix("bytes ").partition("/")
            as_asked = begin == f"{start}-{start + length - 1}" and size in (str(file.size), "*")
            data = answer.body
        else:  # a server may give the whole file instead
            as_asked, data = len(answer.body) == file.size, answer.body[start : start + length]
        if not as_asked or len(data) != length:
            raise self._client.error(f"{file.path}: expected {file.size:,} bytes as it was listed, found another file")
        return data


class _ReadAhead(RangedFile):
    """A file of a commit. Reads that follow each other fetch more at once, each time twice as much."""

    def __init__(self, commit: HubCommit, file: HubFile) -> None:
        super().__init__(file.size)
        self._commit, self._file = commit, file
        self._held_at = self._ahead = 0
        self._held = b""

    def read_range(self, start: int, length: int) -> memoryview:
        if not self._held_at <= start < self._held_at + len(self._held):
            goes_on = start == self._held_at + len(self._held)
            self._ahead = 2 * max(self._ahead, length) if goes_on and self._held else length
            self._ahead = min(self._ahead, LARGEST_READ)
            self._held = b""  # before its successor is there
            self._held = self._commit.read(self._file, start, min(self._ahead, self._file.size - start))
            self._held_at = start
        return memoryview(self._held)[start - self._held_at :][:length]


class _NoEntry(Exception):
    """There is no such file or folder."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """`after`: the address of the next page; `range`: which bytes the body is."""

    status: int
    body: bytes
    after: str = ""
    range: str = ""


@dataclass(frozen=True, slots=True)
class _Client:
    """Asks the hub for one repository. `api`: where, and as whom."""

    address: HubAddress
    api: HfApi = field(repr=False)
    sleep: Callable[[float], None] = field(repr=False)

    def error(self, said: str) -> SourceError:
        return SourceError(f"hf://datasets/{self.address.name} at {self.api.endpoint}: {said}")

    def json(self, where: str) -> Any:
        return self.parsed(self.get(where, MOST_LISTING_BYTES).body)

    def parsed(self, body: bytes) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise self.error("expected JSON of the hub's API, found another answer") from None

    def get(self, where: str, most: int, headers: Mapping[str, str] | None = None) -> _Answer:
        """The answer to a GET. Raises SourceError for one of more than `most` bytes and for refusals, and _NoEntry."""
        try:
            return tried_again(lambda: self._once(where, most, headers or {}), self.sleep, LONGEST_WAIT)
        except Passing as passing:
            raise self.error(f"{passing}; run again when it is back") from None

    def _once(self, where: str, most: int, headers: Mapping[str, str]) -> _Answer:
        import httpx2
        from huggingface_hub import get_session
        from huggingface_hub.errors import OfflineModeIsEnabled

        sent = {"User-Agent": "batch-assets", "Accept-Encoding": "identity", **headers}
        if self.api.token:
            sent["Authorization"] = f"Bearer {self.api.token}"
        until, body = time.monotonic() + ANSWER_SECONDS, bytearray()
        try:
            # The session follows redirects, and sends the token to no other host than the hub's.
            with get_session().stream(
                "GET", f"{self.api.endpoint}{where}", headers=sent, timeout=SILENT_SECONDS, follow_redirects=True
            ) as answer:
                if answer.status_code not in (200, 206):
                    raise self._refused(answer.status_code, answer.headers)
                for part in answer.iter_bytes():
                    body += part
                    if len(body) > most:
                        raise self.error(f"expected an answer of at most {most:,} bytes, found more")
                    if time.monotonic() > until:
                        raise Passing(f"expected an answer within {ANSWER_SECONDS:.0f} s, found a part of one")
                after = answer.links.get("next", {}).get("url", "")
                return _Answer(answer.status_code, bytes(body), after, answer.headers.get("Content-Range", ""))
        except OfflineModeIsEnabled:
            raise self.error("expected to be online, found HF_HUB_OFFLINE set") from None
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise Passing(f"expected an answer, found {type(error).__name__}") from None
        except (httpx2.TooManyRedirects, httpx2.InvalidURL) as error:
            raise self.error(f"expected an answer, found {type(error).__name__}") from None

    def _refused(self, status: int, headers: Mapping[str, str]) -> Exception:
        """What an answer with another status means: its code is in its headers, and its body is not looked at."""
        code, page = headers.get("X-Error-Code", ""), f"{self.api.endpoint}/datasets/{self.address.repo}"
        if status in TRANSIENT:
            return Passing(f"the hub answers {status}", headers)
        if code == "GatedRepo":
            token = f"with the account of the token in {TOKEN}" if self.api.token else f"and set {TOKEN}"
            return self.error(
                f"expected a dataset that may be read, found a gated one: accept its terms at {page} {token}"
            )
        if code == "RevisionNotFound":
            said = f"expected the revision {self.address.revision!r}, found none"
            return self.error(f"{said}: name a branch, a tag or a commit of {page}")
        if code == "EntryNotFound":
            return _NoEntry()
        if status in (401, 403, 404) and not self.api.token:
            said = "expected a dataset that anybody may read, found none of this name: it is private, or not there"
            return self.error(f"{said}; set {TOKEN} to a token that may read it, or correct the name")
        if status == 401:
            return self.error(f"expected a token that the hub knows in {TOKEN}, found another; make a new one")
        if status in (403, 404):
            said = f"expected a dataset that the token in {TOKEN} may read, found none"
            return self.error(f"{said}; correct the name, or give the token access")
        return self.error(f"expected an answer, found status {status}")
