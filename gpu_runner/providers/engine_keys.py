"""API keys of rented engines: one for each machine, made from one secret and the machine's name, stored nowhere.

Every process that has the secret can make the key again, so the fleet's database and the providers hold none. HMAC
with SHA-256 (RFC 2104): a machine that leaks its key says nothing about another's.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path

from gpu_runner.providers.base import ProviderError

VARIABLE = "BATCH_ASSETS_ENGINE_SECRET"
SHORTEST = 32  # characters
_FILE = "engine-secret"


class EngineSecretError(ProviderError):
    """The secret is unusable: says where it was looked for, and what was found or why it cannot be read."""


def engine_key(secret: str, name: str) -> str:
    """The bearer token of the machine `name`: 64 hexadecimal digits."""
    return hmac.new(secret.encode(), name.encode(), "sha256").hexdigest()


def engine_secret(home: Path) -> str:
    """The secret of `BATCH_ASSETS_ENGINE_SECRET`, else of `<home>/engine-secret` (0600), which is made at first use.

    Processes on several computers that share a fleet need the variable, with the same value. Raises EngineSecretError.
    """
    if (given := os.environ.get(VARIABLE)) is not None:
        return _checked(given, VARIABLE)
    path = Path(home) / _FILE
    try:
        return _kept(path)
    except OSError as error:
        raise EngineSecretError(f"{path}: the secret of the engines' keys cannot be used: {error}") from error


def _kept(path: Path) -> str:
    """The secret in this file, which is made when it is not there. Raises EngineSecretError and OSError."""
    with contextlib.suppress(FileNotFoundError):
        return _checked(_read(path), str(path))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f"{_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was first: its secret counts
            os.link(new, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
    return _checked(_read(path), str(path))


def _read(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(4096).strip()


def _checked(secret: str, where: str) -> str:
    if len(secret) < SHORTEST:
        raise EngineSecretError(f"{where}: expected at least {SHORTEST} characters, found {len(secret)}")
    return secret
