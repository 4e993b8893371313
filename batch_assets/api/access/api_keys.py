"""API keys as values: made, recognised, checked. Pure but for the randomness, which is an argument.

A key has 256 random bits, so nobody can guess one, and one round of SHA-256 is enough to store it: slow hashes protect
what people choose.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass

from batch_assets.api.requests.callers import OPERATOR_SCOPES, Scope
from gpu_runner.errors import ExitStatus, UserFacingError

PREFIX = "sk-"
SECRET_BYTES = 32
_KEY = re.compile(r"sk-[A-Za-z0-9_-]{43}")
TENANT_FORM = "1 to 64 lower-case letters, digits, '-', '_' and '.', first a letter or a digit"
_TENANT = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_DOMAIN = b"batch-assets api key\0"


class KeyRequestError(UserFacingError):
    """A key that cannot be made or found as it was asked for."""

    exit_status = ExitStatus.WRONG_REQUEST


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key. `digest` is hexadecimal; times are Unix seconds, None: never."""

    key_id: str
    tenant: str
    name: str
    scopes: frozenset[Scope]
    digest: str
    created_at: int
    expires_at: int | None
    revoked_at: int | None

    def usable(self, now: float) -> bool:
        """Whether the key may be used at this moment."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def is_for(self, key: str) -> bool:
        """Whether this is that key, in a time that does not depend on where they differ."""
        return hmac.compare_digest(self.digest, key_digest(key))


def new_secret(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """A new key, as it is shown once: `sk-` and 43 letters, digits, `-` and `_`."""
    return PREFIX + urlsafe_b64encode(random_bytes(SECRET_BYTES)).rstrip(b"=").decode()


def new_key_id(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """What a key is called in lists and logs. It says nothing of the key."""
    return f"key_{random_bytes(8).hex()}"


def looks_like_key(text: str) -> bool:
    """Whether a text has the form of a key: what has not is refused before anything is looked up."""
    return _KEY.fullmatch(text) is not None


def key_digest(key: str) -> str:
    """What is stored of a key, in hexadecimal."""
    return hashlib.sha256(_DOMAIN + key.encode()).hexdigest()


def is_tenant(name: str) -> bool:
    """Whether a tenant can be called so."""
    return _TENANT.fullmatch(name) is not None


def checked_tenant(name: str) -> str:
    """The tenant's name. Raises KeyRequestError."""
    if not is_tenant(name):
        raise KeyRequestError(f"tenant: expected {TENANT_FORM}, found {name[:70]!r}")
    return name


def checked_scopes(names: list[str]) -> frozenset[Scope]:
    """Scopes by their names; all that a tenant's own work needs where none is named. Raises KeyRequestError."""
    known = {scope.value: scope for scope in Scope}
    unknown = sorted(set(names) - known.keys())
    if unknown:
        raise KeyRequestError(f"scope: expected one of {', '.join(known)}; found {unknown[0][:70]!r}")
    return frozenset(known[name] for name in names) if names else frozenset(Scope) - OPERATOR_SCOPES
