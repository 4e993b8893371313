"""The front door in process, without what works on batches behind it: for tests of callers and interactive requests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI

from batch_assets.api.app import create_app
from batch_assets.api.front_door import FrontDoor, build_front_door
from batch_assets.api.models import ServedModel
from batch_assets.api.settings import ApiSettings


class NamedModels:
    """Models that are known by name."""

    def __init__(self, names: Sequence[str], created: int) -> None:
        self._models = [ServedModel(name, created, "batch-assets") for name in sorted(set(names))]

    async def models(self) -> Sequence[ServedModel] | None:
        """All of them."""
        return self._models


def front_door_alone(settings: ApiSettings) -> FrontDoor:
    """All routes and all that is around them; no records, no store, no worker. It knows the model `not-running`."""
    inner = create_app(settings)
    inner.state.models = NamedModels(["not-running"], 0)
    inner.router.lifespan_context = _nothing  # type: ignore[assignment]
    return build_front_door(settings, inner=inner)


@contextlib.asynccontextmanager
async def _nothing(app: FastAPI) -> AsyncIterator[None]:
    yield
