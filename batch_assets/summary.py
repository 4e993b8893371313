"""`batch-assets run` with its display, and what it says at the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console

from batch_assets.display import display
from batch_assets.progress import duration
from batch_assets.request import Request, Runner
from batch_assets.signals import EXIT_STATUS, Interrupted, Signals

if TYPE_CHECKING:
    from batch_assets.status import DatasetStatus

UI_PORT = 3000


def carry_out(request: Request, *, as_json: bool, progress: bool) -> int:
    """Run a request with its display; returns the exit status."""
    console = Console(stderr=True)
    with Signals() as signals:
        try:
            with display(console, request.dataset, progress=progress) as shown:
                runner = Runner(request, shown, signals)
                ending = runner.run()
        except Interrupted:
            return EXIT_STATUS
    from batch_assets.report import print_json
    from batch_assets.status import dataset_status, observing

    with observing([request.dataset]) as (seen,):
        status = dataset_status(seen, time.time())
    if as_json:
        extra = {"seconds": round(runner.seconds, 1), "rows_generated": runner.generated, "complete": ending.ok}
        print_json(status.as_json() | extra)
    elif ending.ok:
        print("\n".join(success(status, runner)), flush=True)
    for warning in ending.warnings:
        console.print(f"Warning: check {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if not ending.ok:
        where = f"  look at it with `batch-assets ui`: http://127.0.0.1:{UI_PORT}" if runner.own else f"  {runner.url}"
        links = [f"{where}/runs/{run}" for run in ending.runs]
        text = "\n".join([f"{request.dataset}: {ending.said}", *links])
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    return 0 if ending.ok else 1


def success(status: DatasetStatus, runner: Runner) -> list[str]:
    """The last lines of a run that ended well."""
    engine = " by the simulated engine" if status.simulated else ""
    if runner.generated:
        made = f"{runner.generated:,} rows generated{engine} in {duration(runner.seconds)}"
    else:
        made = "nothing to generate, the table is up to date"
    counts = f"{status.ok:,} ok, {status.dead:,} dead, {status.completion_tokens:,} completion tokens"
    return [
        f"{status.dataset}: {made}",
        f"{status.table_rows or 0:,} rows in {status.batches:,} batches: {counts}",
        f"table: {status.table}",
    ]
