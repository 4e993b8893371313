"""Files that are made of each published table: `exports:` of a defs.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from batch_assets.spec.errors import Unusable, show
from batch_assets.spec.export_options import BadOption, ExportOptions, checked_options
from batch_assets.spec.fields import Column, Condition, Flag, Name, Strict
from batch_assets.spec.source import JUDGED, PASSED
from resources.objects.opening import StoreError, checked_root

EXPORTS = "exports"  # middle part of the keys of their assets, and their folder in the store
MOST_EXPORTS = 20
PART_ROWS = 100_000
ExportFormat = Literal["messages", "sharegpt", "alpaca", "prompt-completion", "preference", "jsonl", "parquet", "delta"]
DeltaMode = Literal["overwrite", "append"]
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9](?:[\w.-]{0,94}[\w])?", re.ASCII)
_BRANCH = re.compile(r"[A-Za-z0-9][\w./-]{0,99}", re.ASCII)


def _target(value: str) -> str:
    try:
        return checked_root(value)
    except StoreError as error:
        raise Unusable("a folder or s3://bucket/prefix", show(value.partition("://")[0]), f"{error}.") from None


def _repo(value: str) -> str:
    if not _REPO.fullmatch(value) or "--" in value or ".." in value:
        raise Unusable("a dataset repository of the Hugging Face hub, as my-org/my-dataset", show(value))
    return value


def _branch(value: str) -> str:
    if not _BRANCH.fullmatch(value) or ".." in value or value.endswith((".", "/", ".lock")):
        raise Unusable("the name of a branch, as main", show(value))
    return value


class PushSpec(Strict):
    """A dataset repository of the Hugging Face hub. The token is HF_TOKEN of the environment, the hub HF_ENDPOINT."""

    repo: Annotated[str, AfterValidator(_repo)] = Field(description="ORG/NAME. It is made where there is none.")
    private: Flag = Field(default=True, description="Whether a repository that is made can be seen by its owner only.")
    branch: Annotated[str, AfterValidator(_branch)] = Field(
        default="main", description="Branch that gets the commit. It is made where there is none."
    )


class ExportSpec(Strict):
    """One export: training files, or lines of the table, made anew of each table that is published."""

    name: Name = Field(description="Its asset is `NAME/exports/EXPORT`.")
    format: Literal[
        "messages", "sharegpt", "alpaca", "prompt-completion", "preference", "jsonl", "parquet", "delta"
    ] = Field(description="How records look, as `batch-assets export --format`; delta: a Delta table at `to`.")
    to: Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_target)] | None = Field(
        default=None,
        description="Folder (a relative one starts at that of the `defs.yaml`), s3://bucket/prefix or "
        "gs://bucket/prefix, of this export alone. Default: the store, `NAME/exports/EXPORT`.",
    )
    map: dict[Column, Column] = Field(
        default={}, max_length=10, description="Fields that are read from other columns: `{chosen: answers[best]}`."
    )
    columns: list[Column] = Field(
        default=[],
        max_length=200,
        description="Columns that records carry along; of jsonl and parquet: those of a line.",
    )
    where: Condition | None = Field(default=None, description="SQL condition: only such rows of the table.")
    system: Flag = Field(default=True, description="With system messages.")
    reasoning: Flag = Field(default=False, description="With the reasoning, as `<think>` before the answer.")
    validation: float = Field(default=0.0, ge=0, lt=1, description="Share for validation, such as 0.05.")
    split_by: Column | None = Field(
        default=None, description="Column whose equal values stay on one side. Default: the prompt."
    )
    group_by: Column | None = Field(
        default=None,
        description="preference: column whose equal values are answers to one question. A pair has one prompt.",
    )
    rank_by: Column | None = Field(
        default=None, description="preference: numbers; of a group the highest is chosen, the lowest rejected."
    )
    passed: Flag = Field(default=False, description="Only rows that pass the dataset's `filter`.")
    judged: Flag = Field(default=False, description="The rows that the dataset judged, and not its votes.")
    part_rows: int = Field(
        default=PART_ROWS, ge=1, le=100_000_000, description="Lines of the table of which a file is made."
    )

    mode: DeltaMode | None = Field(
        default=None,
        description="delta: overwrite (default) replaces what the table holds or, with `partition_by`, the partitions "
        "of which there are rows; append adds each version, named in the column `table_version`.",
    )
    partition_by: list[Column] = Field(default=[], max_length=10, description="delta: columns of its partitions.")
    push: PushSpec | None = Field(
        default=None, description="A repository of the Hugging Face hub that gets the files, too."
    )

    @property
    def appends(self) -> bool:
        """Whether each version stays beside those before: none is written that the next round of a `want` replaces."""
        return self.format == "delta" and self.mode == "append"

    @property
    def part(self) -> str | None:
        """Which of the tables that are made of the dataset's own one it is made of; None: that one itself."""
        return PASSED if self.passed else JUDGED if self.judged else None

    def options(self, known: Sequence[str]) -> ExportOptions:
        """The same for a table with these columns. Raises BadOption."""
        self._check_delta(known)
        return checked_options(
            known,
            "parquet" if self.format == "delta" else self.format,
            mapping=[f"{field}={column}" for field, column in self.map.items()],
            kept=self.columns,
            system=self.system,
            reasoning=self.reasoning,
            where=self.where,
            validation=self.validation,
            split_by=self.split_by,
            part_rows=self.part_rows,
            group_by=self.group_by,
            rank_by=self.rank_by,
        )

    def _check_delta(self, known: Sequence[str]) -> None:
        if self.format != "delta":
            for key in ("mode", "partition_by"):
                if getattr(self, key):
                    raise BadOption(key, "it beside format delta only", f"format {self.format}")
            return
        if self.to is not None and self.to.startswith("gs://"):
            raise BadOption("to", "a folder or s3://bucket/prefix for format delta", "gs://…")
        for key in ("push", "validation"):
            if getattr(self, key):
                raise BadOption(key, "none beside format delta", "one")
        for column in self.partition_by:
            if column not in (self.columns or known):
                raise BadOption("partition_by", "columns of the Delta table", show(column))


def check_apart(exports: Iterable[ExportSpec]) -> None:
    """Raises Unusable where two exports have one name or one place."""
    names: set[str] = set()
    places: set[str] = set()
    for index, one in enumerate(exports):
        if one.name in names:
            raise Unusable("each name once", show(one.name), key=f"exports.{index}.name")
        if one.to is not None and (place := re.sub(r"/+$", "", one.to)) in places:
            raise Unusable("a place for each export of its own", show(one.to), key=f"exports.{index}.to")
        elif one.to is not None:
            places.add(place)
        names.add(one.name)
