"""Where a dataset's rows come from: `source:` of a defs.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, SerializerFunctionWrapHandler, Tag, model_serializer, model_validator

from batch_assets.spec.errors import Unusable, show
from batch_assets.spec.fields import (
    AssetName,
    Column,
    Condition,
    Delimiter,
    Flag,
    Name,
    Scalar,
    SourcePath,
    Strict,
)

Encoding = Literal["utf-8", "utf-16", "utf-16-le", "utf-16-be", "windows-1252"]
_KINDS = ("path", "asset", "dataset", "grid")
TABLE = "dataset"  # last part of the asset key of the table of a dataset
PASSED = "passed"  # of that of the rows that its filter lets pass
JUDGED = "judged"  # of that of the rows that it judged
ASSETS = (
    "source",
    "prompts",
    "rows",
    TABLE,
    JUDGED,
    PASSED,
    "dead_letters",
)  # last parts of the keys of all its assets
_NEWER = (
    *("asset", "dataset", "include_errors", "judged", "passed", "streaming", "rename", "explode", "group_by"),
    *("min_group", "pairs"),
)
_TEXT_FORMATS, _DELIMITED = ("jsonl", "json", "csv", "tsv"), ("csv", "tsv")


class GridColumn(Strict):
    """One list of a grid, read from a column of a CSV or TSV file."""

    csv: SourcePath = Field(description="CSV file with a header line, or TSV (`.tsv`).")
    column: Column = Field(description="Column of that file; every line is one value.")
    delimiter: Delimiter | None = Field(default=None, description="As `source.delimiter`.")
    encoding: Encoding | None = Field(default=None, description="As `source.encoding`.")


def _grid_kind(value: Any) -> str:
    return "csv" if isinstance(value, Mapping | GridColumn) else "list"


GridValues = Annotated[
    Annotated[list[Scalar], Tag("list")] | Annotated[GridColumn, Tag("csv")], Discriminator(_grid_kind)
]


def may_hold_secret(path: str) -> bool:
    """Whether an address names more than a place; the path is shown in the catalog. `?` is a wildcard in keys."""
    scheme, found, rest = path.partition("://")
    if not found:
        return False
    bucket = scheme.lower() in ("s3", "gs", "hf")  # of the hub, whose addresses were looked at before, the first part
    return bool({"@", ":"} & set(rest.partition("/")[0])) if bucket else bool({"@", "?", "#"} & set(rest))


class SourceSpec(Strict):
    """Where the rows come from: exactly one of `path`, `asset`, `dataset` and `grid`."""

    path: SourcePath | None = Field(
        default=None,
        description="Parquet, JSONL, JSON, CSV or TSV: a file, a glob (data/*.parquet), s3://bucket/key, "
        "gs://bucket/key, or hf://datasets/OWNER/NAME@REVISION/data/*.parquet on the Hugging Face hub.",
    )
    asset: AssetName | None = Field(
        default=None,
        description="Key of any Dagster asset (`some/key`), whose table is read: where it lies is the metadata "
        "`dagster/uri` or `path` of its newest materialization. A file, or a folder of them.",
    )
    dataset: Name | None = Field(
        default=None,
        description="Name of another dataset, whose published table is read: its rows with an answer. The id of a row "
        "is that of the row that it was made from, unless `id` names another column.",
    )
    include_errors: Flag | None = Field(
        default=None, description="Beside `dataset`: its rows without an answer, too. Their `error` says why."
    )
    streaming: Flag | None = Field(
        default=None,
        description="Beside `dataset`, but not beside `group_by`: in a chain, rows of batches that are committed there "
        "are read and asked while the others are made. The table is published when all are there.",
    )
    passed: Flag | None = Field(
        default=None, description="Beside `dataset`: only its rows that pass its `filter`. Their `flags` say what else."
    )
    judged: Flag | None = Field(
        default=None, description="Beside `dataset`, one with a `judge`: the rows that it judged, with their scores."
    )
    grid: dict[Column, GridValues] | None = Field(
        default=None, min_length=1, description="One row per combination of these lists; the last one varies fastest."
    )
    format: Literal["parquet", "jsonl", "json", "csv", "tsv"] | None = Field(
        default=None, description="Format of the files; otherwise taken from their ending (.gz and .zst may follow)."
    )
    delimiter: Delimiter | None = Field(
        default=None,
        description="CSV and TSV only: the character between two fields, such as ';'. CSV has a comma, TSV a tab.",
    )
    encoding: Encoding | None = Field(
        default=None,
        description="Files of text only: their encoding, if it is not UTF-8. `utf-16` needs a byte order mark.",
    )
    rename: dict[Column, Column] | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="Columns that are called otherwise here: old name to new name. All other keys use the new one.",
    )
    explode: Column | None = Field(
        default=None,
        description="Column that holds lists (JSON text, or lists): each element becomes a row. Fields of elements "
        "that are objects become columns; another element is the value of the column. With dots, a list within an "
        "object: `output.questions`.",
    )
    where: Condition | None = Field(
        default=None,
        description="SQL condition over the columns, e.g. score > 3 AND lang = 'en'; other rows are left out.",
    )
    group_by: list[Column] | None = Field(
        default=None,
        min_length=1,
        max_length=20,
        description="Rows with the same values of these columns become one row, after `where`; the other columns are "
        "lists, in the order of the source.",
    )
    min_group: int | None = Field(
        default=None, ge=1, le=10_000, description="Beside `group_by`: groups of fewer rows are left out."
    )
    pairs: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="Beside `group_by` and `dataset`: not a row of each group, but one of each pair of its rows, in "
        "both orders, of so many pairs at most. Lists have two elements. With fewer pairs than there are, all rows are "
        "in about as many.",
    )
    limit: int | None = Field(
        default=None, ge=1, le=(1 << 63) - 1, description="Only the first rows that `where` lets through."
    )

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without keys that are newer than code versions of datasets which leave them out."""
        found: dict[str, Any] = write(self)
        return {key: value for key, value in found.items() if value is not None or key not in _NEWER}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in _KINDS if getattr(self, key) is not None]
        if len(given) != 1:
            raise Unusable("exactly one of path, asset, dataset and grid", " and ".join(given) or "none")
        if may_hold_secret(self.path or ""):
            raise Unusable("a path or address without user, password or query", "one with it", key="path")
        self._check_options()
        self._check_derived()
        for name, values in (self.grid or {}).items():
            if isinstance(values, list) and not values:
                raise Unusable("at least one value", "an empty list", key=f"grid.{name}")
        return self

    def _check_options(self) -> None:
        """Each option of files is refused where it can mean nothing; what a file's ending says, its reader checks."""
        for key in ("format", "delimiter", "encoding"):
            for kind in ("grid", "dataset"):
                if getattr(self, kind) is not None and getattr(self, key) is not None:
                    raise Unusable(f"no {key} beside a {kind}", show(getattr(self, key)), key=key)
        if self.delimiter is not None and self.format not in (None, *_DELIMITED):
            raise Unusable("a delimiter beside CSV or TSV files only", f"format: {self.format}", key="delimiter")
        if self.encoding is not None and self.format not in (None, *_TEXT_FORMATS):
            raise Unusable("an encoding beside files of text only", f"format: {self.format}", key="encoding")

    def _check_derived(self) -> None:
        if self.include_errors is not None and self.dataset is None:
            raise Unusable("include_errors beside a dataset only", show(self.include_errors), key="include_errors")
        if self.streaming is not None and self.dataset is None:
            raise Unusable("streaming beside a dataset only", show(self.streaming), key="streaming")
        if self.streaming and self.group_by is not None:
            raise Unusable("no streaming beside group_by, as a group needs all of its rows", "both", key="streaming")
        hints = {
            PASSED: "A table is filtered when all of its rows are there.",
            JUDGED: "Votes are counted when all are there.",
        }
        for key, hint in hints.items():
            if getattr(self, key) is not None and self.dataset is None:
                raise Unusable(f"{key} beside a dataset only", show(getattr(self, key)), key=key)
            if getattr(self, key) and self.streaming:
                raise Unusable(f"one of {key} and streaming", "both", hint, key=key)
        if self.passed and self.judged:
            raise Unusable("one of passed and judged", "both", "Rows that pass have their scores, too.", key=PASSED)
        if self.passed and self.include_errors:
            hint = "Rows without an answer never pass."
            raise Unusable("one of passed and include_errors", "both", hint, key="passed")
        if self.min_group is not None and self.group_by is None:
            raise Unusable("min_group beside group_by only", show(self.min_group), key="min_group")
        if self.pairs is not None and (self.group_by is None or self.dataset is None):
            raise Unusable("pairs beside group_by and dataset only", show(self.pairs), key="pairs")
        new = list((self.rename or {}).values())
        if twice := [name for name in new if new.count(name) > 1]:
            raise Unusable("each new name once", show(twice[0]), key="rename")
        if self.group_by is not None and len(set(self.group_by)) < len(self.group_by):
            raise Unusable("each column once", show(self.group_by), key="group_by")
        if self.explode is not None and not all(self.explode.split(".")):
            raise Unusable("a column, or names with dots between them", show(self.explode), key="explode")

    @property
    def derives(self) -> bool:
        """Whether rows are others than those of the files: renamed, left out for their errors, or made of lists."""
        return bool(self.answers_only or self.rename or self.explode)

    @property
    def answers_only(self) -> bool:
        """Whether rows of another dataset are read only where they have an answer."""
        return self.dataset is not None and not self.include_errors

    @property
    def part(self) -> str | None:
        """Which of the tables that are made of a dataset's own one is read; None: that one itself."""
        return PASSED if self.passed else JUDGED if self.judged else None

    @property
    def table_version(self) -> str | None:
        """Version of the table that is read, once `path` says where it lies: `…/VERSION/part-*.parquet`."""
        return self.path.split("/")[-2] if self.dataset is not None and self.path else None

    @property
    def exploded_parts(self) -> tuple[str, list[str], str]:
        """Of `explode`: the column, the keys down to the list, and the name of elements that are no objects."""
        column, *path = (self.explode or "").split(".")
        return column, path, path[-1] if path else column

    def name_in_file(self, name: str) -> str:
        """What a column is called in the files."""
        return next((old for old, new in (self.rename or {}).items() if new == name), name)

    def name_here(self, name: str) -> str:
        """What a column of the files is called here."""
        return (self.rename or {}).get(name, name)


def dataset_read_by(source: SourceSpec) -> str | None:
    """Name of the dataset of which an asset is read: its table or, if there is one of this name, any of its assets."""
    if source.dataset is not None:
        return source.dataset
    name, _, asset = (source.asset or "").partition("/")
    return name if asset in ASSETS or asset.startswith("exports/") else None


def circle_from(name: str, reads: Mapping[str, str | None]) -> list[str]:
    """The way from a dataset back to itself, by what each reads; empty where there is none."""
    way = [name]
    while (after := reads.get(way[-1])) is not None and after not in way:
        way.append(after)
    return [*way, name] if after == name else []


def table_read_by(source: SourceSpec) -> str | None:
    """Asset key of the table that a source is, with / between its parts; None for files and grids."""
    if source.dataset is None:
        return source.asset
    return f"{source.dataset}/{source.part or TABLE}"
