"""Lines of the log that come again and again are counted, and written once a minute with their count."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SECONDS = 60.0
MOST_LINES = 1_000  # different ones that are remembered


@dataclass(slots=True)
class _Line:
    written_at: float
    more: int = 0


class RepeatedLines(logging.Filter):
    """A filter for one handler of the log: of lines with the same text one in `seconds` goes through, with the number
    of those that did not. Tracebacks are no part of the text. `clock`: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, seconds: float = SECONDS) -> None:
        super().__init__()
        self._clock, self._seconds = clock, seconds
        self._lines: OrderedDict[tuple[str, str], _Line] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written; False for one whose text was written just now. Adds the count to its text."""
        text = record.getMessage()
        with self._lock:
            key, now = (record.name, text), self._clock()
            line = self._lines.get(key)
            if line is not None and now - line.written_at < self._seconds:
                line.more += 1
                return False
            self._lines[key] = _Line(now)
            self._lines.move_to_end(key)
            if len(self._lines) > MOST_LINES:
                self._lines.popitem(last=False)
        if line is not None and line.more:
            since = now - line.written_at
            record.msg, record.args = f"{text} ({line.more:,} times more in the {since:.0f} s before)", None
        return True


@contextlib.contextmanager
def counted_repeated_lines() -> Iterator[None]:
    """Lets all handlers of this process count: those of the root logger, and Python's own where it has none."""
    filters = [(one, RepeatedLines()) for one in (*logging.getLogger().handlers, logging.lastResort) if one is not None]
    for handler, lines in filters:
        handler.addFilter(lines)
    try:
        yield
    finally:
        for handler, lines in filters:
            handler.removeFilter(lines)
