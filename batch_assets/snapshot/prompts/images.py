"""Images of rows: bytes, files below allowed folders, addresses at allowed hosts, data URLs. Each becomes a data URL.

Whatever cannot be used is a reason for its row, which names the column and never quotes an address or path: these may
hold secrets. Nothing is decoded before its size in bytes and pixels is known to be allowed. The format is that of the
content; names and declared types do not count. A row's key has the digest of an image as it came, so that another
version of Pillow asks for no row again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import io
import math
import os
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from batch_assets.snapshot.source.block import Block
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.models import ImagesSpec
from batch_assets.spec.sampling_values import Unfit
from gpu_runner.bounded_http.addresses import opener, refuse, refuse_private, refused
from gpu_runner.bounded_http.small_pages import TooLarge, read_page

if TYPE_CHECKING:
    from PIL.Image import Image

THREADS = 16
DECODED_AT_ONCE = 2  # of the largest images each takes some hundred megabytes
FETCH_SECONDS = 20.0  # of one image; the wait for a byte is half of it
_MEDIA = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
_JPEG = ("JPEG", "MPO")  # as cameras write it, with further pictures behind the first one
_EXPECTED = "a PNG, JPEG, WebP or GIF image"


@dataclass(frozen=True, slots=True)
class RowImage:
    """One image. `url`: a data URL, as it is sent; `key`: what stands for it in the row's key."""

    url: str
    key: str


