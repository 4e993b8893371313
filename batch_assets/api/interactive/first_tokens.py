"""How long first tokens of interactive requests take, by engine: what batches on that engine give way to.

The proxy writes, feeds in other threads read. Bounded in samples and engines.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_runner.inference.windows.first_token_window import FirstTokenSample

MOST_SAMPLES = 1000
MOST_ENGINES = 1000


@dataclass(slots=True)
class _Engine:
    samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    waiting: dict[int, float] = field(default_factory=dict)  # since when, by the number of the request
    unseen: set[int] = field(default_factory=set)  # requests under way that show no first token
    last_unseen: int = 0  # the number at which one of them ended last


class FirstTokens:
    """First tokens that came, requests that wait for one, and those that show none: their answers are not streamed.

    `clock`: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._engines: OrderedDict[str, _Engine] = OrderedDict()

    def begin(self, engine: str, since: float, *, streamed: bool = True) -> int:
        """A request, begun at `since`, was sent to the engine with this address and waits for its first token, which
        shows only where the answer is streamed.
        """
        with self._lock:
            number = next(self._numbers)
            found = self._engines.setdefault(engine, _Engine())
            if streamed:
                found.waiting[number] = since
            else:
                found.unseen.add(number)
            self._engines.move_to_end(engine)
            if len(self._engines) > MOST_ENGINES:
                self._engines.popitem(last=False)
            return number

    def end(self, engine: str, number: int, *, came: bool) -> float | None:
        """Tell that the request waits no more: its first token came after the seconds that are returned, or it ended
        without one.

        To be called for every request that began; further calls change nothing.
        """
        with self._lock:
            found = self._engines.get(engine)
            if found is None:
                return None
            if number in found.unseen:
                found.unseen.discard(number)
                found.last_unseen = next(self._numbers)
            since = found.waiting.pop(number, None)
            if since is None or not came:
                return None
            seconds = self._clock() - since
            found.samples.append((next(self._numbers), seconds))
            return seconds

    def reader(self, engine: str) -> Callable[[], FirstTokenSample]:
        """What is seen on this engine from now on: each call says what is new since the one before."""
        with self._lock:
            last = next(self._numbers)

        def look() -> FirstTokenSample:
            nonlocal last
            with self._lock:
                found = self._engines.get(engine) or _Engine()
                new = tuple(seconds for number, seconds in found.samples if number > last)
                unseen = bool(found.unseen) or found.last_unseen > last
                last = next(self._numbers)
                oldest = min(found.waiting.values(), default=None)
            return FirstTokenSample(new, None if oldest is None else self._clock() - oldest, unseen)

        return look
