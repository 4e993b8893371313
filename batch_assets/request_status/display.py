"""What `batch-assets` shows while it works: progress on standard error, tables of datasets and runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batch_assets.catalog.progress import Figures, eta_seconds
from batch_assets.durations import duration
from gpu_runner.money import format_usd

if TYPE_CHECKING:
    from batch_assets.orchestration.request_summary import RequestStatus
    from batch_assets.request_status.dataset_status import DatasetStatus
    from batch_assets.request_status.request_monitor import ProgressUpdate
    from gpu_runner.fleet_database.clock_jumps import ClockJump
    from gpu_runner.fleet_database.reporting.backup_note import BackupNote

PLAIN_SECONDS = 10.0
LONGEST_PLAIN_SECONDS = 300.0


class Display(Protocol):
    """Where moments and remarks go."""

    def show(self, moment: ProgressUpdate) -> None:
        """Where the work is now."""

    def say(self, text: str) -> None:
        """One remark that stays readable."""


class Silent:
    """Shows remarks only (`--no-progress`)."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, moment: ProgressUpdate) -> None:
        pass

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Lines(Silent):
    """For logs and pipes: a line when the phase changes, and every ten seconds while lines differ.

    A line that stays as it was comes after twice as long each time, five minutes at most, and says since when.
    """

    def __init__(self, console: Console, dataset: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._dataset, self._clock = dataset, clock
        self._phase, self._line = "", ""
        self._began = self._said_at = float("-inf")
        self._wait = PLAIN_SECONDS

    def show(self, moment: ProgressUpdate) -> None:
        now, new_phase = self._clock(), moment.phase != self._phase
        if moment.phase == "end" or not (new_phase or now - self._said_at >= PLAIN_SECONDS):
            return
        counts = f"{counts_line(moment.figures, moment.rate)}; " if moment.figures else ""
        line = f"{self._dataset}: {counts}{moment.said}"
        if new_phase or line != self._line:
            self._phase, self._line, self._began, self._wait = moment.phase, line, now, PLAIN_SECONDS
            self.say(line)
        elif now - self._said_at >= self._wait:
            self._wait = min(LONGEST_PLAIN_SECONDS, 2 * self._wait)
            self.say(f"{line} (unchanged for {duration(now - self._began)})")
        else:
            return
        self._said_at = now


class Bar(Silent):
    """A live bar with the figures below it."""

    def __init__(self, console: Console, dataset: str, live: Live) -> None:
        super().__init__(console)
        self._dataset, self._live = dataset, live

    def show(self, moment: ProgressUpdate) -> None:
        self._live.update(bar(self._dataset, moment), refresh=True)


@contextlib.contextmanager
def display(console: Console, dataset: str, *, progress: bool) -> Iterator[Display]:
    """The display that suits the console: a bar on a terminal, lines elsewhere, remarks only without progress."""
    if not progress:
        yield Silent(console)
    elif not console.is_terminal:
        yield Lines(console, dataset)
    else:
        with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
            yield Bar(console, dataset, live)


def bar(dataset: str, moment: ProgressUpdate) -> Group:
    """Three lines: the bar, the figures, what the runs say."""
    counts = moment.figures or Figures(0, 0, 0, 0, 0, 0, 0, 0)
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, min_width=10)
    grid.add_column(justify="right", no_wrap=True)
    share = f"{counts.rows_done / counts.rows:4.0%}" if counts.rows else "    "
    reading = moment.figures is None
    grid.add_row(
        Text(dataset, style="bold"),
        ProgressBar(total=None if reading else max(1, counts.rows), completed=counts.rows_done, pulse=reading),
        Text(share if not reading else "", style="cyan"),
    )
    lines = [] if reading else [Text(counts_line(counts, moment.rate))]
    return Group(grid, *lines, Text(moment.said, style="dim", overflow="ellipsis", no_wrap=True))


def counts_line(counts: Figures, rate: float) -> str:
    """`1,500 of 5,000 rows · 1,498 ok · 2 dead · 6 of 20 batches · 412 rows/s · 40,112 tokens/s · ETA 8 s`"""
    parts = [
        f"{counts.rows_done:,} of {counts.rows:,} rows",
        f"{counts.ok:,} ok",
        f"{counts.dead:,} dead",
        f"{counts.batches_done:,} of {counts.batches:,} batches",
    ]
    if rate > 0 and not counts.complete:
        parts.append(f"{rate:,.0f} rows/s" if rate >= 10 else f"{rate:.2g} rows/s")
        if counts.tokens_per_row:
            parts.append(f"{rate * counts.tokens_per_row:,.0f} tokens/s")
        parts.append(f"ETA {duration(eta_seconds(counts.rows - counts.rows_done, rate))}")
    return " · ".join(parts)


SHOWN_PROBLEMS = 3


