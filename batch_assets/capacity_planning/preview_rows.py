"""The first rows of a source as an engine would get them, and what it answers: before anything is generated.

Nothing is written: no snapshot, no batch, no journal, no catalog entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from batch_assets.snapshot.grouping import rows_of
from batch_assets.snapshot.ingest import RowCheck
from batch_assets.snapshot.prompts.messages import without_media_bytes
from batch_assets.snapshot.source.block import Block
from batch_assets.spec.models import GeneratedDatasetSpec
from gpu_runner.bounded_http.tls_files import TlsFiles
from gpu_runner.client.engine_client import (
    Completion,
    EngineClient,
    EngineError,
    EngineRefused,
    RowRejected,
    TimeOuts,
    Transient,
)
from gpu_runner.client.structured_outputs import output_check
from gpu_runner.inference.windows.rate_limit import RateLimit
from gpu_runner.offers.speed import LengthMix
from gpu_runner.offers.workload import Assumption, Subject, Workload
from gpu_runner.request_limits import NO_LIMITS, RequestLimits
from gpu_runner.rows import Generation, Turn, WrittenUser, next_request
from resources.fleet.fleet_config import EngineConfig

REQUEST_SECONDS = 300.0
UNBOUNDED = 1_000_000  # requests at once
CHECKED_ROWS = 10_000  # of the source, before `where`
MORE_REFUSED = 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine made of a row. `problem`: why there is no output, or what is wrong with it; "" for a good one."""

    seconds: float
    completion: Completion | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PreviewRow:
    """A row of the source. `prompt`: messages or text as JSON; None when it cannot be used: `refused` says why.
    `fields`: request fields of its own, as a JSON object. `turns`: all that the user says in a conversation, of which
    the prompt ends with the first; that of a row that was asked is its last request. `user_system`: who the model that
    writes the user's words is to be.
    """

    file: str
    line: int
    prompt: bytes | None
    refused: str = ""
    answer: Answer | None = None
    fields: bytes = b""
    turns: Sequence[str] = ()
    user_system: str | None = None

    @property
    def own_fields(self) -> dict[str, Any]:
        """`fields` by their names."""
        return dict(orjson.loads(self.fields or b"{}"))

    def decoded(self) -> Any:
        """The prompt as a list of messages, a text, or what is scored or ranked."""
        return None if self.prompt is None else orjson.loads(self.prompt)

    def shown(self) -> Any:
        """The same without the bytes of images and audio."""
        prompt = self.decoded()
        return without_media_bytes(prompt) if isinstance(prompt, list) else prompt


def first_rows(spec: GeneratedDatasetSpec, folder: Path, count: int) -> list[PreviewRow]:
    """The first rows that `where` lets through, rendered. `folder`: where relative paths of the source start.

    Rows are held to what a snapshot asks of them, and so are the rows after them, up to CHECKED_ROWS: of those the
    first ones that would stop a run come at the end. With images or audio only the first rows are looked at.
    Raises SourceError when the source cannot be read.
    """
    check, ids = RowCheck(spec, folder), dict[str, tuple[str, int]]()
    found: list[PreviewRow] = []
    whole = True
    for block in rows_of(spec, check.columns, folder, check.unseen):
        passing = check.passing(block)
        if spec.prompt.media:
            rejects, passing = passing.rejects, passing.part(0, count - len(found))
            passing.rejects = rejects
        for row in _checked(check, passing, ids):
            if len(found) < count or (row.refused and spec.on_bad_row == "fail" and len(found) < count + MORE_REFUSED):
                found.append(row)
        enough = check.read_rows >= CHECKED_ROWS or (bool(spec.prompt.media) and len(found) >= count)
        if check.full or enough:
            whole = check.full
            break
    if whole:
        check.finish()
    check.check_conditions(whole=whole and not spec.prompt.media and any(row.prompt is not None for row in found))
    return found


