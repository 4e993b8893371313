"""What `verify` reports: one thing that is not as it should be, in words that say what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "no_snapshot",
    "corrupt_pointer",
    "corrupt_snapshot",
    "missing_batch",
    "void_catalog_entry",
    "missing_catalog_entry",
    "wrong_data_version",
    "stale_catalog_entry",
    "wrong_catalog_counts",
    "corrupt_object",
    "missing_table",
    "stale_table",
    "broken_table",
    "wrong_table_counts",
    "duplicate_ids",
    "stale_dead_letters",
]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it should be; `batch` is None when it concerns the whole dataset."""

    kind: Kind
    batch: str | None
    expected: str
    found: str
    todo: str


def error_text(error: Exception) -> str:
    """An error as the `found` of a difference."""
    return f"{type(error).__name__}: {error}"