def status_table(
    statuses: list[DatasetStatus], *, dagster_runs: bool, now: float, depths: Mapping[str, int] = MappingProxyType({})
) -> Group:
    """The datasets as a table, what is wanted of them and their unfinished runs below. `now`: Unix seconds.

    `depths`: of the datasets in their chains. Where there are chains, they are a tree, with what each step cost.
    """
    chains = any(depths.values())
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("dataset", no_wrap=True)
    for name in ("rows", "ok", "dead", "batches", "rows/s", "ETA", *(["$"] if chains else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("table", overflow="fold")
    lines: list[Text] = []
    waiting = False
    for status in statuses:
        batches = f"{status.batches_done:,} of {status.batches:,}" if status.snapshot else "no snapshot"
        working = status.rows_per_second > 0
        rate, eta = (f"{status.rows_per_second:,.1f}", duration(status.eta_seconds)) if working else ("", "")
        counts = (f"{number:,}" for number in (status.rows, status.ok, status.dead))
        money = [format_usd(status.request.usd_total)] if chains else []
        table.add_row(_branch(status.dataset, depths), *counts, batches, rate, eta, *money, table_words(status))
        waiting = waiting or bool(status.runs)
        found = [
            *problem_lines(status),
            *left_out_lines(status),
            *judge_lines(status),
            *filter_lines(status),
            *failure_lines(status),
        ]
        told = [*found, *_request_lines(status, now), *run_lines(status)]
        lines += [Text(f"  {line}") for line in told]
    if waiting and not dagster_runs:
        lines.append(Text("  Dagster is not running here: these runs wait until `batch-assets ui` or `run` starts it."))
    return Group(table, *lines)


def _branch(name: str, depths: Mapping[str, int]) -> str:
    depth = depths.get(name, 0)
    return f"{'  ' * (depth - 1)}└ {name}" if depth else name


def table_words(status: DatasetStatus) -> str:
    """Which table there is, and whether it is that of the snapshot."""
    if status.streaming is not None:
        return str(status.streaming)
    if status.table_version is None:
        return "none yet"
    state = "current" if status.table_current else "of an earlier state"
    return f"{status.table_version}, {state}" + (", simulated" if status.simulated else "")


def judge_lines(status: DatasetStatus) -> list[str]:
    """How many rows the dataset judged, what came of it, and how many votes do not count."""
    if status.rows_judged is None:
        return []
    figures = {name: value for name, value in (status.judge_figures or {}).items() if value is not None}
    names = {"score": "mean score", "alpha": "Krippendorff's alpha", "first_wins": "first of two wins"}
    said = "".join(f", {names.get(name, name)} {value:.3g}" for name, value in figures.items())
    lost = f"; {status.votes_lost:,} of {status.votes:,} votes do not count" if status.votes_lost else ""
    return [f"{status.dataset}: {status.rows_judged:,} rows judged{said}{lost}"]


def filter_lines(status: DatasetStatus) -> list[str]:
    """How many rows of the table pass its filter, and by which rules the others fell out."""
    if status.rows_passed is None or status.rows_fallen is None:
        return []
    counts = {name: count for name, count in (status.fallen_by_rule or {}).items() if count}
    rules = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    rules += ", some by several of these" if sum(counts.values()) > status.rows_fallen else ""
    said = f"{status.rows_passed:,} of {status.rows_passed + status.rows_fallen:,} rows pass the filter"
    if status.rows_wanted is not None:
        missing = status.rows_wanted - status.rows_passed
        said += f", {status.rows_wanted:,} are wanted" + (f": {missing:,} are missing" if missing > 0 else "")
    return [f"{status.dataset}: {said}{f' (fell out: {rules})' if rules else ''}"]


def _request_lines(status: DatasetStatus, now: float) -> list[str]:
    """What is wanted, and what its seconds and dollars mean where a clock is scaled."""
    wanted = request_lines(status, now)
    return [*wanted, status.request.clock] if wanted and status.request.clock else wanted


def problem_lines(status: DatasetStatus) -> list[str]:
    """What the store lacks or why it cannot be read, the first few of it, and what to do."""
    if not status.problems:
        return []
    more = len(status.problems) - SHOWN_PROBLEMS
    rest = [f"{status.dataset}: and {more:,} more"] if more > 0 else []
    name = status.dataset
    todo = f"{name}: `batch-assets verify {name}` says more, `batch-assets run {name}` mends what can be mended"
    return [f"{status.dataset}: {line}" for line in status.problems[:SHOWN_PROBLEMS]] + rest + [todo]


def left_out_lines(status: DatasetStatus) -> list[str]:
    """How many rows of the source the snapshot leaves out; nothing where it takes them all."""
    if not status.rejected:
        return []
    from batch_assets.snapshot.left_out import left_out

    return [f"{status.dataset}: {left_out(status.rejected, status.source_rows)}: {status.rejects}"]


def failure_lines(status: DatasetStatus) -> list[str]:
    """When and why the last refresh failed; nothing where it did not."""
    failed = status.refresh_failed
    if failed is None:
        return []
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(failed.failed_at))
    reason = failed.reason.strip().partition("\n")[0].rstrip(":")
    todo = f"`batch-assets run {status.dataset}` tries again"
    return [f"{status.dataset}: the last refresh failed, {moment}: {reason}; {todo}"]


def request_lines(status: DatasetStatus, now: float) -> list[str]:
    """Deadline and money of the request under way, or how the last one ended; nothing when nobody wants anything."""
    wanted = status.request
    money = f"{format_usd(wanted.usd_spent)} $ spent" + (
        f" of {format_usd(wanted.budget_usd)} $" if wanted.budget_usd else ""
    )
    money += f", {format_usd(wanted.usd_wasted)} $ of it wasted" if wanted.usd_wasted >= 0.005 else ""
    if wanted.finished_at is not None:
        money = _spent_in_all(wanted)
        if wanted.missing:
            todo = f"`batch-assets run {status.dataset}` goes on from there"
            return [f"{status.dataset}: given up with {wanted.missing:,} batches missing, {money}: {todo}"]
        if status.refresh_failed is not None:
            return [f"{status.dataset}: {money}"]
        if wanted.deadline is None:
            return [f"{status.dataset}: done, {money}"]
        margin = wanted.deadline - wanted.finished_at
        verdict = f"{duration(abs(margin))} {'before' if margin >= 0 else 'after'} its deadline"
        return [f"{status.dataset}: done {verdict}, {money}"]
    if wanted.request is None:
        return []
    found = []
    if wanted.deadline is not None:
        state = {True: "on time", False: "LATE", None: "not planned yet"}[wanted.on_time]
        moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(wanted.deadline))
        found.append(f"deadline {moment}, {_from_now(wanted.deadline, now)}: {state}")
    if wanted.finish_p50 is not None and wanted.finish_p95 is not None:
        first, last = wanted.finish_p50 - now, wanted.finish_p95 - now
        found.append(f"expected {_from_now(wanted.finish_p50, now)} (P50) to {duration(max(first, last, 0))} (P95)")
    if wanted.usd_p50 is not None and wanted.usd_p95 is not None:
        money += f", {format_usd(wanted.usd_p50)} to {format_usd(wanted.usd_p95)} $ expected in all"
    lines = [f"{status.dataset}: {'; '.join([*found, money])}"]
    if wanted.paused:
        lines.append(f"paused: {wanted.paused}")
    elif wanted.reason:
        lines.append(f"{wanted.instances} instance{'s' * (wanted.instances != 1)}: {wanted.reason}")
    return lines