def _checked(check: RowCheck, block: Block, ids: dict[str, tuple[str, int]]) -> list[PreviewRow]:
    """Rows of a block in their order; `ids` are those of the rows before."""
    rows = [PreviewRow(reject.file, reject.line, None, reject.reason) for reject in block.rejects]
    for part in check.parts(block):
        seen = check.check(part)
        for i, line in enumerate(part.lines):
            refused = seen.refused.get(i, "")
            if seen.ids is not None and not refused:
                first = ids.setdefault(seen.ids[i], (part.file, line))
                refused = "" if first == (part.file, line) else f"id: the same as in {first[0]}, line {first[1]}"
            fields = seen.fields[i] if seen.fields is not None and not refused else b""
            turns = seen.turns[i] if seen.turns is not None and not refused else ()
            prompt = None if refused else seen.prompts[i]
            user = seen.user_systems[i] if seen.user_systems is not None and not refused else None
            row = PreviewRow(part.file, line, prompt, refused, fields=fields, turns=turns, user_system=user)
            rows.append(row)
    return sorted(rows, key=lambda row: row.line)


def ask_rows(
    rows: Sequence[PreviewRow],
    generation: Generation,
    endpoint: str,
    api_key: str | None,
    tls: TlsFiles | None = None,
    user: EngineConfig | None = None,
    limits: RequestLimits = NO_LIMITS,
) -> tuple[list[PreviewRow], float]:
    """The rows with their answers, all asked at once as far as `limits` let, and the seconds until the last one.
    `user`: the engine of the model that plays the user, where that is another one, with its own limits.

    Raises EngineRefused and EngineLost when an engine does not serve its model.
    """
    return asyncio.run(_ask_rows(rows, generation, endpoint, api_key, tls, user, limits))


async def _ask_rows(
    rows: Sequence[PreviewRow],
    generation: Generation,
    endpoint: str,
    api_key: str | None,
    tls: TlsFiles | None,
    user: EngineConfig | None,
    limits: RequestLimits,
) -> tuple[list[PreviewRow], float]:
    written = generation.of_user_elsewhere if user is not None else None
    answering = generation if written is None else generation.without_user
    async with contextlib.AsyncExitStack() as stack:
        opened = EngineClient(endpoint, answering, api_key=api_key, time_outs=_time_outs(limits), tls=tls)
        client = writer = _BoundedEngine(await stack.enter_async_context(opened), limits)
        await client.engine.info()
        if user is not None and written is not None:
            key, files, times = user.api_key, user.tls_files, _time_outs(user.limits)
            opened = EngineClient(user.url or "", written, api_key=key, time_outs=times, tls=files)
            writer = _BoundedEngine(await stack.enter_async_context(opened), user.limits)
            try:
                await writer.engine.info()
            except EngineError as error:
                raise EngineRefused(f"prompt.user_model, engine {user.name}: {error}") from error
        began = time.monotonic()
        asked = await asyncio.gather(*(_ask(client, writer, generation, row) for row in rows))
        seconds = time.monotonic() - began
    return list(asked), seconds


def _time_outs(limits: RequestLimits) -> TimeOuts:
    return TimeOuts(request=REQUEST_SECONDS if limits.timeout is None else limits.timeout)


class _BoundedEngine:
    """An engine that is asked no more than its limits let: requests at once, requests and tokens of a minute."""

    def __init__(self, engine: EngineClient, limits: RequestLimits) -> None:
        self.engine = engine
        self._rate = RateLimit(limits, engine.generation.most_tokens)
        self._slots = asyncio.Semaphore(limits.concurrency or UNBOUNDED)

    async def generate(self, prompt: bytes, *, fields: bytes, free: bool, user: bool) -> Completion:
        """As EngineClient.generate, once it may be sent."""
        async with self._slots:
            while (seconds := self._rate.wait(time.monotonic())) > 0:  # noqa: ASYNC110 - others may be first
                await asyncio.sleep(seconds)
            request = object()
            self._rate.on_sent(request, len(prompt), time.monotonic())
            try:
                found = await self.engine.generate(prompt, fields=fields, free=free, user=user)
            except BaseException:
                self._rate.on_end(request)
                raise
            self._rate.on_answer(request, found.prompt_tokens, found.completion_tokens, time.monotonic())
            return found


