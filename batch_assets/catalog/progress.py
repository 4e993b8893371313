"""How far a dataset is, as numbers: pure functions over ledger entries, run beats and a clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batch_assets.catalog.ranges import ATTEMPTS, RangeRunRecord, worth_trying

if TYPE_CHECKING:  # heavy, and the display needs them only when there is something to show
    from batch_assets.catalog.catalog_reader import BatchReport
    from resources.store.dataset_store import BatchEntry

WINDOW_SECONDS = 20.0
RECENT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts of one snapshot. `ok`, `dead` and tokens are those of committed batches.

    `rows_reused` of the committed rows have the outcome of an earlier object; the others by the run that asked for
    them: `asked_by`. `open_rows` are finished rows of batches
    that are not committed yet: they show that something moves.
    """

    rows: int
    batches: int
    batches_done: int
    rows_committed: int
    ok: int
    dead: int
    prompt_tokens: int
    completion_tokens: int
    open_rows: int = 0
    rows_reused: int = 0
    asked_by: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def rows_done(self) -> int:
        """Committed and open rows; never more than there are."""
        return min(self.rows, self.rows_committed + self.open_rows)

    @property
    def complete(self) -> bool:
        """Every batch of the snapshot is committed."""
        return self.batches_done == self.batches

    @property
    def tokens_per_row(self) -> float:
        """Completion tokens of a committed row on average."""
        return self.completion_tokens / self.rows_committed if self.rows_committed else 0.0


def figures(
    batches: Sequence[BatchEntry], current: Mapping[str, BatchReport], rows_of_runs: Mapping[str, int]
) -> Figures:
    """Figures from the snapshot's batches and the current reports among them.

    `rows_of_runs` holds the rows that each living run says it has finished; those in batches that the run committed
    are counted once.
    """
    committed: Counter[str] = Counter()
    asked_by: Counter[str] = Counter()
    for report in current.values():
        committed[report.author or ""] += report.rows
        asked_by[report.author or ""] += report.rows - report.reused - sum(report.journaled.values())
        asked_by.update(report.journaled)
    return Figures(
        rows=sum(batch.rows for batch in batches),
        batches=len(batches),
        batches_done=len(current),
        rows_committed=sum(report.rows for report in current.values()),
        ok=sum(report.ok for report in current.values()),
        dead=sum(report.dead for report in current.values()),
        prompt_tokens=sum(report.prompt_tokens for report in current.values()),
        completion_tokens=sum(report.completion_tokens for report in current.values()),
        open_rows=sum(max(0, rows - committed[run]) for run, rows in rows_of_runs.items()),
        rows_reused=sum(report.reused for report in current.values()),
        asked_by=dict(asked_by),
    )


class Meter:
    """Rows per second over the last `window` seconds, from (time, rows done) samples of one observer."""

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self._window = window
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, now: float, rows_done: int) -> None:
        """One sample. What came before the first row, or before rows were lost again, is not measured."""
        if self._samples and (rows_done < self._samples[-1][1] or rows_done == self._samples[0][1]):
            self._samples.clear()
        self._samples.append((now, rows_done))
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._window:
            self._samples.popleft()

    def rate(self) -> float:
        """Rows per second; 0 until two samples lie a second apart."""
        if not self._samples:
            return 0.0
        (began, first), (now, last) = self._samples[0], self._samples[-1]
        return (last - first) / (now - began) if now - began >= 1 else 0.0


def recent_rate(reports: Iterable[BatchReport], now: float, working_since: float | None) -> float:
    """Rows per second committed lately by runs that live since `working_since` (Unix seconds); 0 when none does."""
    if working_since is None:
        return 0.0
    since = max(working_since, now - RECENT_SECONDS)
    rows = sum(report.rows for report in reports if report.fresh and report.reported_at >= since)
    return rows / max(1.0, now - since)


def eta_seconds(rows_left: int, rate: float) -> float | None:
    """Seconds until the rest is done; None while nothing moves."""
    if rows_left <= 0:
        return 0.0
    return rows_left / rate if rate > 0 else None


def dead_end(missing: Sequence[str], runs: Sequence[RangeRunRecord], request: str, *, backfill_open: bool) -> str:
    """Why nothing more will be started for this request, or "" while something runs or will.

    The same rules as `launcher.plan_launch`: a run that was canceled, or refused by its engine, ends the
    request, and no batch is tried a fourth time.
    """
    if not missing or backfill_open or any(run.outcome == "unfinished" for run in runs):
        return ""
    own = [run for run in runs if run.request == request]
    if any(run.outcome == "canceled" for run in own):
        return f"canceled: {named(missing)} not committed"
    if any(run.outcome == "refused" for run in own):
        return f"refused by the engine: {named(missing)} not committed"
    if not worth_trying(missing, own):
        return f"failed {ATTEMPTS} times: {named(missing)} not committed"
    return ""


def named(batches: Sequence[str], most: int = 10) -> str:
    """`batch 00003 is` / `12 batches (00003, 00004, …) are`: a subject with its verb."""
    if len(batches) == 1:
        return f"batch {batches[0]} is"
    keys = ", ".join(batches[:most]) + (", …" if len(batches) > most else "")
    return f"{len(batches)} batches ({keys}) are"
