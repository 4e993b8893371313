"""LLM-generated datasets as Dagster assets; their tables for other programs (`table`, `table_input`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batch_assets.component import GeneratedDataset
    from batch_assets.table_access.asset_inputs import PublishedTables, published_tables, table_input
    from batch_assets.table_access.opened_table import table

__all__ = [
    "GeneratedDataset",
    "PublishedTables",
    "file_permissions",
    "published_tables",
    "settings",
    "table",
    "table_input",
    "tags",
]
_PLACES = {
    "GeneratedDataset": "component",
    "PublishedTables": "table_access.asset_inputs",
    "published_tables": "table_access.asset_inputs",
    "table": "table_access.opened_table",
    "table_input": "table_access.asset_inputs",
}


def __getattr__(name: str) -> Any:
    """Each name is imported when somebody asks for it, so that the command line starts without Dagster."""
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What `getattr` answers: Dagster's `dg` asks for every name, and a module is no attribute before its import."""
    return sorted({*globals(), *_PLACES})
