"""How many batch rows an engine may have while others wait for its first tokens. Pure: no clock, no I/O.

Interactive requests share the engine. Their time to the first token is the signal: an engine that queues without bound
refuses nobody, so refusals come too late. Additive increase and multiplicative decrease (Chiu and Jain, 1989): fewer
rows at once when first tokens are late, slowly more while they are early. At most as many rows as it has slots: a row
that waits in the engine's queue stands before whoever comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import ceil


@dataclass(frozen=True, slots=True)
class FirstTokenPolicy:
    """`target`: seconds within which the share `quantile` of first tokens is to come. `shrink`: what is left of the
    rows when they are late; `hold` ticks pass before that happens again, because rows under way must end first. `grow`:
    rows more per tick, as a share of the slots, while they come within `calm` of the target. `smallest` number of rows.
    `samples` are remembered. `headroom`: share of the slots that rows leave free: no slot is taken from a row.
    After `quiet` ticks without an interactive request rows may fill the engine's queue again; `standing`: never.
    After `forget` ticks in which no first token came, and none was waited for, those before count no more.
    """

    target: float = 0.5
    quantile: float = 0.95
    shrink: float = 0.85
    grow: float = 0.01
    calm: float = 0.85
    hold: int = 3
    smallest: int = 1
    samples: int = 60
    headroom: float = 0.1
    quiet: int = 300
    forget: int = 60
    standing: bool = False


@dataclass(frozen=True, slots=True)
class FirstTokenSample:
    """What was seen since the last look: seconds of first tokens that came, and the longest that one waits for now.

    `unseen`: there are interactive requests of whose first tokens nothing is seen: answers that are not streamed, and
    what other processes send.
    """

    seconds: Sequence[float] = ()
    waiting: float | None = None
    unseen: bool = False


@dataclass(frozen=True, slots=True)
class InteractiveShare:
    """The interactive requests beside a feed on one engine. `look` says what was seen since it was called last.

    `feeding`: what is held while the feed has rows there; it gets how many they are, to be asked in any thread.
    """

    look: Callable[[], FirstTokenSample]
    policy: FirstTokenPolicy = field(default_factory=FirstTokenPolicy)
    feeding: Callable[[Callable[[], int]], AbstractContextManager[None]] = lambda rows: nullcontext()


class FirstTokenBackoff:
    """The rows that interactive requests leave to batches on one engine: `cap`, None while they do not count."""

    def __init__(self, policy: FirstTokenPolicy, slots: int | None) -> None:
        self._policy = policy
        self._slots = slots
        self._seen: deque[float] = deque(maxlen=policy.samples)
        self._held = 0
        self._unheard = 0  # ticks
        self._quiet = 0 if policy.standing else policy.quiet
        self._rows = self._most

    @property
    def _most(self) -> float | None:
        """Rows that leave the headroom free; None while the slots are not known."""
        return None if self._slots is None else max(1.0, self._slots * (1 - self._policy.headroom))

    @property
    def cap(self) -> float | None:
        """Most rows at once."""
        return None if self._quiet >= self._policy.quiet else self._rows

    def on_tick(self, sample: FirstTokenSample, running: int, waiting: int, in_flight: int = 0) -> None:
        """Once a second or so. `running` and `waiting`: sequences in the engine, of which slots are learned.

        While more rows are `in_flight` than may be, none is sent: a smaller window would change nothing yet.
        """
        self._learn(running, waiting)
        nobody = not sample.seconds and sample.waiting is None and not sample.unseen
        self._quiet = self._quiet + 1 if nobody and not self._policy.standing else 0
        most = self._most
        if self._rows is None or self._slots is None or most is None:
            return
        policy = self._policy
        self._unheard = 0 if sample.seconds or sample.waiting is not None else self._unheard + 1
        if self._unheard >= policy.forget:
            self._seen.clear()
        self._seen.extend(sample.seconds)
        self._held = max(0, self._held - 1)
        stuck = sample.waiting is not None and sample.waiting > policy.target
        if stuck or (bool(sample.seconds) and self._late() > policy.target):
            if not self._held and in_flight <= self._rows:
                least = float(policy.smallest)
                self._rows = max(least, min(self._rows, max(float(running), least)) * policy.shrink)
                self._held = policy.hold
                self._seen.clear()
        elif not sample.seconds and sample.waiting is not None:
            return  # somebody waits, and not for long: nothing is known
        elif not self._held and (not self._seen or self._late() < policy.calm * policy.target):
            self._rows = min(most, self._rows + policy.grow * self._slots)

    def _learn(self, running: int, waiting: int) -> None:
        """Slots of an engine that does not tell: as many as run while others wait."""
        if self._slots is None and waiting > 0 and running > 0:
            self._slots = running
            self._rows = self._most

    def _late(self) -> float:
        """The quantile of the first tokens that are remembered."""
        seen = sorted(self._seen)
        return seen[ceil(self._policy.quantile * len(seen)) - 1] if seen else 0.0
