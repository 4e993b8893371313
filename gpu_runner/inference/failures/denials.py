"""Rows that a server refused with a 4xx or a redirect: is it this row, or what all rows have in common?

In common they have key, credit, model and address, and the settings of the request (sampling, output.json_schema).
What says itself that it is the row's (a prompt that is too long) is no case for this module. A row that is refused
because the account cannot pay (`of_account`) is tried again where others get a dead letter. Evidence decides, from the
weakest to the strongest:

- A canary is answered: a request with the settings and roles of a denied row, and "ping" for its texts. The denied rows
  are set aside and the engine goes on with others.
- Rows that were sent after a denial are answered while few are denied: the denied rows become dead letters.
- Many rows are denied while few are answered, or the canary itself is denied as the rows are: the engine is asked once
  more for a row that it answered before. If that is not refused, the denials were the rows' own. If it is, or if no
  row was ever answered, the engine denies everything, and no row is charged.

What "many" means is a cumulative sum (Page, Continuous Inspection Schemes, 1954): a denied row adds 1, an answered one
takes `ANSWER_WEIGHT` away, down to 0. The weight is that of a test of "half of the rows are denied" against "98 % are":
ln(0.5 / 0.02) / ln(0.98 / 0.5) = 4.8. By chance, 32 are reached once in 10^9 rows while half of them are denied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gpu_runner.client.protocol import EngineRefused, RequestDenied
from gpu_runner.client.server_sentence import says
from gpu_runner.inference.row_state import Item
from gpu_runner.rows import Row

# A canary is sent for so many denials as a share of the window, or for one that waited so long: other rows may prove
# the same for nothing, and a dataset in which a third of the rows is denied must not ask for much more than its rows.
CANARY_SHARE = 1 / 8
CANARY_SECONDS = 10.0

ANSWER_WEIGHT = 5
MANY_DENIED = 32
# A denial comes at once and an answer after seconds. While two thirds of the rows are denied, the denials that come
# before the first answer are twice the window.
MANY_WINDOWS = 2

Evidence = Literal["canary", "answered_row"]


@dataclass(frozen=True, slots=True)
class Denial:
    """A denied row that waits for evidence."""

    item: Item
    error: RequestDenied
    at: float


class Denials:
    """The denied rows of one engine, oldest first. Times are those of the loop, in seconds.

    `answered_row` is the last row that the engine answered.
    """

    def __init__(self) -> None:
        self.answered_row: Row | None = None
        self._fresh: deque[Denial] = deque()  # nothing that was sent after them is answered yet
        self._aside: deque[Denial] = deque()
        self._sum = 0
        self._row_answered = float("-inf")
        self._canary_error: EngineRefused | None = None

    def __len__(self) -> int:
        return len(self._fresh) + len(self._aside)

    @property
    def oldest(self) -> float | None:
        """Since when a denied row waits for a request that is answered."""
        return self._fresh[0].at if self._fresh else None

    @property
    def oldest_row(self) -> Row | None:
        """That row."""
        return self._fresh[0].item.asked_row if self._fresh else None

    def slots(self, window: int) -> int:
        """How many slots the denied rows keep: those set aside keep none, unless too many were denied."""
        return len(self) if self._too_many(window) else len(self._fresh)

    def add(self, denial: Denial) -> None:
        """One more."""
        denial.item.deny()
        self._fresh.append(denial)
        self._sum += 1

    def remember(self, row: Row) -> None:
        """The engine answered this row."""
        self.answered_row = row

    # --- evidence ---

    def wanted(self, now: float, window: int, in_flight: int) -> Evidence | None:
        """The request that is to bring evidence now, if any."""
        if not self:
            return None
        doubtful = self._canary_error is not None and self._due(now, window, in_flight)
        if self.answered_row is not None and (doubtful or self._too_many(window)):
            return "answered_row"
        if self._canary_error is None and self._due(now, window, in_flight):
            return "canary"
        return None

    def row_answered(self, sent: float) -> None:
        """A row that was sent at `sent` is answered."""
        oldest = self._aside[0].at if self._aside else self.oldest
        if oldest is None or oldest >= sent:
            return
        self._sum = max(0, self._sum - ANSWER_WEIGHT)
        self._row_answered = max(self._row_answered, sent)
        self.canary_answered(sent)

    def canary_answered(self, sent: float) -> None:
        """Key, model and address were right for a request that was sent at `sent`."""
        while self._fresh and self._fresh[0].at < sent:
            denial = self._fresh.popleft()
            denial.item.set_aside()
            self._aside.append(denial)

    def canary_denied(self, error: EngineRefused) -> None:
        """The canary is denied as well: no use to ask it again.

        Rows that are denied for another reason got past that one, or are not denied for it: they are set aside.
        """
        alike, others = deque[Denial](), deque[Denial]()
        for denial in self._fresh:
            (alike if denial.error.like(error) else others).append(denial)
        for denial in others:
            denial.item.set_aside()
        self._aside += others
        self._fresh = alike
        if alike:
            self._canary_error = error

    def answered_row_answered(self, sent: float) -> None:
        """A prompt that was answered before is answered again, sent at `sent`: the engine denies rows one by one."""
        self._sum = 0
        self._row_answered = max(self._row_answered, sent)
        self.canary_answered(sent)

    # --- decisions ---

    def of_rows(self, now: float, window: int, in_flight: int, *, exhausted: bool) -> list[Denial]:
        """Takes out those that are the rows' own.

        `exhausted`: there is no other row to bring evidence. Without one the canary's is taken after a while, and the
        sum stays: it can cost so many rows as it takes to be too many, not the dataset.
        """
        found: list[Denial] = []
        while self._aside and self._sum == 0 and self._aside[0].at < self._row_answered:
            found.append(self._aside.popleft())
        idle = not in_flight and not self._fresh and not self._too_many(window)
        if self._aside and idle and (exhausted or now - self._aside[-1].at >= CANARY_SECONDS):
            found += self._aside
            self._aside.clear()
        return found

    def of_engine(self, window: int, in_flight: int) -> EngineRefused | None:
        """Why the engine is to be left, or None. While rows are in flight that may be answered, they are waited for."""
        if not self or in_flight or self.answered_row is not None:
            return None
        if self._fresh:
            return None if self._canary_error is None else told(self._canary_error)
        return self._all_denied() if self._sum >= MANY_DENIED else None

    def remove(self, is_gone: Callable[[Item], bool]) -> list[Item]:
        """Takes out rows that are asked for no more; what was seen of the engine stays."""
        gone = [denial.item for denial in (*self._aside, *self._fresh) if is_gone(denial.item)]
        self._aside = deque(denial for denial in self._aside if not is_gone(denial.item))
        self._fresh = deque(denial for denial in self._fresh if not is_gone(denial.item))
        return gone

    def give_up(self) -> list[Item]:
        """Takes out all rows: nothing was proved."""
        items = [denial.item for denial in (*self._aside, *self._fresh)]
        self._aside.clear()
        self._fresh.clear()
        return items

    def _due(self, now: float, window: int, in_flight: int) -> bool:
        if not self._fresh:
            return False
        many = len(self._fresh) >= max(1.0, window * CANARY_SHARE)
        return many or not in_flight or now - self._fresh[0].at >= CANARY_SECONDS

    def _too_many(self, window: int) -> bool:
        return self._sum >= max(MANY_DENIED, MANY_WINDOWS * window)

    def _all_denied(self) -> EngineRefused:
        last = self._aside[-1]
        if last.error.of_account:
            return told(last.error, last.item.prompt)
        return EngineRefused(
            f"expected rows to be answered, found {self._sum} refused ({last.error.code}) and none answered, "
            "though a short request without their content was: check the prompt template against what the server, or "
            f"the gateway before it, allows.{says(last.error.message, last.item.prompt)}"
        )


def told(error: EngineRefused, prompt: bytes | None = None) -> EngineRefused:
    """The refusal of a whole engine, with the server's sentence. `prompt`: what that may repeat; None where it was
    asked for nothing of a row.
    """
    if not isinstance(error, RequestDenied):
        return error
    return EngineRefused(f"{error}.{says(error.message, prompt)}")
