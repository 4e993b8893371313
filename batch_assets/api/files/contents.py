"""Bytes of files between the store and a request, a part at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import BinaryIO

from batch_assets.api.database.file_records import FileRecord
from batch_assets.api.files.upload import LineCount
from batch_assets.api.store_threads import WAIT_SECONDS, StoreThreads
from resources.objects.opening import Objects

PART_BYTES = 1 << 20


def expiry(created_at: int, seconds: int | None, default_days: float) -> int:
    """When a file's time is over."""
    return created_at + (int(default_days * 86_400) if seconds is None else seconds)


def now() -> int:
    """Unix seconds."""
    return int(time.time())


@dataclass(frozen=True, slots=True)
class OpenContent:
    """A content whose first part was read: the store has it, and answers."""

    first: bytes
    rest: BinaryIO


async def open_content(threads: StoreThreads, objects: Objects, file: FileRecord) -> OpenContent:
    """The content, opened. Raises FileNotFoundError, StoreBusy, and what the store raises."""

    def opened() -> OpenContent:
        content = objects.open(file.path)
        try:
            return OpenContent(content.read(PART_BYTES), content)
        except BaseException:
            content.close()
            raise

    return await threads.call_soon(WAIT_SECONDS, opened)


async def parts_of(threads: StoreThreads, content: OpenContent) -> AsyncGenerator[bytes]:
    """The content, part by part; closes it."""
    try:
        part = content.first
        while part:
            yield part
            part = await threads.call(content.rest.read, PART_BYTES)
    finally:
        await threads.call(content.rest.close)


async def count_lines(threads: StoreThreads, objects: Objects, file: FileRecord) -> int:
    """How many lines a file has, without blank ones at its end. Raises as `open_content`."""
    count = LineCount()
    async with contextlib.aclosing(parts_of(threads, await open_content(threads, objects, file))) as parts:
        async for part in parts:
            count.add(part)
    return count.lines
