"""`batch-assets run` with its display, and what it says at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from batch_assets.cli.dataset_commands.run import Request, Runner
from batch_assets.cli.interrupts import EXIT_STATUS, Interrupted, Signals
from batch_assets.durations import duration
from batch_assets.request_status.display import display
from gpu_runner.fleet_database.capacity_plan import PauseKind
from gpu_runner.money import format_usd, round_up_usd

if TYPE_CHECKING:
    from batch_assets.catalog.progress import Figures
    from batch_assets.publishing.dead_letters import DeadLetterExample
    from batch_assets.request_status.dataset_status import DatasetStatus, Observer
    from batch_assets.request_status.request_monitor import RunResult
    from gpu_runner.fleet_database.capacity_plan import Pause
    from resources.store.dataset_store import DatasetStore

PAUSED_STATUS = 3
SHORT_STATUS = 4  # fewer rows than wanted were accepted


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
    status, found = summary(request, runner, ending, console, as_json=as_json)
    if as_json:
        from batch_assets.cli.output import print_json

        print_json(found)
    return status


def summary(
    request: Request, runner: Runner, ending: RunResult, console: Console, *, as_json: bool
) -> tuple[int, dict[str, Any]]:
    """Say how a request ended, with `as_json` only what is not well; returns the exit status, and what `--json` has."""
    from batch_assets.request_status.dataset_status import dataset_status, observing

    with observing([request.dataset]) as (seen,):
        status = dataset_status(seen, time.time())
        dead = dead_examples(seen, status)
        without = left_out_lines(seen.store, status)
        older = _older_part(request.dataset, seen.store)
    if not as_json:
        _say(request, runner, ending, status, [*without], dead)
    if older:
        text = f"Warning: {request.dataset}: {older}"
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    for warning in ending.warnings:
        console.print(f"Warning: check {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    found = status.as_json() | _as_json(runner, ending, dead)
    if ending.pause is not None:
        words = "\n".join(
            paused(request.dataset, ending.pause, ending.spent_usd, own=runner.own, upstream=request.upstream)
        )
        console.print(words, style="yellow", markup=False, highlight=False, soft_wrap=True)
        return PAUSED_STATUS, found
    if not ending.ok:
        url = None if runner.own else runner.url
        text = "\n".join([f"{request.dataset}: {ending.said}", *run_pointers(ending.runs, url)])
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    if ending.ok and ending.short:
        text = f"{request.dataset}: {ending.short}"
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
        return SHORT_STATUS, found
    return 0 if ending.ok else 1, found


def _say(
    request: Request,
    runner: Runner,
    ending: RunResult,
    status: DatasetStatus,
    without: Sequence[str],
    dead: Sequence[DeadLetterExample],
) -> None:
    """What is said of a request that ended well, and of its dead letters."""
    if ending.trial is not None:
        show_trial(request.dataset, ending.trial.batches)
        print("\n".join([*trial_done(status, runner, ending.trial), *without]), flush=True)
    elif ending.ok:
        print("\n".join([*success(status, runner), *without]))
        print("\n".join([_verified(request.dataset, ending), *simulated_line(status)]), flush=True)
    if dead:
        print("\n".join(dead_lines(request.dataset, dead)), flush=True)


def _as_json(runner: Runner, ending: RunResult, dead: Sequence[DeadLetterExample]) -> dict[str, Any]:
    """What `run --json` has beside the status."""
    trial = {"rows": ending.trial.rows, "batches": ending.trial.batches} if ending.trial else None
    return {
        "seconds": round(runner.seconds, 1),
        "rows_generated": runner.generated,
        "rows_taken_over": runner.taken_over,
        "complete": ending.ok and trial is None,
        "verified": ending.verification is not None,
        "verify_seconds": round(ending.verify_seconds, 1),
        "trial": trial,
        "short": ending.short or None,
        "dead_letters": [asdict(one) for one in dead],
        "paused": None if ending.pause is None else ending.pause.describe(),
        "enough_usd": None if ending.pause is None else ending.pause.enough_usd,
    }


def run_pointers(runs: Sequence[str], url: str | None) -> list[str]:
    """Where to look at the runs. `url`: of a Dagster that stays; None: it has ended, and nobody knows its next port."""
    if url is not None:
        return [f"  {url}/runs/{run}" for run in runs]
    return [f"  run {run}: `batch-assets ui` shows it" for run in runs]


def paused(dataset: str, pause: Pause, spent: float, *, own: bool, upstream: str | None = None) -> list[str]:
    """The last lines of a run that its budget or a gate stopped. `spent`: US dollars of its request by then.

    `own`: its Dagster ends with it: the next `run` is a request of its own. Else its runs wait for a larger budget.
    `upstream`: it is a step of a chain that ends with this dataset.
    """
    said = f"{dataset}: paused: {pause.describe()}"
    if pause.kind is PauseKind.QUALITY:
        return [said, *_at_gates(dataset, [gate for gate, _ in pause.gates], own=own, upstream=upstream)]
    enough = pause.enough_usd
    if own and enough is not None:
        enough = round_up_usd(enough - spent)
    command = f"batch-assets {'run' if own else 'adjust'} {dataset} --budget-usd"
    if enough is None:
        unknown = "nothing that could do the rest is offered now, so nobody knows which budget would do"
        return [said, f"{unknown}: `batch-assets plan {dataset}` says it later; what is finished is kept"]
    if own and upstream is not None:
        step = f"{format_usd(enough)} $ would do for this step alone"
        todo = f"`batch-assets run {upstream} --upstream --budget-usd` with more for all steps goes on from there"
        return [said, f"this is its share of the budget of {upstream}; {step}: {todo}; what is finished is kept"]
    of = "for the next run" if own else "for the whole request"
    number = format_usd(enough).replace(",", "")
    return [
        said,
        f"a budget of {format_usd(enough)} $ {of} would do: `{command} {number}` goes on from there; "
        "what is finished is kept",
    ]


def _at_gates(dataset: str, gates: Sequence[str], *, own: bool, upstream: str | None) -> list[str]:
    """What there is to be seen of rows that were paused for, and both ways on."""
    run = f"run {dataset}" if upstream is None else f"run {upstream} --upstream"
    options = " ".join(f"{'--accept-gate' if own else '--accept'} {gate}" for gate in gates)
    command = f"batch-assets {run if own else f'adjust {dataset}'} {options}"
    return [
        f"batch-assets show {dataset} --order newest: shows the rows; --errors those without an answer",
        f"mend the prompt or the sampling, and `batch-assets {run}` asks again what that changes; or `{command}` goes "
        "on as it is; what is finished is kept",
    ]


def _verified(dataset: str, ending: RunResult) -> str:
    """What the success rests on."""
    from batch_assets.cli.dataset_commands.status_command import verified

    if ending.verification is None:
        return f"{dataset}: not verified: names and sizes were compared"
    return f"{verified(dataset, ending.verification)} (verified in {duration(ending.verify_seconds)})"


def show_trial(dataset: str, batches: int) -> None:
    """A few rows of a trial."""
    from batch_assets.cli.dataset_commands.show import TRIAL_LETTERS, printer, say_row, trial_sample

    say = printer()
    for row in trial_sample(dataset, batches).rows:
        say_row(say, row, TRIAL_LETTERS)


def dead_examples(seen: Observer, status: DatasetStatus) -> list[DeadLetterExample]:
    """The dead letters by error, each with an example; none where the list is not of the rows that are there now."""
    from batch_assets.publishing.dead_letters import current_dead_letters, dead_letter_examples, dead_letter_rows
    from resources.objects.opening import CorruptObject
    from resources.objects.store_health import is_store_trouble

    if not status.dead or status.snapshot is None:
        return []
    try:
        version = current_dead_letters(seen.store)
        if version is None or dead_letter_rows(seen.store, version) != status.dead:
            return []
        return dead_letter_examples(seen.store, seen.store.manifest(status.snapshot))
    except (CorruptObject, FileNotFoundError):
        return []  # `verify` says so
    except Exception as error:
        if not is_store_trouble(error):
            raise
        return []


def _older_part(dataset: str, store: DatasetStore) -> str:
    from batch_assets.orchestration.source_place import older_part
    from batch_assets.spec.discovery import known_datasets
    from resources.objects.opening import StoreError

    found = known_datasets().get(dataset)
    try:
        return older_part(found[0].source, store.objects) if found is not None else ""
    except StoreError:
        return ""  # the status says it


def left_out_lines(store: DatasetStore, status: DatasetStatus) -> list[str]:
    """How many rows of the source are left out, why the first of them is, and where all are listed."""
    from batch_assets.snapshot.left_out import first_reject, left_out

    if not status.rejected or status.snapshot is None:
        return []
    first = first_reject(store, status.snapshot)
    said = f"{status.dataset}: {left_out(status.rejected, status.source_rows)}"
    return [said if first is None else f"{said}, the first: {first}", f"left out: {status.rejects}"]


def dead_lines(dataset: str, dead: Sequence[DeadLetterExample]) -> list[str]:
    """The dead letters by error, each with an example, and the command that tries them again."""
    width = max(len(f"{one.rows:,}") for one in dead)
    lines = []
    for one in dead:
        says = f": {one.says}" if one.says else ""
        lines.append(f"  {one.rows:>{width},} {one.error}, as row {one.row_id}{says}")
    return [
        "dead letters:",
        *lines,
        f"batch-assets redrive {dataset} [--error CODE]: tries them again, and nothing else",
    ]


def trial_done(status: DatasetStatus, runner: Runner, trial: Figures) -> list[str]:
    """The last lines of a trial that ended well and left batches over."""
    made = _made(runner) or "all there"
    batches = "the first batch" if trial.batches == 1 else f"the first {trial.batches:,} batches"
    tokens = f"{trial.prompt_tokens:,} prompt and {trial.completion_tokens:,} completion tokens"
    return [
        f"{status.dataset}: trial of {trial.rows:,} rows, {batches} of {status.batches:,}: {made}",
        f"{trial.ok:,} ok, {trial.dead:,} dead, {tokens}",
        f"batch-assets show {status.dataset}: shows more rows, --errors those without an answer",
        f"batch-assets run {status.dataset}: generates the other {status.rows - trial.rows:,} rows and publishes the "
        "table; these are not asked again",
    ]


def success(status: DatasetStatus, runner: Runner) -> list[str]:
    """The last lines of a run that ended well."""
    engine = " by the simulated engine" if status.simulated else ""
    if runner.request.redrive_error is not None:
        before = runner.dead_before or 0
        made = f"{max(0, before - status.dead):,} of {before:,} dead letters are answered now"
        made = made if before else "there are no dead letters to try again"
    else:
        made = _made(runner, engine) or "nothing to generate, the table is up to date"
    counts = f"{status.ok:,} ok, {status.dead:,} dead, {status.completion_tokens:,} completion tokens"
    rows = status.table_rows or 0
    batches = "1 batch" if status.batches == 1 else f"{status.batches:,} batches"
    same = f", {status.rows:,} of them asked, the others ask the same" if rows > status.rows else ""
    return [
        f"{status.dataset}: {made}",
        f"{rows:,} rows in {batches}{same}: {counts}",
        f"table: {status.table}",
        f"batch-assets show {status.dataset}: shows rows, --order sample some at random; "
        f"batch-assets view {status.dataset}: all of them in a browser",
    ]


def _made(runner: Runner, engine: str = "") -> str:
    """Rows that were asked now, and those that a run before had asked for; empty where there are none."""
    taken = f"{runner.taken_over:,} rows that an earlier run had finished were taken over" if runner.taken_over else ""
    if not runner.generated:
        return f"no row was asked, {taken}" if taken else ""
    made = f"{runner.generated:,} rows generated{engine} in {duration(runner.seconds)}"
    return f"{made}, {taken}" if taken else made


def simulated_line(status: DatasetStatus) -> list[str]:
    """The last line of all, as long as one row of the table is simulated."""
    if not status.simulated:
        return []
    return [f"{status.dataset}: simulated: its texts are made up by an engine simulator, not by a language model"]
