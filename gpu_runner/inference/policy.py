"""The numbers that a feed goes by."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gpu_runner.inference.failures.retry import RetryPolicy
from gpu_runner.inference.late_rows import HedgePolicy
from gpu_runner.inference.prefix_order import PrefixPolicy
from gpu_runner.inference.windows.concurrency_window import WindowPolicy
from gpu_runner.micro_batches.list_limits import ListLimits

NEVER = 366 * 86_400.0


@dataclass(frozen=True, slots=True)
class FeedPolicy:
    """Seconds, rows and counts; the defaults suit real engines, tests use smaller ones.

    `stall_seconds` without progress end an engine; one that shows no metrics gets `blind_factor` times that.
    An engine is lost when /health failed `health_tries` times in a row over at least `dead_seconds`.
    `suspect_deaths`: engine deaths after which a row is tried alone. `alone_deaths`: deaths alone that make a
    dead letter; two, because an engine may also die by chance.
    `commits` on_batch calls run at once; no batch is read while `commit_backlog` wait for one, nor while more
    rows are open than `open_windows` windows (at least `open_rows`). `ahead` rows are read in advance, or a
    quarter of the window when that is more: of those that go before what is read next, and `urgent_factor` times as
    many in all that were never sent. No batch is read while prompts of `ahead_bytes` or more are ready.
    `open_bytes` of answers in memory stop the reading and asking of rows, but for the oldest batch. The answers of one
    batch may have `batch_bytes`, or 64 KiB a row where that is more. Commits of more than `commit_bytes` run alone.
    `prefixes`: whether rows are sent in the order of their prompts. `lists`: of rows that go in one request, where the
    engine takes several. `hedging`: of rows that are late.
    `holds_back`: rows that are to be asked again wait for another engine, while this one has others to do.
    """

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    window: WindowPolicy = field(default_factory=WindowPolicy)
    poll_seconds: float = 1.0
    stall_seconds: float = 120.0
    blind_factor: float = 5.0
    health_tries: int = 3
    dead_seconds: float = 2.0
    suspect_deaths: int = 2
    alone_deaths: int = 2
    commits: int = 4
    commit_backlog: int = 16
    open_windows: int = 8
    open_rows: int = 16_000
    ahead: int = 500
    urgent_factor: int = 4
    ahead_bytes: int = 64 << 20
    open_bytes: int = 64 << 20
    batch_bytes: int = 64 << 20
    commit_bytes: int = 32 << 20
    prefixes: PrefixPolicy = field(default_factory=PrefixPolicy)
    lists: ListLimits = field(default_factory=ListLimits)
    hedging: HedgePolicy = field(default_factory=HedgePolicy)
    holds_back: bool = False

    def for_batches(self, rows: int, holds_back: bool) -> FeedPolicy:
        """For an engine whose answers come hours later, all at once: so many rows are in flight, none of them is ever
        late, and an engine that is silent is not stalled.
        """
        window = replace(self.window, per_slot=1, largest=rows)
        hedging = replace(self.hedging, floor_seconds=NEVER)
        return replace(self, window=window, stall_seconds=NEVER, hedging=hedging, holds_back=holds_back)
