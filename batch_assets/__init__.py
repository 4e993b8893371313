"""LLM-generated datasets as Dagster assets."""

from __future__ import annotations

from typing import Any

__all__ = ["GeneratedDataset", "file_permissions", "settings", "tags"]


def __getattr__(name: str) -> Any:
    """The component is imported when Dagster asks for it, so that the command line starts without Dagster."""
    if name == "GeneratedDataset":
        from batch_assets.component import GeneratedDataset

        return GeneratedDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What `getattr` answers: Dagster's `dg` asks for every name, and a module is no attribute before its import."""
    return sorted({*globals(), "GeneratedDataset"})
