"""The caller of a request: its tenant, key and scopes.

`app.state.authenticate` is what decides. The embedded default knows one tenant, who may do everything: the service then
listens on loopback only (`server`).
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from batch_assets.api.requests.api_error import ApiError

DEFAULT_TENANT = "default"


class Scope(enum.StrEnum):
    """What a key allows."""

    FILES_READ = "files.read"
    FILES_WRITE = "files.write"
    BATCHES_READ = "batches.read"
    BATCHES_WRITE = "batches.write"
    MODELS_READ = "models.read"
    INFERENCE = "inference"
    USAGE_READ = "usage.read"
    METRICS_READ = "metrics.read"
    DEAD_LETTERS = "dead_letters"


ALL_SCOPES = frozenset(Scope)
OPERATOR_SCOPES = frozenset({Scope.METRICS_READ, Scope.DEAD_LETTERS})  # of all tenants: only for keys that name them


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request. `key_id` names the key, never the secret; None where no key was asked for."""

    tenant: str
    key_id: str | None
    scopes: frozenset[Scope]


Authenticate = Callable[[Request], Awaitable[Caller]]


async def embedded_caller(request: Request) -> Caller:
    """The one tenant of a service that listens on loopback."""
    return Caller(DEFAULT_TENANT, None, ALL_SCOPES)


async def caller(request: Request) -> Caller:
    """Dependency: who asks. Raises ApiError 401."""
    authenticate: Authenticate = request.app.state.authenticate
    return await authenticate(request)


def caller_with(scope: Scope) -> Callable[..., Awaitable[Caller]]:
    """Dependency: who asks, when that one has this scope. Raises ApiError 401, 403."""

    async def allowed(found: Annotated[Caller, Depends(caller)]) -> Caller:
        if scope not in found.scopes:
            raise ApiError(
                403, f"You have insufficient permissions for this operation. Missing scopes: {scope}.", code="forbidden"
            )
        return found

    return allowed
