"""`/v1/models`: what can be asked for, from whoever serves it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import aiohttp
import orjson
from fastapi import APIRouter, Depends, Request

from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.callers import Caller, Scope, caller_with
from gpu_runner.bounded_http.bounded_read import PAGE_BYTES, BodyTooLarge, UnaskedEncoding, read_body
from gpu_runner.bounded_http.tls_files import TlsFiles, ssl_of
from resources.fleet.resource import FleetConfigError

ASK_SECONDS = 5.0
KEPT_SECONDS = 5.0

router = APIRouter(prefix="/v1/models", tags=["models"])

Reader = Annotated[Caller, Depends(caller_with(Scope.MODELS_READ))]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that can be asked for. `created`: Unix seconds. `context`: most tokens of prompt and answer, as its
    engine says (`max_model_len`); None: nobody says.
    """

    id: str
    created: int
    owned_by: str
    context: int | None = None

    def shown(self) -> dict[str, Any]:
        """A model object as documented."""
        said = {"id": self.id, "object": "model", "created": self.created, "owned_by": self.owned_by}
        return {**said, "shutdown_date": None}


class Models(Protocol):
    """The models that can be asked for."""

    async def models(self) -> Sequence[ServedModel] | None:
        """Those there are, at least one; None: that cannot be said now."""


class EndpointModels:
    """The models of one OpenAI-compatible server. What it said last holds while it is away.

    `rest`: how long one that did not answer is not asked again, in seconds.
    """

    def __init__(self, endpoint: str, api_key: str | None, tls: TlsFiles | None = None, rest: float = 0.0) -> None:
        base = endpoint.rstrip("/").removesuffix("/v1")
        self._url = f"{base}/v1/models"
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._tls, self._rest = tls, rest
        self._said: Sequence[ServedModel] | None = None
        self._until = 0.0

    async def models(self) -> Sequence[ServedModel] | None:
        """Ask, unless it was asked just now."""
        if time.monotonic() >= self._until:
            if (found := await self.ask()) is not None:
                self._said = found
            self._until = time.monotonic() + (self._rest if found is None else KEPT_SECONDS)
        return self._said

    async def ask(self) -> Sequence[ServedModel] | None:
        """What it says now; None: it does not answer, or gives no list of models."""
        time_out = aiohttp.ClientTimeout(total=ASK_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=time_out, auto_decompress=False) as session,
                session.get(self._url, allow_redirects=False, ssl=ssl_of(self._tls)) as answer,
            ):
                if answer.status != 200:
                    return None
                found = orjson.loads(await read_body(answer, PAGE_BYTES))["data"]
                return [_served(entry) for entry in found] or None  # none: it is still loading
        except (aiohttp.ClientError, TimeoutError, OSError, BodyTooLarge, UnaskedEncoding):
            return None
        except (ValueError, LookupError, TypeError, AttributeError):  # no list of models
            return None


def _served(entry: dict[str, Any]) -> ServedModel:
    created, context = entry.get("created"), entry.get("max_model_len")
    known = isinstance(context, int) and not isinstance(context, bool) and context > 0
    return ServedModel(
        str(entry["id"])[:300],
        created if isinstance(created, int) else 0,
        "batch-assets",
        context if known else None,
    )


class SeveralModels:
    """The models of several servers together. One of them away takes nothing from the others."""

    def __init__(self, servers: Sequence[Models]) -> None:
        self._servers = servers

    async def models(self) -> Sequence[ServedModel] | None:
        """All of them, each once, with the longest context that a server of it has; None where one does not say."""
        said = await asyncio.gather(*(server.models() for server in self._servers))
        if all(models is None for models in said):
            return None
        found: dict[str, ServedModel] = {}
        for model in (model for models in said for model in models or ()):
            before = found.get(model.id, model)
            known = before.context is not None and model.context is not None
            context = max(before.context or 0, model.context or 0) if known else None
            found[model.id] = replace(before, context=context)
        return list(found.values())


class FleetModels:
    """Models that are known by name: those of fleet.yaml and of the declared datasets that something there may serve.

    `names` reads them; it may block, and raises FleetConfigError for a file that cannot be used: then those of before
    hold.
    """

    def __init__(self, names: Callable[[], Collection[str]], created: int) -> None:
        self._names, self._created = names, created
        self._models: list[ServedModel] | None = None
        self._until = 0.0

    async def models(self) -> Sequence[ServedModel] | None:
        """All of them; None: the file could not be used yet."""
        if time.monotonic() >= self._until:
            with contextlib.suppress(FleetConfigError):
                names = await asyncio.to_thread(self._names)
                self._models = [ServedModel(name, self._created, "batch-assets") for name in sorted(names)]
            self._until = time.monotonic() + KEPT_SECONDS
        return self._models


class AliasedModels:
    """Models of others, and further names for them. An alias is there while its model is."""

    def __init__(self, models: Models, aliases: Mapping[str, str]) -> None:
        self._models, self.aliases = models, aliases

    async def models(self) -> Sequence[ServedModel] | None:
        """All of them, aliases last."""
        found = await self._models.models()
        if found is None or not self.aliases:
            return found
        served = {model.id: model for model in found}
        further = [
            replace(served[model], id=alias)
            for alias, model in sorted(self.aliases.items())
            if model in served and alias not in served
        ]
        return [*found, *further]


async def known_models(models: Models) -> frozenset[str] | None:
    """Their ids; None: not known now."""
    found = await models.models()
    return None if found is None else frozenset(model.id for model in found)


async def known_contexts(models: Models) -> dict[str, int]:
    """Most tokens of the models of which that is known."""
    found = await models.models() or ()
    return {model.id: model.context for model in found if model.context is not None}


async def served_models(models: Models) -> frozenset[str] | None:
    """The same without aliases."""
    known = await known_models(models)
    return known if known is None or not isinstance(models, AliasedModels) else known - models.aliases.keys()


async def _all(request: Request) -> Sequence[ServedModel]:
    models: Models = request.app.state.models
    async with asyncio.timeout(2 * ASK_SECONDS):
        return await models.models() or []


@router.get("")
async def list_models(request: Request, caller: Reader) -> dict[str, Any]:
    """The models that can be asked for."""
    return {"object": "list", "data": [model.shown() for model in await _all(request)]}


@router.get("/{model:path}")
async def retrieve_model(request: Request, caller: Reader, model: str) -> dict[str, Any]:
    """One model."""
    for served in await _all(request):
        if served.id == model:
            return served.shown()
    raise ApiError(404, f"The model '{model[:100]}' does not exist", param="model", code="model_not_found")
