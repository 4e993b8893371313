"""`POST /v1/inference`, `GET /v1/result/ID`, and the dead letters for operators."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Header, Query, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Scope as RequestScope

from batch_assets.api.access.enforcement import LimitedAuthenticator
from batch_assets.api.access.request_access import access_of
from batch_assets.api.billing.interactive_usage import InteractiveUsage
from batch_assets.api.online.online_service import OnlineService, queue_away
from batch_assets.api.online.queues.queue_protocol import QueueAway, StoredTask, once_key
from batch_assets.api.online.request import MOST_LETTERS, Accepted, InferenceRequest, Redrive, Result, engine_request
from batch_assets.api.requests.callers import Caller, Scope, caller, caller_with
from batch_assets.api.requests.direct_routes import DirectRoute
from batch_assets.api.requests.error_answers import not_found
from batch_assets.api.requests.json_body import json_body

SUBMIT, RESULT = "/v1/inference", "/v1/result/{task_id}"
LONGEST_WAIT = 60.0
LONGEST_KEY = 256
KEY_HEADER = b"idempotency-key"
_WAIT = re.compile(rb"wait=([0-9]{1,2}(?:\.[0-9]{1,6})?)")

router = APIRouter(tags=["online"])
may_infer, read_inference = caller_with(Scope.INFERENCE), json_body(InferenceRequest)
Allowed = Annotated[Caller, Depends(may_infer)]
Operator = Annotated[Caller, Depends(caller_with(Scope.DEAD_LETTERS))]


@router.post(SUBMIT, status_code=202, response_model=Accepted)
async def submit(
    request: Request,
    caller: Allowed,
    body: Annotated[InferenceRequest, Depends(read_inference)],
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=LONGEST_KEY)] = None,
) -> Response:
    """Accept a request: from this answer on it is kept until it is answered, or its time to live is over."""
    online: OnlineService = request.app.state.online
    resolve = request.app.state.settings.models.resolve
    asked = engine_request(body, await online.model(None if body.model is None else resolve(body.model)))
    once = None
    if idempotency_key is not None:
        once = once_key(caller.tenant, body.client_id, idempotency_key, orjson.dumps(body.model_dump()))
    if (known := await online.admit(caller.tenant, asked.model, once)) is not None:
        return _json({"task_id": known}, 202)
    limits = request.app.state.authenticate
    limited = limits if isinstance(limits, LimitedAuthenticator) else None
    usage: InteractiveUsage = request.app.state.interactive_usage
    counted = taken = False
    try:
        usage.check_room()
        if limited is not None:
            await limited.take_tokens(request, caller.tenant, asked.expected_tokens)
            counted = True
        trace = access_of(request).trace.header
        appended = await online.submit(caller.tenant, body.client_id, asked, float(body.ttl_seconds), once, trace)
        taken = not appended.repeated
    finally:
        if not taken:
            online.withdraw(caller.tenant)
            if limited is not None and counted:
                await limited.settle_tokens(caller.tenant, -asked.expected_tokens)
    return _json({"task_id": appended.task_id}, 202)


@router.get(RESULT, response_model=Result, response_model_exclude_none=True)
async def result(
    request: Request,
    caller: Allowed,
    task_id: str,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for the result.")] = 0.0,
) -> Response:
    """What became of a request. Results are kept for ten minutes."""
    online: OnlineService = request.app.state.online
    found = await online.result(caller.tenant, task_id, wait)
    if found is None:
        raise not_found("task", task_id, "task_id")
    return Response(shown(found), media_type="application/json")


def _keys(scope: RequestScope) -> Sequence[bytes]:
    return [value for name, value in scope["headers"] if name == KEY_HEADER]


async def _submit_directly(request: Request) -> Response:
    allowed = await may_infer(await caller(request))
    keys = _keys(request.scope)
    return await submit(request, allowed, await read_inference(request), keys[0].decode("latin-1") if keys else None)


async def _result_directly(request: Request) -> Response:
    allowed = await may_infer(await caller(request))
    query = request.scope["query_string"]
    wait = float(query.removeprefix(b"wait=")) if query else 0.0
    return await result(request, allowed, request.path_params["task_id"], wait)


def _plain_submit(scope: RequestScope) -> bool:
    keys = _keys(scope)
    return not keys or (len(keys) == 1 and 1 <= len(keys[0]) <= LONGEST_KEY)


def _plain_result(scope: RequestScope) -> bool:
    query: bytes = scope["query_string"]
    return not query or ((found := _WAIT.fullmatch(query)) is not None and float(found[1]) <= LONGEST_WAIT)


DIRECT_ROUTES = (
    DirectRoute("POST", SUBMIT, _plain_submit, _submit_directly),
    DirectRoute("GET", RESULT, _plain_result, _result_directly),
)


class DeadLetters(BaseModel):
    """Dead letters, newest first: what they are, not what they say."""

    data: list[dict[str, Any]]


class Redriven(BaseModel):
    """How many of them were dead letters."""

    redriven: int


@router.get("/v1/dead_letters", response_model=DeadLetters)
async def dead_letters(
    request: Request, caller: Operator, limit: Annotated[int, Query(ge=1, le=MOST_LETTERS)] = 100
) -> Response:
    """Tasks of all tenants that were given up."""
    online: OnlineService = request.app.state.online
    try:
        return _json({"data": [asdict(letter) for letter in await online.queue.dead_letters(limit)]})
    except QueueAway:
        raise queue_away() from None


@router.post("/v1/dead_letters/redrive", response_model=Redriven)
async def redrive(
    request: Request, caller: Operator, body: Annotated[Redrive, Depends(json_body(Redrive))]
) -> Response:
    """Put dead letters back into the queue, under their ids, with all tries and a whole time to live."""
    online: OnlineService = request.app.state.online
    try:
        return _json({"redriven": await online.queue.redrive(body.task_ids)})
    except QueueAway:
        raise queue_away() from None


def shown(task: StoredTask) -> bytes:
    """A result as callers see it."""
    head: dict[str, Any] = {"task_id": task.task_id}
    if task.result is None:
        return orjson.dumps({**head, "status": "PENDING", "created_at": round(task.created_at, 3)})
    head["created_at"] = round(task.created_at, 3)
    return orjson.dumps(head)[:-1] + b"," + task.result[1:]


def _json(found: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(found), status, media_type="application/json")
