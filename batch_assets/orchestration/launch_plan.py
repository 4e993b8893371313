"""What to start next for a dataset, from what the catalog and the store say. Pure; the launcher sensor asks.

A *request* is a successful run tagged `batch/refresh` (make the current snapshot complete) or `batch/redrive` (try the
dead letters again). The runs started for it carry its run id in `batch/request`, so the catalog alone tells how far it
is: nothing else has to remember.

A *repair* makes batches again that were lost after the request was done with them. Nobody waits for the rows, and the
losses may be found piece by piece, so its runs are packed: as few as possible, not one for each engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from batch_assets.catalog.ranges import ATTEMPTS, KeyRange, RangeRunRecord, pack, worth_trying

RUNS_PER_INSTANCE = 2
LEAST_BATCHES = 4  # of 250 rows: about as long as a run takes to start, on a fast GPU

# settled: nothing to do until there is news. blocked: the same, but a person should know. open: look again soon.
State = Literal["settled", "blocked", "open"]


@dataclass(frozen=True, slots=True)
class Launch:
    """Ranges to start now, one sentence on why these and no others, and whether that may change without news."""

    ranges: list[KeyRange]
    reason: str
    state: State = "open"


def plan_launch(
    request: str,
    keys: Callable[[], Sequence[str]],
    wanted: Mapping[str, object],
    runs: Sequence[RangeRunRecord],
    *,
    backfill_open: bool,
    batches_per_run: int,
    room: int,
    repair: bool = False,
) -> Launch:
    """Ranges for the wanted keys of a request. `keys`: all partitions in order, read only where there is room.

    Nothing beside an open backfill, nothing for a batch that is in flight, nothing after a run of this request was
    canceled or its engine refused every request, and no batch a fourth time: three failed runs, each with its retries
    after lost workers, are an answer. Of a repair, no run that is not full while an earlier one is queued: it would be
    queued as well, and may be filled meanwhile.
    """
    own = [run for run in runs if run.request == request]
    if not wanted:
        return Launch([], "nothing is missing", "settled")
    if backfill_open:
        return Launch([], "a backfill of these batches is open")
    if any(run.outcome == "canceled" for run in own):
        return Launch([], "a run of this request was canceled: start it again to go on", "blocked")
    if any(run.outcome == "refused" for run in own):
        return Launch([], "the engine refuses every request: see its run, then start it again", "blocked")
    busy = [run.keys for run in runs if run.outcome == "unfinished"]
    left = worth_trying(wanted, own)
    most = room - len(busy)
    ranges = pack(keys(), left, busy, batches_per_run=batches_per_run, most=most) if left and most > 0 else []
    if repair and any(run.queued for run in own):
        ranges = [found for found in ranges if sum(key in found for key in left) >= batches_per_run]
    if not left:
        return Launch([], f"{len(wanted)} batches failed {ATTEMPTS} times: see their runs", "blocked")
    return Launch(ranges, f"{len(wanted)} batches wanted, {len(busy)} runs under way")


def run_size(batches_per_run: int, wanted: int, instances: int | None) -> int:
    """Batches per run for a request that may use this many instances at once; None, or one: one run after the other.

    With a deadline every instance must have a run of its own, and the last runs should end together: each new run
    takes a share of what is left (guided self-scheduling: Polychronopoulos, Kuck, IEEE Trans. Computers C-36, 1987).
    """
    if instances is None or instances <= 1:
        return batches_per_run
    share = -(-wanted // (RUNS_PER_INSTANCE * instances))
    return max(1, min(batches_per_run, max(LEAST_BATCHES, share)))
