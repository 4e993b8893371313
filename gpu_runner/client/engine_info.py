"""The server at an endpoint: what its list of models, outside data, says of the model that is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from gpu_runner.bounded_http.bounded_read import PAGE_BYTES, check_values
from gpu_runner.client.answers import answer_numbers
from gpu_runner.client.protocol import EngineRefused


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What serves us. `version` is empty when the server does not tell; `simulated` is its own word."""

    model: str
    version: str
    max_model_len: int | None
    simulated: bool


def model_entry(page: bytes, wanted: str) -> dict[str, Any]:
    """The line of /v1/models of this model. Raises EngineRefused when there is none, or the page is no such list."""
    try:
        check_values(page, PAGE_BYTES)
        models: dict[str, dict[str, Any]] = {
            name: entry for entry in orjson.loads(page)["data"] if (name := _name(entry))
        }
    except (ValueError, LookupError, TypeError) as error:
        raise not_a_list() from error
    if wanted not in models:
        found = ", ".join(name[:80] for name in sorted(models)[:5]) or "none"
        raise EngineRefused(
            f"expected model {wanted}, found {found}: start the engine with this model or correct the dataset's"
        )
    entry = models[wanted]
    # Of an adapter vLLM does not say how long its rows may be.
    base = models.get(answer_numbers.short_name(entry.get("parent")))
    if base is None or entry.get("max_model_len") is not None:
        return entry
    return {**entry, "max_model_len": base.get("max_model_len")}


def not_a_list() -> EngineRefused:
    """The error for a page of models that is none."""
    return EngineRefused("expected a list of models at /v1/models, found something else")


def _name(entry: Any) -> str:
    """The name of a line of /v1/models; empty when it has none that can be one."""
    return answer_numbers.short_name(entry.get("id")) if isinstance(entry, dict) else ""
