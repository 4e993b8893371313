"""Engine addresses that people at the command line have allowed: `endpoints.json` in DAGSTER_HOME, mode 0600.

A run carries the address of its engine in a tag, and whoever reaches Dagster's UI can write tags. So a tag only chooses
among addresses that somebody with access to the files of this home, its environment or fleet.yaml has named.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gpu_runner.bounded_http.addresses import engine_url
from gpu_runner.errors import ExitStatus, UserFacingError
from resources.pricing.token_prices import TokenPriceConfig

FILE = "endpoints.json"
MOST = 200
MOST_BYTES = 1 << 20
MOST_KEYS = 10


class EndpointsError(UserFacingError):
    """The list of allowed addresses cannot be used."""

    exit_status = ExitStatus.WRONG_REQUEST


class _Key(BaseModel):
    """Recognises a key without holding it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    salt: str
    digest: str

    @classmethod
    def of(cls, key: str) -> _Key:
        salt = secrets.token_hex(16)
        return cls(salt=salt, digest=_digest(salt, key))

    def is_for(self, key: str) -> bool:
        return hmac.compare_digest(self.digest, _digest(self.salt, key))


class AllowedEndpoint(BaseModel):
    """One address. `keys`: API keys that were given with it; `without_key`: it was given without one as well.

    `usd_per_million_tokens`: the price that was given with it last.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    url: str
    keys: tuple[_Key, ...] = ()
    without_key: bool = False
    usd_per_million_tokens: TokenPriceConfig | None = None

    def takes(self, key: str | None) -> bool:
        """Whether this key was given for this address."""
        return key is not None and any(one.is_for(key) for one in self.keys)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    endpoints: tuple[AllowedEndpoint, ...] = ()


def allow(home: Path, url: str, api_key: str | None, price: TokenPriceConfig | None = None) -> None:
    """Allow runs of this home to send to the address, and the key with it. Raises ValueError and EndpointsError.

    `price`: of its tokens from now on; None: as before.
    """
    url = engine_url(url)
    with (home / f"{FILE}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = _read(home)
        old = next((one for one in known if one.url == url), AllowedEndpoint(url=url))
        if api_key is None:
            new = old.model_copy(update={"without_key": True})
        else:
            new = old if old.takes(api_key) else old.model_copy(update={"keys": (*old.keys, _Key.of(api_key))})
        price = price or new.usd_per_million_tokens
        new = new.model_copy(update={"keys": new.keys[-MOST_KEYS:], "usd_per_million_tokens": price})
        _write(home, [*(one for one in known if one.url != url), new][-MOST:])


def allowed(home: Path, url: str) -> AllowedEndpoint | None:
    """What was allowed for this address (as `engine_url` writes it). Raises EndpointsError."""
    return next((one for one in _read(home) if one.url == url), None)


def _read(home: Path) -> tuple[AllowedEndpoint, ...]:
    path = home / FILE
    try:
        with path.open("rb") as file:
            return _File.model_validate_json(file.read(MOST_BYTES)).endpoints
    except FileNotFoundError:
        return ()
    except ValidationError:
        raise EndpointsError(f"{path}: expected what `batch-assets run --endpoint` writes; delete it") from None


def _write(home: Path, endpoints: list[AllowedEndpoint]) -> None:
    text = _File(endpoints=tuple(endpoints)).model_dump_json(exclude_none=True)
    new = home / f"{FILE}.new"
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(home / FILE)


def _digest(salt: str, key: str) -> str:
    return hashlib.sha256(f"{salt}\0{key}".encode()).hexdigest()