def _spent_in_all(wanted: RequestStatus) -> str:
    """What the dataset cost, as its bill has it; of that the last request, which may have had nothing to do."""
    total = format_usd(wanted.usd_total)
    money = f"{total} $ spent in all"
    if (last := format_usd(wanted.usd_spent)) != total:
        money += f", {last} $ by the last request"
    if wanted.budget_usd:
        money += f" (its budget: {format_usd(wanted.budget_usd)} $)"
    if wanted.usd_simulated_total >= 0.005:
        money += f", {format_usd(wanted.usd_simulated_total)} $ of it simulated"
    wasted = wanted.usd_wasted_total
    return money + (f", {format_usd(wasted)} $ of it wasted" if wasted >= 0.005 else "")


def _from_now(moment: float, now: float) -> str:
    return f"in {duration(moment - now)}" if moment >= now else f"{duration(now - moment)} ago"


def clock_lines(jumps: Sequence[ClockJump]) -> list[str]:
    """One line per step of the clock of the fleet's database."""
    return [
        f"the clock was set {'back' if one.seconds < 0 else 'forward'} by {duration(abs(one.seconds))}, "
        f"{duration(one.age)} ago: leases, bills and relative deadlines go on without it"
        for one in jumps
    ]


def backup_lines(last: BackupNote) -> list[str]:
    """What is known of backups of the databases; nothing where none was ever asked for."""
    made = "no backup of the databases yet"
    if last.age_seconds is not None:
        made = f"last backup of the databases: {duration(last.age_seconds)} ago, {last.stored_bytes / 1e6:,.1f} MB"
    failed = f"; a later one failed: {last.failure}" if last.failure else ""
    return [made + failed] if last.backup or last.failure else []


def run_lines(status: DatasetStatus) -> list[str]:
    """One line per unfinished run."""
    return [
        f"{line.run_id[:8]} {line.what}: {line.status.lower()}, {duration(line.age_seconds)} old"
        + (f", {line.note}" if line.note else "")
        + (f", {line.rows_done:,} rows" if line.rows_done else "")
        for line in status.runs
    ]
