"""`/v1/files`: upload, list, retrieve, content, delete."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from batch_assets.api.access.enforcement import LimitedAuthenticator
from batch_assets.api.database.file_records import (
    LONGEST_LIFE,
    SHORTEST_LIFE,
    FileRecord,
    FileRecords,
    Order,
    Purpose,
    UnknownCursor,
    new_file_id,
)
from batch_assets.api.database.service_database import unchecked
from batch_assets.api.files.contents import expiry, now, open_content, parts_of
from batch_assets.api.files.upload import CLOSE, Upload, check_file_size, read_upload
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.callers import Caller, Scope, caller_with
from batch_assets.api.requests.error_answers import not_found, store_away, store_calls
from batch_assets.api.settings import ApiLimits, ApiSettings
from batch_assets.api.store_threads import WAIT_SECONDS, StoreThreads
from resources.objects.opening import Objects, temporary_folder

log = logging.getLogger(__name__)

MOST_LISTED = 10_000
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FIELDS = frozenset({"purpose", ANCHOR, SECONDS})  # of an upload, beside its file
OTHER_PURPOSES = ("assistants", "assistants_output", "evals", "fine-tune", "fine-tune-results", "user_data", "vision")

router = APIRouter(prefix="/v1/files", tags=["files"])

Reader = Annotated[Caller, Depends(caller_with(Scope.FILES_READ))]
Writer = Annotated[Caller, Depends(caller_with(Scope.FILES_WRITE))]


def shown(file: FileRecord) -> dict[str, Any]:
    """A file object as documented."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def records_of(request: Request) -> FileRecords:
    """The service's records of files."""
    found: FileRecords = request.app.state.files
    return found


def threads_of(request: Request) -> StoreThreads:
    """The service's threads for calls of the store."""
    found: StoreThreads = request.app.state.store_threads
    return found


@router.post("")
async def upload_file(request: Request, caller: Writer) -> dict[str, Any]:
    """Upload a file of JSON lines, as multipart/form-data with the fields `file` and `purpose`."""
    settings: ApiSettings = request.app.state.settings
    objects: Objects = request.app.state.objects
    with temporary_folder() as folder:
        target = Path(folder) / "upload"
        content_type = request.headers.get("content-type", "")
        check_size = await _size_check(request, caller.tenant)
        upload = await read_upload(content_type, request.stream(), target, check_size)
        file = _checked(upload, caller.tenant, settings.limits)
        with store_calls():
            try:
                await threads_of(request).call_soon(WAIT_SECONDS, objects.upload, file.path, target)
            except FileNotFoundError:  # a folder of the store
                raise store_away() from None
    await _add(request, file)
    return shown(file)


async def _size_check(request: Request, tenant: str) -> Callable[[int], None]:
    """What refuses an upload by the bytes of its file that have come. Raises ApiError 429, 503."""
    most, limits = request.app.state.settings.limits.file_bytes, request.app.state.authenticate
    if not isinstance(limits, LimitedAuthenticator):
        return partial(check_file_size, most)
    has_room = await limits.room_for_file(request, tenant)

    def check(size: int) -> None:
        check_file_size(most, size)
        try:
            has_room(size)
        except ApiError as error:
            error.headers |= CLOSE
            raise

    return check


async def _add(request: Request, file: FileRecord) -> None:
    """Write the record of a file whose content is in the store. Raises ApiError 429: others came meanwhile."""
    limits = request.app.state.authenticate
    limited = isinstance(limits, LimitedAuthenticator)
    check = limits.of_new_file(file.tenant, file.bytes) if limited else unchecked
    objects: Objects = request.app.state.objects
    try:
        await asyncio.to_thread(records_of(request).add, file, check)
    except ApiError:
        with contextlib.suppress(Exception):  # it belongs to nobody; the caller is to hear of the limit
            await threads_of(request).call(objects.delete, [file.path])
        raise


def _checked(upload: Upload, tenant: str, limits: ApiLimits) -> FileRecord:
    """The record of what was uploaded. Raises ApiError."""
    if upload.filename is None:
        raise ApiError(400, "Missing required parameter: 'file'.", param="file", code="missing_required_parameter")
    purpose = upload.fields.get("purpose")
    if purpose is None:
        raise ApiError(
            400, "Missing required parameter: 'purpose'.", param="purpose", code="missing_required_parameter"
        )
    if unknown := sorted(upload.fields.keys() - FIELDS):
        said = f"Unknown parameter: '{unknown[0][:80]}'."
        raise ApiError(400, said, param=unknown[0][:80], code="unknown_parameter")
    if purpose != Purpose.BATCH:
        said = f"Invalid value: '{purpose[:40]}'. Supported values are: 'batch'."
        raise ApiError(400, said, param="purpose", code="invalid_value")
    extension = Path(upload.filename).suffix.lower()
    if extension not in ("", ".jsonl"):
        said = f"Invalid file format for Batch API: expected .jsonl, found {extension[:20]}."
        raise ApiError(400, said, param="file", code="invalid_file_format")
    created = now()
    expires = expiry(created, _life(upload.fields), limits.batch_file_days)
    name, size = upload.filename, upload.bytes
    return FileRecord(new_file_id(), tenant, purpose, name, size, created, expires, upload.lines)


