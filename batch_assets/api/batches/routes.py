"""`/v1/batches`: create, retrieve, list, cancel."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request

from batch_assets.api.access.enforcement import LimitedAuthenticator
from batch_assets.api.access.request_access import access_of
from batch_assets.api.batches.create import CreateBatch
from batch_assets.api.billing.spending import BUDGET, Spending, SpendingRecords
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords, KeyReused, new_batch_id
from batch_assets.api.database.file_records import FileRecord, FileRecords, Purpose, UnknownCursor
from batch_assets.api.database.service_database import Check, unchecked
from batch_assets.api.database.states import BatchStatus
from batch_assets.api.files.contents import count_lines
from batch_assets.api.files.routes import listed, threads_of
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.callers import Caller, Scope, caller_with
from batch_assets.api.requests.error_answers import not_found, store_calls
from batch_assets.api.requests.json_body import json_body

RETRY_SECONDS = 900  # longer than the stock clients' time-out of ten minutes
WAITING_FOR, WAITING_SINCE = "waiting_for", "waiting_since"
CANCELLED = (BatchStatus.CANCELLING, BatchStatus.CANCELLED)
TIMES = (
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)

router = APIRouter(prefix="/v1/batches", tags=["batches"])

Reader = Annotated[Caller, Depends(caller_with(Scope.BATCHES_READ))]
Writer = Annotated[Caller, Depends(caller_with(Scope.BATCHES_WRITE))]


def shown(batch: BatchRecord, spending: Spending | None = None) -> dict[str, Any]:
    """A batch object as documented. `spending`: of one with a budget, said beside what the client attached, as is what
    its lines wait for.
    """
    metadata = None if batch.metadata is None else json.loads(batch.metadata)
    if spending is not None and metadata is not None:
        metadata = {**metadata, **spending.shown()}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": None if batch.errors is None else {"object": "list", "data": json.loads(batch.errors)},
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        **{name: getattr(batch, name) for name in TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": None if batch.usage is None else json.loads(batch.usage),
        "metadata": _with_waiting(metadata, batch),
    }


def _with_waiting(metadata: dict[str, str] | None, batch: BatchRecord) -> dict[str, str] | None:
    """Pairs of these names that the client attached stay as they are."""
    if batch.state is not BatchStatus.IN_PROGRESS or batch.waiting_for is None:
        return metadata
    return {WAITING_FOR: batch.waiting_for, WAITING_SINCE: str(batch.waiting_since), **(metadata or {})}


def records_of(request: Request) -> BatchRecords:
    """The service's records of batches."""
    found: BatchRecords = request.app.state.batches
    return found


async def _shown_now(request: Request, batches: Sequence[BatchRecord]) -> list[dict[str, Any]]:
    """Batch objects, with what those with a budget have cost."""
    spending: SpendingRecords = request.app.state.spending
    bounded = [batch.id for batch in batches if batch.metadata is not None and BUDGET in batch.metadata_values()]
    found = await asyncio.to_thread(spending.read, bounded) if bounded else {}
    return [shown(batch, found.get(batch.id)) for batch in batches]


