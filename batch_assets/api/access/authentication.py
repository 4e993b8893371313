"""Who a request comes from: an API key or a JWT in `Authorization: Bearer …`, or the one tenant of loopback.

All ways to be wrong look the same from outside: status 401, one text, no word of what was sent.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request

from batch_assets.api.access.api_keys import looks_like_key
from batch_assets.api.access.jwks import KeySet, KeysUnavailable, source
from batch_assets.api.access.jwt_tokens import JwtPolicy, TokenRefused, looks_like_token, verify
from batch_assets.api.access.key_store import KeyCache, KeyStore
from batch_assets.api.access.request_access import access_of
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.callers import Authenticate, Caller, embedded_caller
from gpu_runner.errors import ExitStatus, UserFacingError

log = logging.getLogger(__name__)

JWT_ISSUER = "BATCH_ASSETS_JWT_ISSUER"
JWT_AUDIENCE = "BATCH_ASSETS_JWT_AUDIENCE"
JWT_KEYS = "BATCH_ASSETS_JWKS"
JWT_TENANT_CLAIM = "BATCH_ASSETS_JWT_TENANT_CLAIM"


class AccessSettingsError(UserFacingError):
    """The service would be open to strangers, or knows only half of what it needs to check a token."""

    exit_status = ExitStatus.WRONG_REQUEST


@dataclass(frozen=True, slots=True)
class JwtSettings:
    """The policy, and where the issuer's keys are: a path or an https:// address."""

    policy: JwtPolicy
    keys: str


def jwt_settings() -> JwtSettings | None:
    """What the environment says of tokens; None when it says nothing. Raises AccessSettingsError."""
    named = {name: os.environ.get(name, "").strip() for name in (JWT_ISSUER, JWT_AUDIENCE, JWT_KEYS)}
    if not any(named.values()):
        return None
    missing = [name for name, value in named.items() if not value]
    if missing:
        raise AccessSettingsError(f"{missing[0]}: expected a value, because {', '.join(named.keys())} belong together")
    claim = os.environ.get(JWT_TENANT_CLAIM, "").strip() or "tenant"
    return JwtSettings(JwtPolicy(named[JWT_ISSUER], named[JWT_AUDIENCE], claim), named[JWT_KEYS])


def authenticator(
    host: str, keys: KeyStore, tokens: JwtSettings | None, *, clock: Callable[[], float] = time.time
) -> Authenticate:
    """How the service that listens on `host` knows its callers.

    Without any key and without tokens: on loopback everybody is the embedded tenant. Raises AccessSettingsError for
    every other address, because whoever can connect could do everything there.
    """
    if tokens is None and not keys.any_usable():
        if _is_loopback(host):
            return embedded_caller
        raise AccessSettingsError(
            f"--host {host[:80]}: expected an address of loopback (127.0.0.1) or at least one API key, found neither: "
            f"make a key with `batch-assets keys create TENANT`, or set {JWT_ISSUER}, {JWT_AUDIENCE} and {JWT_KEYS}"
        )
    key_set = None if tokens is None else KeySet(source(tokens.keys), time.monotonic)
    return Authenticator(keys, clock, tokens.policy if tokens else None, key_set)


class Authenticator:
    """Knows callers by their keys and tokens. `clock`: Unix seconds. Lives on one event loop."""

    def __init__(
        self, keys: KeyStore, clock: Callable[[], float], policy: JwtPolicy | None = None, key_set: KeySet | None = None
    ) -> None:
        self._keys, self._clock, self._policy, self._key_set = keys, clock, policy, key_set
        self._cache = KeyCache(time.monotonic)

    async def __call__(self, request: Request) -> Caller:
        """The caller of a request. Raises ApiError 401, or 503 when nobody can be known now. The audit log says why."""
        try:
            return await self._caller(request)
        except _Refused as refused:
            log.info("refused: %s", refused.reason)
            access_of(request).refused = refused.reason
            raise refused.answer from None

    async def _caller(self, request: Request) -> Caller:
        shown = request.headers.getlist("authorization")
        if not shown:
            said = _unauthorized(
                "You didn't provide an API key. You need to provide your API key in an Authorization header using "
                "Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
            )
            raise _Refused("no Authorization header", said)
        scheme, _, secret = shown[0].partition(" ")
        secret = secret.strip()
        if len(shown) != 1 or scheme.lower() != "bearer" or not secret.isascii():
            raise _Refused("Authorization is not one Bearer header of ASCII letters")
        if looks_like_key(secret):
            return await self._by_key(secret)
        if self._policy is not None and self._key_set is not None and looks_like_token(secret):
            return await self._by_token(secret, self._policy, self._key_set)
        raise _Refused("neither a key of this service nor a token" if self._policy else "no key of this service")

    async def _by_key(self, secret: str) -> Caller:
        key = self._cache.get(secret)
        if key is None:
            key = await asyncio.to_thread(self._keys.find, secret)
        if key is None:
            raise _Refused("unknown key")
        if not key.usable(self._clock()):
            raise _Refused(f"{key.key_id} is {'expired' if key.revoked_at is None else 'revoked'}")
        if self._cache.get(secret) is None:
            self._cache.put(key)
        return Caller(key.tenant, key.key_id, key.scopes)

    async def _by_token(self, token: str, policy: JwtPolicy, key_set: KeySet) -> Caller:
        try:
            return await verify(token, policy, key_set, self._clock)
        except TokenRefused as refused:
            raise _Refused(f"token: {refused}") from None
        except KeysUnavailable:
            said = "The keys of the token's issuer cannot be read now."
            raise _Refused("token: " + said, ApiError(503, said, headers={"Retry-After": "30"})) from None


class _Refused(Exception):
    """`reason`: for our logs, without what was sent. `answer`: what the caller is told, the same for all reasons."""

    def __init__(self, reason: str, answer: ApiError | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.answer = answer or _unauthorized("Incorrect API key provided.", code="invalid_api_key")


def _unauthorized(message: str, code: str | None = None) -> ApiError:
    return ApiError(
        401, message, code=code, kind="invalid_request_error", headers={"WWW-Authenticate": 'Bearer realm="OpenAI API"'}
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
