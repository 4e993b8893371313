"""JSON Web Tokens (RFC 7519, best practices of RFC 8725): who signed, for whom, until when, for which tenant.

PyJWT checks signature, issuer and audience. The algorithm is one that the key itself allows, never only what the token
says, and never a symmetric one. Times are checked here, with the clock as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jwt
from jwt.exceptions import (
    InvalidAudienceError,
    InvalidIssuerError,
    InvalidSignatureError,
    MissingRequiredClaimError,
    PyJWTError,
)

from batch_assets.api.access.api_keys import is_tenant
from batch_assets.api.access.jwks import VerifyingKey
from batch_assets.api.requests.callers import Caller, Scope

MOST_BYTES = 8192
MOST_SKEW_SECONDS = 60.0
LATEST_SECONDS = 1e11  # the year 5138: what is later is no time, but a number that breaks arithmetic


@dataclass(frozen=True, slots=True)
class JwtPolicy:
    """What a token must say. `skew_seconds`: how far clocks may differ, at most 60. `longest_seconds`: how far in the
    future it may end. `tenant_claim`: the claim that names the tenant.
    """

    issuer: str
    audience: str
    tenant_claim: str = "tenant"
    skew_seconds: float = 30.0
    longest_seconds: float = 86_400.0

    def __post_init__(self) -> None:
        if not self.issuer or not self.audience:
            raise ValueError("JWT: expected an issuer and an audience")
        if not 0 <= self.skew_seconds <= MOST_SKEW_SECONDS:
            raise ValueError(f"JWT: expected a clock skew of 0 to {MOST_SKEW_SECONDS:g} s")


_WRONG: Mapping[type[BaseException], str] = {
    InvalidSignatureError: "signature",
    InvalidIssuerError: "issuer",
    InvalidAudienceError: "audience",
    MissingRequiredClaimError: "a claim is missing",
}


class TokenRefused(Exception):
    """A token that lets nobody in. The text is for our log: the caller learns no reason."""


class Keys(Protocol):
    """Where the issuer's keys come from; `jwks.KeySet` is one."""

    async def find(self, key_id: str) -> VerifyingKey | None: ...


def looks_like_token(text: str) -> bool:
    """Whether this has the three parts of a signed token."""
    return text.count(".") == 2 and len(text) <= MOST_BYTES


async def verify(token: str, policy: JwtPolicy, keys: Keys, clock: Callable[[], float]) -> Caller:
    """The caller whom a token names. Raises TokenRefused, or what `keys` raises. `clock`: Unix seconds."""
    if len(token) > MOST_BYTES:
        raise TokenRefused("too long")
    try:
        header = jwt.get_unverified_header(token)
    except (PyJWTError, ValueError, RecursionError):
        raise TokenRefused("malformed") from None
    algorithm, key_id = header.get("alg"), header.get("kid")
    if not isinstance(key_id, str) or not 0 < len(key_id) <= 256 or "crit" in header or header.get("b64") is False:
        raise TokenRefused("header")
    key = await keys.find(key_id)
    if key is None or algorithm not in key.algorithms:
        raise TokenRefused("key or algorithm")
    try:
        claims = jwt.decode(
            token,
            key=key.key,
            algorithms=[algorithm],
            audience=policy.audience,
            issuer=policy.issuer,
            options={
                "require": ["exp", "iss", "aud", policy.tenant_claim],
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
            },
        )
    except (PyJWTError, ValueError, TypeError, RecursionError) as error:
        raise TokenRefused(_WRONG.get(type(error), "cannot be read")) from None
    _check_times(claims, policy, clock())
    return _caller(claims, policy)


def _check_times(claims: Mapping[str, Any], policy: JwtPolicy, now: float) -> None:
    expires = _moment(claims, "exp")
    if expires is None or now >= expires + policy.skew_seconds:
        raise TokenRefused("expired")
    if expires > now + policy.longest_seconds + policy.skew_seconds:
        raise TokenRefused("ends too late")
    for name in ("nbf", "iat"):
        begins = _moment(claims, name)
        if begins is not None and begins > now + policy.skew_seconds:
            raise TokenRefused("not yet")


def _moment(claims: Mapping[str, Any], name: str) -> float | None:
    """A NumericDate of RFC 7519, section 2; None where the claim is missing."""
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST_SECONDS:
        raise TokenRefused("times")
    return float(value)


def _caller(claims: Mapping[str, Any], policy: JwtPolicy) -> Caller:
    tenant = claims[policy.tenant_claim]
    if not isinstance(tenant, str) or not is_tenant(tenant):
        raise TokenRefused("tenant")
    return Caller(tenant=tenant, key_id=None, scopes=_scopes(claims))


def _scopes(claims: Mapping[str, Any]) -> frozenset[Scope]:
    """Scopes of `scope` (words, RFC 8693) or `scp` (a list); others' scopes are none of ours."""
    said = claims.get("scope", claims.get("scp", ""))
    words = said.split() if isinstance(said, str) else said if isinstance(said, list) else []
    known = {scope.value: scope for scope in Scope}
    return frozenset(known[word] for word in words if isinstance(word, str) and word in known)