@router.post("")
async def create_batch(
    request: Request,
    caller: Writer,
    body: Annotated[CreateBatch, Depends(json_body(CreateBatch))],
    idempotency_key: Annotated[str | None, Header(max_length=256)] = None,
    x_stainless_retry_count: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    """Create a batch from an uploaded file. The same request, repeated by a client that lost the answer, makes one."""
    seconds = body.check()
    created = int(time.time())
    batch = BatchRecord(
        id=new_batch_id(),
        tenant=caller.tenant,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=created,
        expires_at=created + seconds,
        digest=body.digest(),
        metadata=None if body.metadata is None else json.dumps(body.metadata),
        output_seconds=None if body.output_expires_after is None else body.output_expires_after.seconds,
        idempotency_key=idempotency_key,
        traceparent=access_of(request).trace.header if request.app.state.spans.active else None,
    )
    since = created - RETRY_SECONDS if _repeats(x_stainless_retry_count) else None
    records = records_of(request)
    try:
        if (before := await asyncio.to_thread(records.made_before, batch, retried_since=since)) is not None:
            return shown(before)
        check = await _quota(request, await _input_file(request, caller, body.input_file_id))
        made = await asyncio.to_thread(lambda: records.create(batch, retried_since=since, check=check))
    except KeyReused:
        said = "This idempotency key was used for another request."
        raise ApiError(400, said, param="Idempotency-Key", code="idempotency_key_reused") from None
    request.app.state.wake()
    return shown(made)


async def _quota(request: Request, file: FileRecord) -> Check:
    """What holds a new batch of this file to its tenant's limits, in the transaction that adds it. One that was made
    before is not held to them. Raises as the store.
    """
    limits = request.app.state.authenticate
    if not isinstance(limits, LimitedAuthenticator):
        return unchecked
    lines = await _counted(request, file) if file.lines is None else file.lines
    return limits.of_new_batch(file.tenant, min(lines, request.app.state.settings.limits.lines + 1))


async def _counted(request: Request, file: FileRecord) -> int:
    """The lines of a file that was uploaded by a version that did not count them."""
    try:
        with store_calls():
            lines = await count_lines(threads_of(request), request.app.state.objects, file)
    except FileNotFoundError:
        return 0  # the batch's validation says so
    await asyncio.to_thread(request.app.state.files.set_lines, file.id, lines)
    return lines


def _repeats(retry_count: str | None) -> bool:
    """Whether a stock client says that it sends this again."""
    return retry_count not in (None, "0")


async def _input_file(request: Request, caller: Caller, file_id: str) -> FileRecord:
    """An input file of this caller. Raises ApiError 400 for what is none."""
    files: FileRecords = request.app.state.files
    file = await asyncio.to_thread(files.get, caller.tenant, file_id, time.time())
    if file is None:
        raise ApiError(400, f"No such File object: {file_id[:80]}", param="input_file_id", code="invalid_value")
    if file.purpose != Purpose.BATCH:
        said = f"Invalid input file: expected one of purpose 'batch', found '{file.purpose}'."
        raise ApiError(400, said, param="input_file_id", code="invalid_value")
    return file


@router.get("")
async def list_batches(
    request: Request,
    caller: Reader,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    """Batches of the caller's tenant, newest first. `after` is the id of the last batch of the page before."""
    try:
        page = await asyncio.to_thread(lambda: records_of(request).page(caller.tenant, after=after, limit=limit))
    except UnknownCursor:
        raise not_found("batch", after or "", "after") from None
    return listed(await _shown_now(request, page.batches), has_more=page.has_more)


@router.get("/{batch_id}")
async def retrieve_batch(request: Request, caller: Reader, batch_id: str) -> dict[str, Any]:
    """Where a batch stands."""
    batch = await asyncio.to_thread(records_of(request).get, caller.tenant, batch_id)
    if batch is None:
        raise not_found("batch", batch_id)
    return (await _shown_now(request, [batch]))[0]


@router.post("/{batch_id}/cancel")
async def cancel_batch(
    request: Request,
    caller: Writer,
    batch_id: str,
    x_stainless_retry_count: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    """Cancel a batch. What is finished is delivered. While it is being cancelled, another cancel changes nothing; when
    it has ended, only a client that lost the answer to its cancel is told so without an error.
    """
    batch = await asyncio.to_thread(records_of(request).cancel, caller.tenant, batch_id, int(time.time()))
    if batch is None:
        raise not_found("batch", batch_id)
    if batch.state not in (CANCELLED if _repeats(x_stainless_retry_count) else (BatchStatus.CANCELLING,)):
        raise ApiError(400, f"Cannot cancel a batch with status '{batch.status}'.", code="invalid_status")
    request.app.state.wake()
    return (await _shown_now(request, [batch]))[0]
