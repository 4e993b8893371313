"""Bytes of files between the store and a request, a part at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import BinaryIO

from batch_assets.api.records.files import FileRecord
from resources.store.objects import Objects

PART_BYTES = 1 << 20


def expiry(created_at: int, seconds: int | None, default_days: float) -> int:
    """When a file's time is over."""
    return created_at + (int(default_days * 86_400) if seconds is None else seconds)


def now() -> int:
    """Unix seconds."""
    return int(time.time())


async def open_content(objects: Objects, file: FileRecord) -> BinaryIO:
    """The content, opened. Raises FileNotFoundError."""
    return await asyncio.to_thread(objects.open, file.path)


async def parts_of(content: BinaryIO) -> AsyncIterator[bytes]:
    """The content, part by part; closes it."""
    try:
        while part := await asyncio.to_thread(content.read, PART_BYTES):
            yield part
    finally:
        await asyncio.to_thread(content.close)
