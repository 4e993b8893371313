"""Reads what should be small, from a web server or a file: no further than some bytes and seconds."""

from __future__ import annotations

import http.client
import time
from pathlib import Path

BLOCK = 1 << 16


class TooLarge(OSError):
    """More bytes than what should be there can have."""

    def __init__(self, most: int) -> None:
        super().__init__(f"more than {most:,} bytes")
        self.strerror = f"more than {most:,} bytes"


def read_page(answer: http.client.HTTPResponse, most: int, seconds: float) -> bytes:
    """The body of an answer. Raises TooLarge and TimeoutError, both of them OSError, and http.client.HTTPException.

    The connection's own time-out bounds each wait for a byte, `seconds` all of them together.
    """
    ends, body = time.monotonic() + seconds, bytearray()
    while block := answer.read1(BLOCK):
        body += block
        if len(body) > most:
            raise TooLarge(most)
        if time.monotonic() > ends:
            raise TimeoutError(f"not all of it within {seconds:g} s")
    return bytes(body)


def read_file(path: Path, most: int) -> bytes:
    """A regular file. Raises OSError, TooLarge among them; a pipe or device, which may never end, counts as none."""
    if path.exists() and not path.is_file():
        raise OSError(0, "no regular file")
    with path.open("rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise TooLarge(most)
    return found