def _life(fields: dict[str, str]) -> int | None:
    """Seconds that the file is to live, from `expires_after`. Raises ApiError."""
    anchor, seconds = fields.get(ANCHOR), fields.get(SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor is not None and anchor != "created_at":
        said = "Invalid value for 'expires_after.anchor': expected 'created_at'."
        raise ApiError(400, said, param="expires_after.anchor", code="invalid_value")
    for name, value in (("expires_after.anchor", anchor), ("expires_after.seconds", seconds)):
        if value is None:
            said = f"Missing required parameter: '{name}'."
            raise ApiError(400, said, param=name, code="missing_required_parameter")
    whole = seconds is not None and seconds.isascii() and seconds.isdecimal()
    if seconds is None or not whole or not SHORTEST_LIFE <= int(seconds[:12]) <= LONGEST_LIFE:
        raise ApiError(
            400,
            f"Invalid value for 'expires_after.seconds': expected {SHORTEST_LIFE} to {LONGEST_LIFE}.",
            param="expires_after.seconds",
            code="invalid_value",
        )
    return int(seconds)


@router.get("")
async def list_files(
    request: Request,
    caller: Reader,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = MOST_LISTED,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """Files of the caller's tenant, newest first. `after` is the id of the last file of the page before."""
    if purpose is not None and purpose not in (*Purpose, *OTHER_PURPOSES):
        raise ApiError(400, f"Invalid value for 'purpose': '{purpose[:40]}'.", param="purpose", code="invalid_value")
    given: Order = order
    try:
        page = await asyncio.to_thread(
            lambda: records_of(request).page(
                caller.tenant, time.time(), purpose=purpose, after=after, limit=limit, order=given
            )
        )
    except UnknownCursor:
        raise not_found("File object", after or "", "after") from None
    return listed([shown(file) for file in page.files], has_more=page.has_more)


def listed(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page of a list as documented."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


async def found(request: Request, caller: Caller, file_id: str) -> FileRecord:
    """A file of the caller's tenant. Raises ApiError 404."""
    file = await asyncio.to_thread(records_of(request).get, caller.tenant, file_id, time.time())
    if file is None:
        raise not_found("File object", file_id)
    return file


@router.get("/{file_id}")
async def retrieve_file(request: Request, caller: Reader, file_id: str) -> dict[str, Any]:
    """What is known of a file."""
    return shown(await found(request, caller, file_id))


@router.get("/{file_id}/content", response_class=StreamingResponse)
async def file_content(request: Request, caller: Reader, file_id: str) -> StreamingResponse:
    """The content of a file."""
    file, threads = await found(request, caller, file_id), threads_of(request)
    try:
        with store_calls():
            content = await open_content(threads, request.app.state.objects, file)
    except FileNotFoundError:
        await found(request, caller, file_id)  # deleted meanwhile; else its record goes last: the store is away
        raise store_away() from None
    headers = {"Content-Length": str(file.bytes), "Content-Disposition": attachment(file.filename)}
    return StreamingResponse(parts_of(threads, content), media_type="application/octet-stream", headers=headers)


def attachment(filename: str) -> str:
    """A Content-Disposition that names the file (RFC 6266), for clients that read the older `filename` only, too."""
    plain = "".join(letter if " " <= letter <= "~" and letter not in '"\\' else "_" for letter in filename)
    extended = "" if plain == filename else f"; filename*=UTF-8''{quote(filename, safe='')}"
    return f'attachment; filename="{plain}"{extended}'


@router.delete("/{file_id}")
async def delete_file(request: Request, caller: Writer, file_id: str) -> dict[str, Any]:
    """Delete a file. A batch that was created with it goes on."""
    file = await found(request, caller, file_id)
    if not await asyncio.to_thread(records_of(request).delete, caller.tenant, file.id, time.time()):
        raise not_found("File object", file_id)
    return {"id": file.id, "object": "file", "deleted": True}
