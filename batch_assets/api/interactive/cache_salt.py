"""A salt for vLLM's prefix cache, so that no tenant learns by its answers' speed what another one has asked.

vLLM mixes a request's `cache_salt` into the hash of its first block, so only requests with the same one share cached
prefixes (vLLM's documentation: Automatic Prefix Caching, "Cache Isolation for Security"). A tenant's salt is the HMAC
of its name with a key of the service: nobody else can name it, and the tenant's own requests share prefixes as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from batch_assets.api.interactive.engine_directory import EngineTarget
from batch_assets.api.interactive.engine_reports import EngineReading, ReadLoad
from batch_assets.api.interactive.request_body import InteractiveRequest
from batch_assets.settings import SettingError

SETTING, KEY = "BATCH_ASSETS_CACHE_SALT", "BATCH_ASSETS_CACHE_SALT_KEY"
FILE = "cache_salt.key"
SALTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
LEAST_KEY = 32  # characters
MOST_ENGINES = 1000
_KEY_FILE = re.compile(r"[0-9a-f]{64}")


class CacheSalts:
    """`key`: the service's own. `groups`: tenants that share answers, and so prefixes. `read`: asks an engine what it
    is. Lives on one event loop.
    """

    def __init__(self, key: bytes, groups: Mapping[str, str], read: ReadLoad) -> None:
        self._key, self._groups, self._read = key, groups, read
        self._is_vllm: OrderedDict[str, bool] = OrderedDict()  # by address
        self._asking: dict[str, asyncio.Task[EngineReading]] = {}

    def salt(self, tenant: str) -> str:
        """The salt of this tenant: 64 hexadecimal digits."""
        group = self._groups.get(tenant, tenant)
        return hmac.new(self._key, b"cache_salt\0" + group.encode(), hashlib.sha256).hexdigest()

    async def body(self, engine: EngineTarget, path: str, request: InteractiveRequest, tenant: str) -> bytes:
        """What this engine is sent: with the tenant's salt where it is vLLM and the caller gave none."""
        if path not in SALTED or request.salted or not tenant or not await self._takes_salts(engine):
            return request.body
        return b'{"cache_salt":"' + self.salt(tenant).encode() + b'",' + request.body.lstrip()[1:]

    def seen(self, engine: EngineTarget, reading: EngineReading) -> None:
        """An engine was read."""
        if reading.load is not None:
            self._note(engine, is_vllm=reading.load.is_vllm)

    async def close(self) -> None:
        """Nobody is asked any more."""
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _takes_salts(self, engine: EngineTarget) -> bool:
        """Before its first request an engine is asked, once for all that wait. What does not say it is no vLLM, until
        it does.
        """
        if engine.url not in self._is_vllm:
            task = self._asking.get(engine.url)
            if task is None:
                task = self._asking[engine.url] = asyncio.create_task(self._ask(engine))
            await asyncio.shield(task)
        return self._is_vllm.get(engine.url, False)

    async def _ask(self, engine: EngineTarget) -> EngineReading:
        try:
            reading = await self._read(engine)
            if reading.load is not None or reading.round_trip is not None:  # else nobody was there
                self._note(engine, is_vllm=reading.load is not None and reading.load.is_vllm)
            return reading
        finally:
            del self._asking[engine.url]

    def _note(self, engine: EngineTarget, *, is_vllm: bool) -> None:
        self._is_vllm[engine.url] = is_vllm
        self._is_vllm.move_to_end(engine.url)
        if len(self._is_vllm) > MOST_ENGINES:
            self._is_vllm.popitem(last=False)


def salt_key(home: Path, *, several_tenants: bool) -> bytes | None:
    """The key: of the environment, else of a file in DAGSTER_HOME, made once. None: no salts. Raises SettingError."""
    word = os.environ.get(SETTING, "").strip() or "auto"
    if word not in ("auto", "off"):
        raise SettingError(f"{SETTING}: expected auto or off, found {word!r:.40}")
    if word == "off" or not several_tenants:
        return None
    if given := os.environ.get(KEY, "").strip():
        if len(given) < LEAST_KEY:
            raise SettingError(f"{KEY}: expected at least {LEAST_KEY} characters, found {len(given)}")
        return given.encode()
    return _kept_key(home / FILE)


def _kept_key(path: Path) -> bytes:
    """Made whole or not at all, by one of several processes; for its owner only."""
    if not path.exists():
        made = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
        finally:
            made.unlink(missing_ok=True)
    with path.open() as file:
        found = file.read(1000).strip()
    if _KEY_FILE.fullmatch(found) is None:
        raise SettingError(f"{path}: expected 64 hexadecimal digits; without the file, one is made")
    return found.encode()
