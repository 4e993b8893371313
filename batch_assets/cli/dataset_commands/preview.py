"""What `batch-assets preview NAME` prints: the first rows as rendered and, with an engine, answers, money and time."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from batch_assets import settings
from batch_assets.capacity_planning.planner_input import FleetView, Proposal, propose
from batch_assets.capacity_planning.preview_rows import PreviewRow, ask_rows, first_rows, measured_work
from batch_assets.capacity_planning.token_count import TokenCounter, token_counter
from batch_assets.capacity_planning.workload_estimate import work_of_source
from batch_assets.cli.arguments import readable
from batch_assets.cli.dataset_commands.row_text import indented, output_text, plain, say_prompt
from batch_assets.cli.output import print_json
from batch_assets.cli.user_errors import error_console
from batch_assets.durations import duration
from batch_assets.local_dagster.local_fleet import the_fleet
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.models import GeneratedDatasetSpec
from gpu_runner.bounded_http.key_variables import key_in
from gpu_runner.bounded_http.tls_files import TlsFiles
from gpu_runner.client.engine_client import EngineError
from gpu_runner.errors import ExitStatus, UserFacingError
from gpu_runner.money import format_usd
from gpu_runner.planner.types import ControlTiming
from gpu_runner.request_limits import NO_LIMITS, RequestLimits
from resources.fleet.engine_tls import tls_of_environment
from resources.fleet.fleet_config import KEY_VARIABLE
from resources.fleet.resource import EngineConfig, EngineHeld, EngineStartError, FleetConfigError, Requirement

SHOWN_FIELDS = 200  # letters of the request fields of a row


class PreviewError(UserFacingError):
    """The first rows cannot be shown: says why."""

    exit_status = ExitStatus.WRONG_REQUEST


@dataclass(frozen=True, slots=True)
class Engine:
    """Where the rows are asked, the key to send there, and what it may be asked. `starts`: it is started for them, and
    has no URL before.
    """

    url: str
    api_key: str | None
    tls: TlsFiles | None = None
    starts: EngineConfig | None = None
    limits: RequestLimits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class Preview:
    """Rows, how their tokens were counted and, with an engine, seconds for all of them and what the rest will take."""

    dataset: str
    model: str
    rows: Sequence[PreviewRow]
    counter: TokenCounter
    seconds: float | None = None
    proposal: Proposal | None = None


def engine_named(name: str, model: str) -> Engine:
    """An engine of fleet.yaml. Raises PreviewError when there is none of this name, or it does not serve the model."""
    engines = {engine.name: engine for engine in the_fleet().config().engines}
    if name not in engines:
        known = ", ".join(sorted(engines)) or "none"
        raise PreviewError(f"--engine: expected an engine of fleet.yaml, found {name!r}; known: {known}")
    engine = engines[name]
    if engine.models and model not in engine.models:
        raise PreviewError(f"--engine: expected one that serves {model}, found {name}: {', '.join(engine.models)}")
    starts = engine if engine.url is None else None
    return Engine(engine.url or "", engine.api_key, engine.tls_files, starts, engine.limits)


def engines_of(model: str) -> list[str]:
    """Names of the engines of fleet.yaml that serve a model; none where that file cannot be used."""
    try:
        engines = the_fleet().config().engines
    except FleetConfigError:
        return []
    return [engine.name for engine in engines if not engine.models or model in engine.models]


def user_engine(spec: GeneratedDatasetSpec) -> EngineConfig | None:
    """The engine of fleet.yaml that plays the user, where one is named. Raises PreviewError."""
    user = spec.prompt.user_model
    if user is None or user.engine is None or user.model is None:
        return None
    try:
        return the_fleet().config().user_engine(user.engine, user.model)
    except FleetConfigError as error:
        raise PreviewError(f"{spec.name}: {error}") from None


@contextlib.contextmanager
def _running(engine: Engine, spec: GeneratedDatasetSpec) -> Iterator[Engine]:
    """The engine while it answers. Raises PreviewError when it does not start, or a run has it."""
    if engine.starts is None:
        yield engine
        return
    hardware, settings = spec.hardware, spec.generation()
    need = Requirement(
        f"preview/{spec.name}",
        settings.model,
        settings.task,
        max_model_len=hardware.max_model_len,
        declared=spec.declared(settings.model),
        engine=spec.engine,
    )
    error_console().print(
        f"Starting {engine.starts.name} for these rows; it ends with this command", highlight=False, soft_wrap=True
    )
    try:
        with the_fleet().engine_held(engine.starts, need, str(uuid.uuid4())) as standing:
            yield dataclasses.replace(engine, url=standing.endpoint)
    except (EngineHeld, EngineStartError) as error:
        raise PreviewError(f"--engine {engine.starts.name}: {error}") from None


def engine_at(url: str, of_environment: str | None) -> Engine:
    """The engine at an address of the command line; the key goes along unless it was given for another address."""
    given = of_environment is None or of_environment == url
    return Engine(url, (key_in(KEY_VARIABLE)) if given else None, tls_of_environment())


def show_preview(spec: GeneratedDatasetSpec, folder: Path, rows: int, engine: Engine | None, *, json: bool) -> int:
    """Print the preview; returns the exit status: 1 when a row was refused or not answered.

    Raises PreviewError for a source that cannot be read or an engine that does not serve the model.
    """
    found = preview(spec, folder, rows, engine)
    if json:
        print_json(as_json(found))
    else:
        _print(found, asked=engine is not None)
    return int(any(row.refused or (row.answer is not None and row.answer.problem) for row in found.rows))


def preview(spec: GeneratedDatasetSpec, folder: Path, rows: int, engine: Engine | None) -> Preview:
    """Render the first rows, ask the engine, and plan for the whole dataset as if it were all like them."""
    try:
        spec = readable(spec)
        found = first_rows(spec, folder, rows)
        counter = token_counter(spec.model)
        if engine is None:
            return Preview(spec.name, spec.model, found, counter)
        user = user_engine(spec)
        with _running(engine, spec) as running:
            asked, seconds = ask_rows(
                found, spec.generation(), running.url, running.api_key, running.tls, user, running.limits
            )
        work = measured_work(work_of_source(spec, folder), asked)
    except (SourceError, EngineError) as error:
        raise PreviewError(f"{spec.name}: {error}") from None
    if work is None:
        return Preview(spec.name, spec.model, asked, counter, seconds)
    fleet = the_fleet()
    with fleet.open_database() as fleet_db:
        timing = ControlTiming.of_sensor(settings.capacity_seconds())
        plan = propose(FleetView.look(fleet, fleet_db), fleet_db, spec, work, {}, timing)
    return Preview(spec.name, spec.model, asked, counter, seconds, plan)


def as_json(found: Preview) -> dict[str, Any]:
    """Plain values, stable keys."""
    whole = found.proposal
    chosen = whole.plan.chosen if whole is not None else None
    return {
        "dataset": found.dataset,
        "model": found.model,
        "prompt_tokens_basis": found.counter.basis,
        "rows": [_row_json(row, found.counter) for row in found.rows],
        "seconds": None if found.seconds is None else round(found.seconds, 3),
        "dataset_rows": whole.work.rows if whole is not None else None,
        "dataset_tokens": round(whole.work.tokens) if whole is not None else None,
        "usd": {"p50": chosen.usd.p50, "p95": chosen.usd.p95} if chosen is not None else None,
        "seconds_rented": {"p50": chosen.finish.p50, "p95": chosen.finish.p95} if chosen is not None else None,
        "seconds_here_at_most": _seconds_here(found),
    }


def _row_json(row: PreviewRow, counter: TokenCounter) -> dict[str, Any]:
    prompt = row.decoded()
    said: dict[str, Any] = {"file": row.file, "line": row.line, "prompt": row.shown(), "refused": row.refused or None}
    if row.fields:
        said["request_fields"] = row.own_fields
    if row.turns:
        said["turns"] = list(row.turns)
    if row.user_system is not None:
        said["user_system"] = row.user_system
    said["prompt_tokens_before"] = None if prompt is None else counter.of(prompt)
    answer = row.answer
    completion = dataclasses.asdict(answer.completion) if answer is not None and answer.completion is not None else None
    return said | {
        "answer": completion,
        "problem": (answer.problem or None) if answer is not None else None,
        "seconds": round(answer.seconds, 3) if answer is not None else None,
    }


def _seconds_here(found: Preview) -> float | None:
    """Seconds of the whole dataset on this engine, at no more rows at once than were asked now."""
    answered = sum(row.answer is not None and row.answer.completion is not None for row in found.rows)
    if found.proposal is None or not found.seconds or not answered:
        return None
    return round(found.proposal.work.rows * found.seconds / answered, 1)


def _print(found: Preview, *, asked: bool) -> None:
    console = Console()

    def say(text: str = "", style: str = "") -> None:
        console.print(Text(plain(text), style=style), soft_wrap=True)

    for number, row in enumerate(found.rows, 1):
        _print_row(say, number, row, found.counter)
    if not found.rows:
        say(f"{found.dataset}: the source has no row that `where` lets through", "red")
        return
    say(f"prompt tokens: {found.counter.basis}" + ("; `as the engine counted` where it answered" if asked else ""))
    for line in _whole_lines(found):
        say(line)
    if not asked:
        engine = next((f"--engine {name}" for name in engines_of(found.model)), "--endpoint URL")
        say(f"nothing was asked. With an engine: batch-assets preview {found.dataset} {engine}")
    else:
        say("nothing was written: these answers are in no batch and no catalog")


def _print_row(say: Any, number: int, row: PreviewRow, counter: TokenCounter) -> None:
    say(f"row {number}  {row.file}, line {row.line}", "bold")
    if row.refused:
        say(f"  cannot be used: {row.refused}", "red")
        say()
        return
    prompt = row.decoded()
    say_prompt(say, prompt)
    if row.answer is None:
        for turn, text in enumerate(row.turns[1:], 2):
            say(f"  user, turn {turn}", "cyan")
            say(indented(text))
        if row.user_system is not None:
            say("  user, later turns, written by a model that is told", "cyan")
            say(indented(row.user_system))
    if row.fields:
        said = ", ".join(f"{name} {value}" for name, value in row.own_fields.items())
        say(f"  of its own: {said if len(said) <= SHOWN_FIELDS else said[:SHOWN_FIELDS] + '…'}", "dim")
    answer = row.answer
    completion = answer.completion if answer is not None else None
    if answer is None or completion is None:
        say(f"  {counter.of(prompt):,} prompt tokens", "dim")
    if completion is not None and answer is not None:
        say("  answer", "green")
        say(indented(output_text(completion.output)))
        if completion.parts.tool_calls:
            say(f"  {len(completion.parts.tool_calls)} tool calls", "green")
        say(
            f"  {completion.prompt_tokens:,} prompt tokens as the engine counted, {completion.completion_tokens:,} "
            f"completion tokens, {completion.finish_reason}, {answer.seconds:.2f} s",
            "dim",
        )
    if answer is not None and answer.problem:
        say(f"  {answer.problem}", "red")
    say()


def _whole_lines(found: Preview) -> list[str]:
    """What the whole dataset takes if all its rows are like these."""
    whole = found.proposal
    if whole is None:
        return []
    work, chosen = whole.work, whole.plan.chosen
    lines = [
        f"whole dataset: {work.rows:,} rows, about {work.rows * work.mix.prompt_tokens:,.0f} prompt and "
        f"{work.rows * work.mix.output_tokens:,.0f} completion tokens ({'; '.join(map(str, work.assumptions))})"
    ]
    if chosen is not None:
        lines.append(
            f"rented as `batch-assets plan` would: {format_usd(chosen.usd.p50, fine=True)} $ "
            f"(P95 {format_usd(chosen.usd.p95, fine=True)} $), "
            f"{duration(chosen.finish.p50)} (P95 {duration(chosen.finish.p95)})"
        )
    else:
        lines.append(f"rented: {whole.plan.reason}")
    if (here := _seconds_here(found)) is not None:
        lines.append(
            f"on this engine: at most {duration(here)}, at the speed of these rows; a run keeps more in flight"
        )
    return lines