async def _ask(client: _BoundedEngine, writer: _BoundedEngine, generation: Generation, row: PreviewRow) -> PreviewRow:
    """The row with its answer; a conversation with those before the last one in its prompt."""
    began, prompt_tokens, completion_tokens = time.monotonic(), 0, 0
    user: WrittenUser | None = None
    if row.user_system is not None and (asked := generation.user_model) is not None:
        user = WrittenUser(row.user_system, asked["opening"], asked["turns"])
    texts = list(row.turns)
    turns: list[Turn] = []
    while len(turns) + 1 < (user.turns if user is not None else len(texts)):
        found = await _answer(client, generation, row, began, free=True)
        if found is None or (completion := found.completion) is None or row.prompt is None:
            return replace(row, answer=found)
        prompt_tokens += completion.prompt_tokens
        completion_tokens += completion.completion_tokens
        answer = str(completion.output)
        turns.append(Turn(texts[len(turns)], answer, completion.finish_reason, None, 0, 0, 0, 0.0, None))
        if user is not None:
            request = replace(row, prompt=user.request(turns), fields=b"")
            found = await _answer(writer, generation, request, began, user=True)
            if found is None or (written := found.completion) is None:
                return replace(row, answer=found)
            prompt_tokens += written.prompt_tokens
            completion_tokens += written.completion_tokens
            texts.append(str(written.output))
        row = replace(row, prompt=next_request(row.prompt, answer, texts[len(turns)]), turns=texts)
    found = await _answer(client, generation, row, began)
    if found is not None and (last := found.completion) is not None and prompt_tokens:
        summed = (last.prompt_tokens + prompt_tokens, last.completion_tokens + completion_tokens)
        found = replace(found, completion=replace(last, prompt_tokens=summed[0], completion_tokens=summed[1]))
    return replace(row, answer=found)


async def _answer(
    client: _BoundedEngine,
    generation: Generation,
    row: PreviewRow,
    began: float,
    *,
    free: bool = False,
    user: bool = False,
) -> Answer | None:
    if row.prompt is None:
        return None
    try:
        completion = await client.generate(row.prompt, fields=row.fields, free=free, user=user)
    except EngineRefused:
        raise
    except (RowRejected, Transient) as error:
        said = f"{error.code}: {error.message}" if error.message else error.code
        return Answer(time.monotonic() - began, None, said)
    except EngineError as error:
        return Answer(time.monotonic() - began, None, str(error))
    check, problem = None if free or user else output_check(generation), ""
    if check is not None and isinstance(completion.output, str):
        wrong = check(completion.output)
        form = "the schema" if generation.json_schema is not None else "output"
        problem = f"does not fit {form}: {wrong}" if wrong else ""
    return Answer(time.monotonic() - began, completion, problem)


def measured_work(work: Workload, rows: Sequence[PreviewRow]) -> Workload | None:
    """The whole dataset's work with the mean lengths of these answers; None when there is no answer."""
    answered = [row.answer.completion for row in rows if row.answer is not None and row.answer.completion is not None]
    if not answered:
        return None
    prompt = sum(one.prompt_tokens for one in answered) / len(answered)
    output = sum(one.completion_tokens for one in answered) / len(answered)
    said = Assumption(Subject.LENGTHS, f"lengths are those of {len(answered)} rows")
    mix = LengthMix(max(1.0, prompt), output)
    counts = [one for one in work.assumptions if one.subject is Subject.ROWS]
    measured = replace(work.with_mix(mix), prompt_basis="measured", output_basis="measured")
    return replace(measured, assumptions=(*counts, said), rows=work.all_rows)
