"""Where a dataset's rows come from: `source:` of a defs.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from batch_assets.spec.errors import Unusable, show
from batch_assets.spec.fields import Column, Condition, Scalar, SourcePath, Strict


class GridColumn(Strict):
    """One list of a grid, read from a column of a CSV file."""

    csv: SourcePath = Field(description="CSV file with a header line.")
    column: Column = Field(description="Column of that file; every line is one value.")


def _grid_kind(value: Any) -> str:
    return "csv" if isinstance(value, Mapping | GridColumn) else "list"


GridValues = Annotated[
    Annotated[list[Scalar], Tag("list")] | Annotated[GridColumn, Tag("csv")], Discriminator(_grid_kind)
]


def _may_hold_secret(path: str) -> bool:
    """Whether an address names more than a place; the path is shown in the catalog. `?` is a wildcard in S3 keys."""
    scheme, found, rest = path.partition("://")
    if not found:
        return False
    s3 = scheme.lower() == "s3"
    return bool({"@", ":"} & set(rest.partition("/")[0])) if s3 else bool({"@", "?", "#"} & set(rest))


class SourceSpec(Strict):
    """Where the rows come from: exactly one of `path` and `grid`."""

    path: SourcePath | None = Field(
        default=None,
        description="Parquet, JSONL or CSV: a file, a glob (data/*.parquet) or s3://bucket/key.",
    )
    grid: dict[Column, GridValues] | None = Field(
        default=None, min_length=1, description="One row per combination of these lists; the last one varies fastest."
    )
    format: Literal["parquet", "jsonl", "csv"] | None = Field(
        default=None, description="Format of the files; otherwise taken from their ending (.gz and .zst may follow)."
    )
    where: Condition | None = Field(
        default=None,
        description="SQL condition over the columns, e.g. score > 3 AND lang = 'en'; other rows are left out.",
    )
    limit: int | None = Field(
        default=None, ge=1, le=(1 << 63) - 1, description="Only the first rows that `where` lets through."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.grid is None):
            found = "neither" if self.path is None else "both"
            raise Unusable("exactly one of path and grid", found)
        if _may_hold_secret(self.path or ""):
            raise Unusable("a path or address without user, password or query", "one with it", key="path")
        if self.grid is not None and self.format is not None:
            raise Unusable("no format beside a grid", show(self.format), key="format")
        for name, values in (self.grid or {}).items():
            if isinstance(values, list) and not values:
                raise Unusable("at least one value", "an empty list", key=f"grid.{name}")
        return self
