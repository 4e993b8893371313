"""A machine that boots, as its cloud lists it: lists lag behind orders, and may be silent for a moment."""

from __future__ import annotations

from gpu_runner.providers.base import Machine, Provider, ProviderError, ProviderUnclear
from gpu_runner.providers.engine_process import EngineStartError


def listed_machine(provider: Provider, name: str, before: Machine | None, *, ordered: bool) -> Machine | None:
    """The machine as it is listed now. A list without an answer, and one that lags, change nothing: then it is as
    `before`. `ordered`: an order of it is known. Raises EngineStartError when it has ended, or was never ordered.
    """
    try:
        found = next((one for one in provider.list(name) if one.name == name), None)
    except (ProviderError, ProviderUnclear):
        return before
    if found is None:
        if before is None and not ordered:
            raise EngineStartError(f"{provider.name} has no machine {name}")
        return before
    if found.state == "ended":
        raise EngineStartError(f"{name} at {provider.name} has ended: {found.describe_end()}")
    return found
