"""Lines of the input and output files of OpenAI's Batch API. Pure, but for the local file that is read.

A row's line is known by a digest of its request, so that whoever asks for the same row again finds its answer: the
`custom_id` is the digest and a number, which tells equal requests of one batch apart.

Source: https://platform.openai.com/docs/api-reference/batch (request input object, request output object).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from gpu_runner.client.protocol import Transient

DIGEST_LETTERS = 32
WORD_LETTERS = 40
LOST_CODES = ("batch_expired", "batch_cancelled")  # OpenAI's, of rows that a batch has not come to


def digest_of(body: bytes) -> str:
    """By which the request of a row is known."""
    return hashlib.sha256(body).hexdigest()[:DIGEST_LETTERS]


def custom_ids(digests: Iterable[str]) -> list[str]:
    """One for each, all different."""
    seen: Counter[str] = Counter()
    found = []
    for digest in digests:
        found.append(f"{digest}-{seen[digest]}")
        seen[digest] += 1
    return found


def input_line(custom_id: str, path: str, body: bytes) -> bytes:
    """One line, with its end. `path`: of the endpoint, as `/v1/chat/completions`."""
    line = {"custom_id": custom_id, "method": "POST", "url": path, "body": orjson.Fragment(body)}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What a line says, as an HTTP answer would: for `read_answer`."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoundLine:
    """Where the line of a row lies in a file of this computer. `status`: of its answer; 0 where it has none."""

    path: Path
    offset: int
    length: int
    status: int

    def read(self) -> LineAnswer:
        """The answer. Raises Transient where there is none."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            line = orjson.loads(file.read(self.length))
        response, error = line.get("response"), line.get("error")
        if isinstance(response, dict) and type(status := response.get("status_code")) is int:
            return LineAnswer(status, orjson.dumps(response.get("body")))
        code, message = _words(error, "code"), _words(error, "message")
        raise Transient(code[:WORD_LETTERS] or "garbage_line", message, taken=code not in LOST_CODES)


@dataclass(slots=True)
class OutputLines:
    """The lines of a batch's files by `custom_id`. The first line of a row counts. `left`: a file is not there, or not
    all of it was wanted.
    """

    found: dict[str, FoundLine] = field(default_factory=dict)
    unreadable: int = 0
    unknown: int = 0
    doubled: int = 0
    left: bool = False

    @property
    def readable(self) -> int:
        """Lines, whether they are used or not."""
        return len(self.found) + self.unknown + self.doubled

    def read(self, path: Path, expected: Collection[str], longest: int) -> None:
        """Take in a file. Blocks. Lines of more than `longest` bytes are not read."""
        offset = 0
        with path.open("rb") as file:
            while line := file.readline(longest + 1):
                if len(line) > longest:
                    while not line.endswith(b"\n") and (more := file.readline(longest)):
                        offset += len(line)
                        line = more
                    self.unreadable += 1
                elif line.strip():
                    self._add(path, offset, line, expected)
                offset += len(line)

    def _add(self, path: Path, offset: int, line: bytes, expected: Collection[str]) -> None:
        try:
            said = orjson.loads(line)
            name, response = said["custom_id"], said.get("response")
            if not isinstance(name, str):
                raise TypeError
        except (ValueError, LookupError, TypeError, AttributeError):
            self.unreadable += 1
            return
        if name not in expected:
            self.unknown += 1
        elif name in self.found:
            self.doubled += 1
        else:
            status = response.get("status_code") if isinstance(response, dict) else 0
            self.found[name] = FoundLine(path, offset, len(line), status if type(status) is int else 0)


def _words(error: Any, key: str) -> str:
    found = error.get(key) if isinstance(error, dict) else None
    return found if isinstance(found, str) else ""