class RowImages:
    """Those of a spec. `base`: where relative folders start. Raises SourceError without Pillow, or for a folder that is
    none."""

    def __init__(self, spec: ImagesSpec, base: Path) -> None:
        if find_spec("PIL") is None:
            raise SourceError("prompt.images: expected the package Pillow: install batch-assets[images]")
        self._spec, self._decoding = spec, threading.Semaphore(DECODED_AT_ONCE)
        self._folders = [_folder(base / name, name) for name in spec.folders]
        listed = {host.rpartition(":")[0] or host for host in spec.hosts} | set(spec.hosts)
        self._opener = opener(lambda address: refuse(address) if address in listed else refuse_private(address))
        self.columns = set(spec.columns)

    def of(self, block: Block, refused: dict[int, str]) -> list[list[RowImage]]:
        """The images of every row; why a row cannot be used is put into `refused`."""
        cells = list(zip(*(block.columns[name] for name in self._spec.columns), strict=True))

        def read(place: int) -> list[RowImage] | str:
            return [] if place in refused else self._row(cells[place])

        with ThreadPoolExecutor(THREADS) as threads:
            found = list(threads.map(read, range(len(cells))))
        for i, one in enumerate(found):
            if isinstance(one, str):
                refused.setdefault(i, one)
        return [[] if isinstance(one, str) else one for one in found]

    def _row(self, cells: Sequence[Any]) -> list[RowImage] | str:
        images: list[RowImage] = []
        for name, cell in zip(self._spec.columns, cells, strict=True):
            values = cell if isinstance(cell, list) else [] if cell is None else [cell]
            if len(images) + len(values) > self._spec.max_count:
                found = len(images) + len(values)
                return f"prompt.images: expected at most {self._spec.max_count} images (max_count), found {found:,}"
            for value in values:
                try:
                    images.append(self._image(self._bytes_of(value)))
                except Unfit as error:
                    return f"prompt.images: column {name!r}: {error}"
        if not images:
            return f"prompt.images: expected {_EXPECTED}, found none"
        if (size := sum(len(image.url) for image in images)) > self._spec.row_bytes:
            hint = "Set max_pixels, which scales them down"
            return f"prompt.images: expected at most {self._spec.row_bytes:,} bytes in a row, found {size:,}. {hint}"
        return images

    def _bytes_of(self, value: Any) -> bytes:
        if isinstance(value, dict):  # as Hugging Face's datasets have images
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return self._within(value)
        if not isinstance(value, str) or not value.strip():
            raise Unfit(f"expected the bytes of {_EXPECTED}, a path or an address, found another value")
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
            raise Unfit("expected a folder in prompt.images.folders, as this is a path, found none")
        try:
            path = (self._folders[0] / value).resolve()
            if not any(path.is_relative_to(folder) for folder in self._folders):
                raise Unfit("expected a path below prompt.images.folders, found one that leads elsewhere")
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
            raise Unfit("expected an address at a host in prompt.images.hosts, found another host")
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
                raise Unfit(f"expected {_EXPECTED} at its address, found {found}")
        raise AssertionError

    def _image(self, data: bytes) -> RowImage:
        from PIL import Image, UnidentifiedImageError

        digest = hashlib.sha256(data).hexdigest()
        with self._decoding:
            try:
                with Image.open(io.BytesIO(data), formats=tuple(_MEDIA)) as image:
                    kind, (wide, high) = "JPEG" if image.format in _JPEG else str(image.format), image.size
                    if wide * high > self._spec.max_source_pixels:
                        raise _too_large(f"{wide:,} × {high:,}", self._spec)
                    most = self._spec.max_pixels
                    if most is None or wide * high <= most:
                        image.draft(
                            "L", (max(1, wide // 8), max(1, high // 8))
                        )  # of JPEG alone: reads all, writes less
                        image.load()
                        return RowImage(_data_url(_MEDIA[kind], data), digest)
                    sent, media = _scaled(image, most)
                    return RowImage(_data_url(media, sent), f"{digest} of at most {most} pixels")
            except Unfit:
                raise
            except UnidentifiedImageError:
                found = "SVG" if b"<svg" in data[:1000].lower() else "another format, or a broken one"
                raise Unfit(f"expected {_EXPECTED} by its content, found {found}") from None
            except (Image.DecompressionBombError, Image.DecompressionBombWarning):
                raise _too_large("far more", self._spec) from None
            except Exception as error:  # Pillow's decoders have no error of their own
                raise Unfit(f"expected a whole image, found a broken one ({type(error).__name__})") from None


def with_images(messages: list[dict[str, Any]], urls: Sequence[str]) -> list[dict[str, Any]]:
    """The messages with images in the last one of the user, before its text. Raises Unfit where there is none."""
    place = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=None)
    if place is None:
        raise Unfit("expected a message of the user for prompt.images, found none")
    content = messages[place]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    pictures = [{"image_url": {"url": url}, "type": "image_url"} for url in urls]
    return [*messages[:place], {**messages[place], "content": [*pictures, *parts]}, *messages[place + 1 :]]


def _too_large(found: str, spec: ImagesSpec) -> Unfit:
    return Unfit(f"expected at most {spec.max_source_pixels:,} pixels (max_source_pixels), found {found}")


def _folder(path: Path, name: str) -> Path:
    try:
        found = path.resolve(strict=True)
    except (OSError, RuntimeError):
        found = None
    if found is None or not found.is_dir():
        raise SourceError(f"prompt.images.folders: expected a folder, found none at {name!r:.200}")
    return found


def _scaled(image: Image, most: int) -> tuple[bytes, str]:
    """An image of at most so many pixels, and its media type: JPEG stays JPEG, all else is PNG."""
    from PIL import Image as pil
    from PIL import ImageOps

    wide, high = image.size
    share = math.sqrt(most / (wide * high))
    size = max(1, math.floor(wide * share)), max(1, math.floor(high * share))
    jpeg = image.format in _JPEG
    if jpeg:
        image.draft("RGB", size)
    image.load()
    upright = ImageOps.exif_transpose(image)
    if upright.size[0] * upright.size[1] and (upright.size[0] > upright.size[1]) != (wide > high):
        size = size[1], size[0]
    wanted = "RGB" if jpeg else "RGBA" if upright.has_transparency_data else "RGB"
    small = upright.convert(wanted).resize(size, pil.Resampling.LANCZOS)
    written = io.BytesIO()
    small.save(written, "JPEG" if jpeg else "PNG", **({"quality": 90} if jpeg else {}))
    return written.getvalue(), "image/jpeg" if jpeg else "image/png"


def _data_url(media: str, data: bytes) -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"
