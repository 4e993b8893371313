"""The files of a published table: their schema, their writer, and the totals that are counted on the way."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from batch_assets.publishing.batch_reader import table_name
from batch_assets.publishing.prompt_column import PROMPT
from gpu_runner.rows import SIMULATED, is_simulated
from resources.store.dataset_store import DatasetStore, SnapshotManifest
from resources.store.outcome_columns import REUSED_FROM, TURNS, WRITTEN_TURNS
from resources.store.outcome_tables import outcome_schema
from resources.store.table_types import prompt_type

SAMPLE_ROWS = 3
MOST_ORIGINS, OTHERS = 200, "other models"
_ORIGIN = ("model", "engine", "provider", "instance_type", "spot")
_REPEATED = ["finish_reason", "error", "model", "engine", "provider", "instance_type", "run_id", REUSED_FROM, "batch"]
_REPEATED += [f"{PROMPT}.list.element.role"]
_GROUP_ROWS = 100_000
_GROUP_BYTES = 24 << 20
_PART_BYTES = 1 << 30


class TableFile(BaseModel):
    """One Parquet file of a table; `sha256` covers all its bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    rows: int
    bytes: int
    sha256: str


class Column(BaseModel):
    """One column of a table with its Arrow type. `description`: of one that is made of the output."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    type: str
    description: str | None = None


class Source(BaseModel):
    """What one kind of instance, with one engine, contributed: rows it was asked, tokens, dollars."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str | None
    engine: str | None
    provider: str | None
    instance_type: str | None
    spot: bool | None
    rows: int
    prompt_tokens: int
    completion_tokens: int
    usd: float | None


def table_schema(store: DatasetStore, manifest: SnapshotManifest, *, prompt: bool = False) -> pa.Schema:
    """Columns of the table: row id, keep columns with their own types, prompt, outcome, provenance, batch,
    duplicate_of."""
    task = manifest.settings().task
    outcome = outcome_schema(task)
    kept: list[pa.Field] = []
    if manifest.keep_columns and manifest.shards:
        path = store.snapshot_path(manifest.snapshot, manifest.shards[0].path)
        with store.objects.open(path) as file:
            shard = pq.read_schema(file)
        kept = [pa.field(table_name(name), shard.field(name).type) for name in manifest.keep_columns]
    left_out = ["row_id", "row_key", *([] if manifest.turns else [TURNS])]
    left_out += [] if manifest.written_turns else [WRITTEN_TURNS]
    rest = [item for item in outcome if item.name not in left_out]
    ends = [pa.field("batch", pa.string(), nullable=False), pa.field("duplicate_of", pa.string())]
    asked = [pa.field(PROMPT, prompt_type(task, conversations=manifest.conversations))] if prompt else []
    return pa.schema([outcome.field("row_id"), *kept, *asked, *rest, *ends])


