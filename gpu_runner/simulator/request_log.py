"""What the engine was asked and what it did: counts in memory, and a log of its own on disk.

The log has one JSON line per event: `received` and, later, `finished`. It names a prompt by the sha256 of its
compact JSON (a chat's `messages`, token ids) or of its UTF-8 text (a text prompt), several prompts by the sha256
of their digests, a body that could not be read by "". It never holds prompt text.
Lines reach the file within 0.2 s, whatever happens to the clients; a crash by a scripted fault writes them first.

    {"t": 1731.5, "event": "received", "request": 7, "prompt": "…64 hex…", "prompt_tokens": 12}
    {"t": 1731.9, "event": "finished", "request": 7, "prompt": "…", "outcome": "stop", "completion_tokens": 80, …}

`outcome` is stop, length, embedding, aborted (the client went away), refused (4xx), fault:KIND, or error (500).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import orjson

FLUSH_SECONDS = 0.2
# Beyond this many different prompts no new ones are counted, to bound memory.
MAX_PROMPTS = 2_000_000


class RequestLog:
    """Counts and log of one engine. `path=None`: counts only."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lines: list[bytes] = []
        self.received = 0
        self.in_flight = 0
        self.outcomes: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._prompts: dict[int, int] = {}

    @property
    def unwritten(self) -> bool:
        """True while lines wait for `flush`."""
        return bool(self._lines)

    def receive(self, prompt: str, prompt_tokens: int) -> int:
        """Note a request; returns its number, counted from 1."""
        self.received += 1
        self.in_flight += 1
        short = int(prompt[:15] or "0", 16)
        if short in self._prompts or len(self._prompts) < MAX_PROMPTS:
            self._prompts[short] = self._prompts.get(short, 0) + 1
        self._write("received", self.received, prompt, {"prompt_tokens": prompt_tokens})
        return self.received

    def finish(
        self, number: int, prompt: str, outcome: str, prompt_tokens: int = 0, completion_tokens: int = 0
    ) -> None:
        """Note what became of a request."""
        self.in_flight -= 1
        self.outcomes[outcome] += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        self._write("finished", number, prompt, {"outcome": outcome, **tokens})

    def _write(self, event: str, number: int, prompt: str, more: dict[str, Any]) -> None:
        if self._file is not None:
            line = {"t": time.time(), "event": event, "request": number, "prompt": prompt, **more}
            self._lines.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def flush(self) -> None:
        """Hand the lines to the operating system: they outlive this process."""
        if self._file is not None and self._lines:
            lines, self._lines = self._lines, []
            os.write(self._file, b"".join(lines))

    def summary(self) -> dict[str, Any]:
        """Counts for /simulator/stats. `completed` counts answers with a finish reason of stop or length."""
        asked = Counter(self._prompts.values())
        return {
            "requests": self.received,
            "in_flight": self.in_flight,
            "completed": sum(self.outcomes[kind] for kind in ("stop", "length", "embedding")),
            "outcomes": dict(self.outcomes),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "prompts": {
                "distinct": len(self._prompts),
                "repeated": sum(count for times, count in asked.items() if times > 1),
                "most": max(asked, default=0),
                "asked": {str(times): count for times, count in sorted(asked.items())},
            },
        }
