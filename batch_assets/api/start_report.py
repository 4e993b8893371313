"""What `batch-assets serve` says when it has begun: address, who may call, engines, models, what is missing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from batch_assets.api.settings import ApiSettings

MOST_MODELS = 20  # that are named


@dataclass(frozen=True, slots=True)
class Start:
    """What was found. `away`: endpoints that do not answer. `engines`, `providers`: names of the fleet's, where there
    are no endpoints. `models`: None: not known now.
    """

    with_keys: bool
    away: Collection[str] = ()
    engines: Sequence[str] = ()
    providers: Sequence[str] = ()
    models: Sequence[str] | None = None


def start_report(settings: ApiSettings, start: Start) -> list[str]:
    """Its lines."""
    scheme = "http" if settings.tls is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    callers = "callers show a key or a token" if start.with_keys else "no key is asked for: this machine only"
    lines = [f"OpenAI's API: {scheme}://{host}:{settings.port}/v1   ({callers}; Ctrl-C ends it)"]
    for url in settings.endpoints:
        state = "does not answer: what is asked of it waits until it does" if url in start.away else "answers"
        lines.append(f"engine {url}: {state}")
    if not settings.endpoints:
        lines += _fleet(start)
    lines.append(_models(settings, start))
    return lines


def _fleet(start: Start) -> list[str]:
    if not start.engines and not start.providers:
        missing = "missing: name engines or providers in fleet.yaml (docs/fleet.md), or give --endpoint URL"
        return [f"engines: none. {missing}"]
    named = [("engines", start.engines), ("providers", start.providers)]
    said = "; ".join(f"{kind} {', '.join(names)}" for kind, names in named if names)
    return [f"fleet: {said}; an engine is leased when somebody asks for its model"]


def _models(settings: ApiSettings, start: Start) -> str:
    if start.models:
        further = len(start.models) - MOST_MODELS
        return f"models: {', '.join(start.models[:MOST_MODELS])}{f' and {further:,} more' if further > 0 else ''}"
    if settings.endpoints:
        return "models: not known until an engine answers"
    return "models: none. missing: declare a dataset, or name `models` of an engine in fleet.yaml"
