"""Files of rows that requests hold, images and audio: bytes, files below allowed folders, addresses at allowed hosts,
data URLs. Each becomes a data URL.

Whatever cannot be used is a reason for its row, which names the column and never quotes an address or path: these may
hold secrets. Nothing is read beyond its limit in bytes. The format is that of the content; names and declared types do
not count. A row's key has the digest of a file as it came.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import os
import stat
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from batch_assets.snapshot.prompts.messages import Message
from batch_assets.snapshot.source.block import Block
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.media import MediaSpec
from batch_assets.spec.sampling_values import Unfit
from gpu_runner.bounded_http.addresses import opener, refuse, refuse_private, refused
from gpu_runner.bounded_http.small_pages import TooLarge, read_page

THREADS = 16
FETCH_SECONDS = 20.0  # of one file; the wait for a byte is half of it


@dataclass(frozen=True, slots=True)
class RowMedium:
    """One file. `url`: a data URL, as it is sent; `key`: what stands for it in the row's key."""

    url: str
    key: str


class RowMedia(ABC):
    """Those of a spec, of one kind. `key`: in the spec. `base`: where relative folders start. Raises SourceError for a
    folder that is none.

    Of a kind: `named` are several of them, `expected` is what one has to be, `too_large` what to do where those of a
    row are too large together.
    """

    named: str
    expected: str
    too_large: str

    def __init__(self, spec: MediaSpec, base: Path, key: str) -> None:
        self._spec, self._key = spec, key
        self._folders = [_folder(base / name, name, key) for name in spec.folders]
        listed = {host.rpartition(":")[0] or host for host in spec.hosts} | set(spec.hosts)
        self._opener = opener(lambda address: refuse(address) if address in listed else refuse_private(address))
        self.columns = set(spec.columns)

    @abstractmethod
    def read(self, data: bytes) -> RowMedium:
        """One of them, from its bytes. Raises Unfit."""

    @abstractmethod
    def part(self, medium: RowMedium, *, keyed: bool) -> Message:
        """The content part of a message for it; `keyed`: as the row's key has it."""

    def of(self, block: Block, refused: dict[int, str]) -> list[list[RowMedium]]:
        """Those of every row; why a row cannot be used is put into `refused`."""
        cells = list(zip(*(block.columns[name] for name in self._spec.columns), strict=True))

        def read(place: int) -> list[RowMedium] | str:
            return [] if place in refused else self._row(cells[place])

        with ThreadPoolExecutor(THREADS) as threads:
            found = list(threads.map(read, range(len(cells))))
        for i, one in enumerate(found):
            if isinstance(one, str):
                refused.setdefault(i, one)
        return [[] if isinstance(one, str) else one for one in found]

    def _row(self, cells: Sequence[Any]) -> list[RowMedium] | str:
        found: list[RowMedium] = []
        for name, cell in zip(self._spec.columns, cells, strict=True):
            values = cell if isinstance(cell, list) else [] if cell is None else [cell]
            if len(found) + len(values) > self._spec.max_count:
                number, most = len(found) + len(values), self._spec.max_count
                return f"{self._key}: expected at most {most} {self.named} (max_count), found {number:,}"
            for value in values:
                try:
                    found.append(self.read(self._bytes_of(value)))
                except Unfit as error:
                    return f"{self._key}: column {name!r}: {error}"
        if not found:
            return f"{self._key}: expected {self.expected}, found none"
        if (size := sum(len(one.url) for one in found)) > self._spec.row_bytes:
            most = self._spec.row_bytes
            return f"{self._key}: expected at most {most:,} bytes in a row, found {size:,}. {self.too_large}"
        return found

    def _bytes_of(self, value: Any) -> bytes:
        if isinstance(value, dict):  # as Hugging Face's datasets have images
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return self._within(value)
        if not isinstance(value, str) or not value.strip():
            raise Unfit(f"expected the bytes of {self.expected}, a path or an address, found another value")
        scheme = value[:8].lower()
        if scheme.startswith("data:"):
            return self._of_data_url(value)
        return self._fetched(value) if scheme.startswith(("http://", "https://")) else self._of_file(value)

    def _within(self, data: bytes) -> bytes:
        if len(data) > self._spec.max_bytes:
            raise Unfit(f"expected at most {self._spec.max_bytes:,} bytes (max_bytes), found {len(data):,}")
        return data

    def _of_data_url(self, value: str) -> bytes:
        if len(value) > self._spec.max_bytes * 4 // 3 + 1000:
            found = f"a data URL of {len(value):,} letters"
            raise Unfit(f"expected at most {self._spec.max_bytes:,} bytes (max_bytes), found {found}")
        kind, comma, text = value.partition(",")
        if not comma or not kind.lower().endswith(";base64"):
            raise Unfit("expected a data URL in base64, data:image/png;base64,…, found another one")
        try:
            return self._within(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            raise Unfit("expected a data URL in base64, found other letters in it") from None

    def _of_file(self, value: str) -> bytes:
        if not self._folders:
            raise Unfit(f"expected a folder in {self._key}.folders, as this is a path, found none")
        try:
            path = (self._folders[0] / value).resolve()
            if not any(path.is_relative_to(folder) for folder in self._folders):
                raise Unfit(f"expected a path below {self._key}.folders, found one that leads elsewhere")
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                about = os.fstat(descriptor)
                if not stat.S_ISREG(about.st_mode):
                    raise Unfit("expected a file, found a folder, a pipe or a device")
                if about.st_size > self._spec.max_bytes:
                    raise Unfit(f"expected at most {self._spec.max_bytes:,} bytes, found a file of {about.st_size:,}")
                return self._within(file.read(self._spec.max_bytes + 1))
        except (OSError, ValueError, RuntimeError) as error:  # no path, a circle of links
            said = getattr(error, "strerror", None) or type(error).__name__
            raise Unfit(f"expected a file that can be read, found none ({said})") from None

    def _fetched(self, value: str) -> bytes:
        try:
            parts = urlsplit(value)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            raise Unfit("expected an address, found what cannot be read as one") from None
        if "@" in parts.netloc:
            raise Unfit("expected an address without user and password, found one with them")
        if (f"{host}:{port}" if port else host) not in self._spec.hosts:
            raise Unfit(f"expected an address at a host in {self._key}.hosts, found another host")
        for last in (False, True):
            try:
                with self._opener.open(urllib.request.Request(value), timeout=FETCH_SECONDS / 2) as answer:
                    return read_page(answer, self._spec.max_bytes, FETCH_SECONDS)
            except urllib.error.HTTPError as error:
                error.close()
                found = f"status {error.code}" if error.code >= 400 else "a redirect, which is not followed"
                again = error.code >= 500
            except TooLarge:
                raise Unfit(f"expected at most {self._spec.max_bytes:,} bytes (max_bytes), found more") from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                if refused(error) is not None:
                    raise Unfit("expected a host at a public address, found one that is not connected to") from None
                found, again = f"an error ({type(error).__name__})", not isinstance(error, ValueError)
            if last or not again:
                raise Unfit(f"expected {self.expected} at its address, found {found}")
        raise AssertionError


def with_media(messages: list[Message], parts: Sequence[Message]) -> list[Message]:
    """The messages with content parts in the last one of the user, before its text. Raises Unfit where none is."""
    place = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=None)
    if place is None:
        raise Unfit("expected a message of the user for images and audio, found none")
    content = messages[place]["content"]
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [*messages[:place], {**messages[place], "content": [*parts, *texts]}, *messages[place + 1 :]]


def data_url(media: str, data: bytes) -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def _folder(path: Path, name: str, key: str) -> Path:
    try:
        found = path.resolve(strict=True)
    except (OSError, RuntimeError):
        found = None
    if found is None or not found.is_dir():
        raise SourceError(f"{key}.folders: expected a folder, found none at {name!r:.200}")
    return found