@dataclass
class Totals:
    """Counts over the lines of a table; tokens and dollars are those of lines that are no duplicates.
    `reused`: lines that are no duplicates, by the other dataset that paid for them."""

    rows: int = 0
    dead: int = 0
    duplicates: int = 0
    dead_duplicates: int = 0
    sample: list[dict[str, Any]] = field(default_factory=list)
    reused: Counter[str] = field(default_factory=Counter)
    _by_origin: dict[tuple[Any, ...], Counter[str]] = field(default_factory=dict)
    _priced: set[tuple[Any, ...]] = field(default_factory=set)

    def add(self, table: pa.Table) -> None:
        """Count the lines of `table`."""
        dead, copied = table.column("error").is_valid(), table.column("duplicate_of").is_valid()
        self.rows += table.num_rows
        self.dead += pc.sum(dead).as_py() or 0
        self.duplicates += pc.sum(copied).as_py() or 0
        self.dead_duplicates += pc.sum(pc.and_(dead, copied)).as_py() or 0
        if len(self.sample) < SAMPLE_ROWS:
            self.sample += table.slice(0, SAMPLE_ROWS - len(self.sample)).to_pylist()
        others = table.column(REUSED_FROM).filter(pc.invert(copied)).drop_null()
        self.reused.update({one["values"]: one["counts"] for one in others.value_counts().to_pylist()})
        asked = table.select([*_ORIGIN, "prompt_tokens", "completion_tokens", "usd"]).filter(pc.invert(copied))
        figures = [
            ("prompt_tokens", "sum"),
            ("completion_tokens", "sum"),
            ("usd", "sum"),
            ("usd", "count"),
            ([], "count_all"),
        ]
        for line in asked.group_by(list(_ORIGIN)).aggregate(figures).to_pylist():
            origin = self._listed(tuple(line[name] for name in _ORIGIN))
            counted = self._by_origin.setdefault(origin, Counter())
            counted["rows"] += line["count_all"]
            counted["unpriced"] += line["count_all"] - line["usd_count"]
            for name in ("prompt_tokens", "completion_tokens"):
                counted[name] += line[f"{name}_sum"]
            if line["usd_count"]:
                self._priced.add(origin)
                counted["usd"] += line["usd_sum"]

    def _listed(self, origin: tuple[Any, ...]) -> tuple[Any, ...]:
        """The origin to count a line under: a server may name another model in each answer, and the list has an end."""
        model, *rest = origin
        if origin in self._by_origin or len(self._by_origin) < MOST_ORIGINS:
            return origin
        return (f"{OTHERS} ({SIMULATED})" if is_simulated(model, rest[0]) else OTHERS, *rest)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all rows that were asked."""
        return sum(counted["prompt_tokens"] for counted in self._by_origin.values())

    @property
    def completion_tokens(self) -> int:
        """Completion tokens of all rows that were asked."""
        return sum(counted["completion_tokens"] for counted in self._by_origin.values())

    @property
    def usd(self) -> float | None:
        """Dollars of all rows whose price is known; None when there is none."""
        return round(sum(self._by_origin[origin]["usd"] for origin in self._priced), 6) if self._priced else None

    @property
    def unpriced(self) -> int:
        """Rows that were asked and whose price is not known."""
        return sum(counted["unpriced"] for counted in self._by_origin.values())

    @property
    def simulated(self) -> bool:
        """True when any row came from the engine simulator, which says so in its name."""
        return any(is_simulated(model, engine) for model, engine, *_ in self._by_origin)

    def sources(self) -> list[Source]:
        """The sources that generated the rows, the largest share first."""
        largest = sorted(self._by_origin.items(), key=lambda item: (-item[1]["rows"], repr(item[0])))
        return [
            Source(
                **dict(zip(_ORIGIN, origin, strict=True)),
                rows=counted["rows"],
                prompt_tokens=counted["prompt_tokens"],
                completion_tokens=counted["completion_tokens"],
                usd=round(counted["usd"], 6) if origin in self._priced else None,
            )
            for origin, counted in largest
        ]


class TableWriter:
    """Writes lines into `part-00000.parquet`, …, one local file at a time, each uploaded when it is full.

    A row group holds up to 100,000 lines or 24 MB of them, a part up to `part_rows` lines or about 1 GB. `stem`: what
    names of files begin with.
    """

    def __init__(
        self, store: DatasetStore, version: str, schema: pa.Schema, workdir: Path, part_rows: int, stem: str = "part"
    ) -> None:
        self.totals = Totals()
        self._store, self._version, self._schema = store, version, schema
        self._workdir, self._part_rows, self._stem = workdir, part_rows, stem
        self._files: list[TableFile] = []
        self._waiting: list[pa.Table] = []
        self._waiting_rows = self._waiting_bytes = self._rows = 0
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
            self._file.unlink(missing_ok=True)

    @property
    def _name(self) -> str:
        return f"{self._stem}-{len(self._files):05d}.parquet"

    @property
    def _file(self) -> Path:
        return self._workdir / f"{self._version}-{self._name}"

    def write(self, rows: pa.Table) -> None:
        """Add lines; columns that the table does not have are left out, a missing `duplicate_of` is null."""
        rows = self._shaped(rows)
        while rows.num_rows:
            room = min(self._part_rows - self._rows, _GROUP_ROWS) - self._waiting_rows
            left = _GROUP_BYTES - self._waiting_bytes
            room = min(room, max(1, left * rows.num_rows // max(1, rows.nbytes)))
            taken = rows.slice(0, room)
            self._waiting.append(taken)
            self._waiting_rows += taken.num_rows
            self._waiting_bytes += taken.nbytes
            full = self._waiting_rows >= min(self._part_rows - self._rows, _GROUP_ROWS)
            if full or self._waiting_bytes >= _GROUP_BYTES:
                self._write_group()
            rows = rows.slice(taken.num_rows)

    def finish(self) -> list[TableFile]:
        """Write what is waiting and return the files; a table without lines has one empty part."""
        if self._waiting or not self._files:
            self._write_group()
        if self._writer is not None:
            self._close_part()
        return self._files

    def _shaped(self, rows: pa.Table) -> pa.Table:
        if "duplicate_of" not in rows.column_names:
            rows = rows.append_column("duplicate_of", pa.nulls(rows.num_rows, pa.string()))
        return rows.select(self._schema.names).cast(self._schema)

    def _write_group(self) -> None:
        table = pa.concat_tables(self._waiting) if self._waiting else self._schema.empty_table()
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        self.totals.add(table)
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._file, self._schema, compression="zstd", use_dictionary=_REPEATED, write_page_checksum=True
            )
        self._writer.write_table(table, row_group_size=_GROUP_ROWS)
        self._rows += table.num_rows
        if self._rows >= self._part_rows or self._file.stat().st_size >= _PART_BYTES:
            self._close_part()

    def _close_part(self) -> None:
        assert self._writer is not None
        self._writer.close()
        file, self._writer = self._file, None
        try:
            with file.open("rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
            self._store.objects.upload(self._store.published_path(self._version, self._name), file)
            self._files.append(TableFile(name=self._name, rows=self._rows, bytes=file.stat().st_size, sha256=digest))
        finally:
            file.unlink(missing_ok=True)
        self._rows = 0
