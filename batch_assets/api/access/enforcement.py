"""Callers within their limits: what stands before every route that asks who calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import sqlalchemy as sa
from fastapi import Request

from batch_assets.api.access.quotas import Quotas, check_stored
from batch_assets.api.access.rate_limiter import RateLimiter
from batch_assets.api.access.rate_limits import Limits, TenantLimits, rate_headers, too_many
from batch_assets.api.access.request_access import RequestAccess, access_of
from batch_assets.api.database.service_database import Check
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.callers import Authenticate, Caller

log = logging.getLogger(__name__)


class LimitedAuthenticator:
    """Knows a caller, and counts the request against the tenant's requests a minute."""

    def __init__(self, authenticate: Authenticate, limits: Limits, limiter: RateLimiter, quotas: Quotas) -> None:
        self._authenticate, self.limits, self._limiter, self._quotas = authenticate, limits, limiter, quotas

    async def __call__(self, request: Request) -> Caller:
        """The caller. Raises ApiError 401, 429, or 503 while limits cannot be looked up."""
        caller = await self._authenticate(request)
        access = access_of(request)
        access.caller = caller
        await self._ask(access, caller.tenant, "requests", self.of(caller.tenant).requests_per_minute, 1)
        return caller

    def of_new_batch(self, tenant: str, lines: int) -> Check:
        """For the transaction that adds a batch of so many lines. It raises ApiError 429."""
        return self._quotas.of_new_batch(tenant, self.of(tenant), lines)

    def of_new_file(self, tenant: str, size: int) -> Check:
        """For the transaction that adds a file of `size` bytes. It raises ApiError 429."""
        return self._quotas.of_new_file(tenant, self.of(tenant), size)

    async def room_for_file(self, request: Request, tenant: str) -> Callable[[int], None]:
        """Refuse an upload that says that it is too long, and return what refuses a file by the bytes that have come.

        Both raise ApiError 429; 503 while limits cannot be looked up.
        """
        limits = self.of(tenant)
        try:
            held = await asyncio.to_thread(self._quotas.check_stored, tenant, limits, _said_bytes(request))
        except sa.exc.SQLAlchemyError:
            raise _unknown_limits() from None
        return partial(check_stored, limits, held)

    def of(self, tenant: str) -> TenantLimits:
        """The limits of a tenant."""
        return self.limits.of(tenant)

    async def take_tokens(self, request: Request, tenant: str, tokens: int) -> None:
        """Count tokens that a request is expected to need. Raises ApiError 429, 503."""
        await self._ask(access_of(request), tenant, "tokens", self.of(tenant).tokens_per_minute, tokens)

    async def settle_tokens(self, tenant: str, more: int) -> None:
        """Count what was used beyond what was expected; below 0: give it back. Never raises for the database: the
        answer is the caller's already, and a bucket is full again after a minute.
        """
        per_minute = self.of(tenant).tokens_per_minute
        try:
            await asyncio.shield(self._limiter.settle((tenant, "tokens"), per_minute, more))
        except sa.exc.SQLAlchemyError as error:
            log.warning("tokens of a request are not counted: %s", type(error).__name__)

    async def _ask(self, access: RequestAccess, tenant: str, kind: str, per_minute: int, amount: int) -> None:
        try:
            decision = await self._limiter.take((tenant, kind), per_minute, amount)
        except sa.exc.SQLAlchemyError:
            raise _unknown_limits() from None
        access.headers |= rate_headers(kind, per_minute, decision)
        if not decision.granted:
            raise too_many(kind, per_minute, amount, decision)


def _said_bytes(request: Request) -> int:
    """What Content-Length says; 0 where it says nothing, as for a body that comes in chunks."""
    said = request.headers.get("content-length", "")
    return int(said) if said.isdecimal() and len(said) <= 15 else 0


def _unknown_limits() -> ApiError:
    return ApiError(503, "Limits cannot be looked up now.", headers={"Retry-After": "5"})
