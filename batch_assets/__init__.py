"""LLM-generated datasets as Dagster assets; declared in YAML or in Python; their tables for other programs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batch_assets.component import GeneratedDataset
    from batch_assets.from_python.notebook_preview import preview
    from batch_assets.from_python.own_location import generated_dataset, generated_datasets
    from batch_assets.from_python.python_spec import dataset_spec
    from batch_assets.table_access.asset_inputs import PublishedTables, published_tables, table_input
    from batch_assets.table_access.opened_table import table

__all__ = [
    "GeneratedDataset",
    "PublishedTables",
    "dataset_spec",
    "file_permissions",
    "generated_dataset",
    "generated_datasets",
    "preview",
    "published_tables",
    "settings",
    "table",
    "table_input",
    "tags",
]
_PLACES = {
    "GeneratedDataset": "component",
    "PublishedTables": "table_access.asset_inputs",
    "dataset_spec": "from_python.python_spec",
    "generated_dataset": "from_python.own_location",
    "generated_datasets": "from_python.own_location",
    "preview": "from_python.notebook_preview",
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
