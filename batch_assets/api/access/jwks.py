"""The public keys of a JWT issuer: a JSON Web Key Set (RFC 7517) from a file or an HTTPS address.

Keys rotate: the set is read again when it is old, and when a token names a key that is not in it. Bounded in bytes,
keys, time and in how often strangers can make us ask: unknown key ids cause one request per `retry_seconds` at most.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from gpu_runner.bounded_http.addresses import direct
from gpu_runner.bounded_http.small_pages import read_file, read_page
from gpu_runner.errors import ExitStatus, UserFacingError

log = logging.getLogger(__name__)

MOST_BYTES = 256 << 10
MOST_KEYS = 100
FETCH_SECONDS = 5.0
SMALLEST_RSA_BITS = 2048
# What a key may sign with, by type and curve. Symmetric keys have no entry: who verifies could also sign.
_ALGORITHMS = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}

Read = Callable[[], bytes]


class JwksAddressError(UserFacingError):
    """Where the keys of the issuer are to be read cannot be used."""

    exit_status = ExitStatus.WRONG_REQUEST


class KeysUnavailable(Exception):
    """No usable key set could be read for longer than old keys may be used."""


@dataclass(frozen=True, slots=True)
class JwksPolicy:
    """Seconds. After `fresh` the set is read again; after `stale` without success its keys are not used any more.
    `retry`: at most one reading in that time, whoever asks.
    """

    fresh: float = 300.0
    stale: float = 86_400.0
    retry: float = 30.0


@dataclass(frozen=True, slots=True)
class VerifyingKey:
    """One public key. `algorithms`: those that it may verify."""

    key: Any
    algorithms: tuple[str, ...]


def source(where: str) -> Read:
    """How the set at this path or https:// address is read. Raises JwksAddressError."""
    if where.startswith("https://"):
        if "@" in where or len(where) > 2000 or not where.isprintable():
            raise JwksAddressError("JWKS: expected an https:// address without user or password, or a path")
        return lambda: _fetch(where)
    if "://" in where:
        raise JwksAddressError("JWKS: expected an https:// address or a path, found another scheme")
    return lambda: read_file(Path(where), MOST_BYTES)


def _fetch(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    with direct.open(request, timeout=FETCH_SECONDS) as answer:
        return read_page(answer, MOST_BYTES, FETCH_SECONDS)


def parse_key_set(text: bytes) -> dict[str, VerifyingKey]:
    """Public signing keys of a set by their ids. Keys that we cannot use are skipped.

    Raises ValueError for what is no set.
    """
    found = orjson.loads(text)
    keys = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(keys, list) or len(keys) > MOST_KEYS:
        raise ValueError(f"expected a JSON object with at most {MOST_KEYS} keys")
    usable: dict[str, VerifyingKey] = {}
    for entry in keys:
        if isinstance(entry, dict) and isinstance(name := entry.get("kid"), str) and (key := _usable(entry)):
            usable[name] = key
    return usable


def _usable(entry: dict[str, Any]) -> VerifyingKey | None:
    """The key of one entry; None for a key that is not to verify signatures, or that nobody should trust."""
    kind = entry.get("kty")
    algorithms = _ALGORITHMS.get((kind, entry.get("crv") if kind != "RSA" else None)) if isinstance(kind, str) else None
    if not algorithms or entry.get("use", "sig") != "sig" or "d" in entry:
        return None
    if (named := entry.get("alg")) is not None:
        algorithms = tuple(one for one in algorithms if one == named)
    try:
        key = PyJWK(entry, algorithm=algorithms[0]) if algorithms else None
    except (PyJWTError, ValueError, TypeError):
        return None
    if key is None or (kind == "RSA" and key.key.key_size < SMALLEST_RSA_BITS):
        return None
    return VerifyingKey(key.key, algorithms)


class KeySet:
    """The keys that are known now. Lives on one event loop; `clock` is monotonic seconds."""

    def __init__(self, read: Read, clock: Callable[[], float], policy: JwksPolicy = JwksPolicy()) -> None:
        self._read, self._clock, self._policy = read, clock, policy
        self._keys: dict[str, VerifyingKey] = {}
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._lock = asyncio.Lock()

    async def find(self, key_id: str) -> VerifyingKey | None:
        """The key of this id, None when the issuer has none. Raises KeysUnavailable."""
        unknown = key_id not in self._keys
        if unknown and self._lock.locked():  # it is being read
            async with self._lock:
                pass
        elif self._due(unknown) and not self._lock.locked():
            async with self._lock:
                await self._refresh()
        if self._read_at is None or self._clock() - self._read_at > self._policy.stale:
            raise KeysUnavailable
        return self._keys.get(key_id)

    def _due(self, unknown: bool) -> bool:
        now, policy = self._clock(), self._policy
        if self._tried_at is not None and now - self._tried_at < policy.retry:
            return False
        return unknown or self._read_at is None or now - self._read_at >= policy.fresh

    async def _refresh(self) -> None:
        self._tried_at = self._clock()
        try:
            self._keys = parse_key_set(await asyncio.to_thread(self._read))
        except (OSError, ValueError, http.client.HTTPException) as error:
            log.warning("JWKS: cannot be read (%s); keys known before stay in use", type(error).__name__)
            return
        self._read_at = self._clock()
