"""A published table: what its manifest says, its version, and whether its files are there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from pydantic import ConfigDict, Field

from batch_assets.publishing.table_files import Column, Source, TableFile
from resources.objects.opening import Objects
from resources.store.dataset_store import BatchObject, DatasetStore
from resources.store.object_integrity import Sealed, StoredFile, read_sealed

FORMAT = 1


class BrokenTable(Exception):
    """Files of a published version are gone or have another size than its manifest says."""


class PublishedTable(Sealed):
    """A published version, as its manifest.json says.

    `rows` counts lines: one per source row that was not rejected, `ok` + `dead`, with `duplicates` among them. Tokens
    and `usd` are those of the rows that were asked; a duplicate adds nothing. `usd` covers all but the `unpriced` rows
    and is None while no price is known. `reused`: rows that were asked and paid for by another dataset, by its name.
    `model`: the one that was asked for (None: written before it was kept); those that answers named are in `sources`.
    `output_mismatches`: rows that were asked and whose output does not make the columns of `output.columns`; None: the
    table has no such columns.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: int = FORMAT
    dataset: str
    snapshot: str
    version: str
    created_at: float
    batches: int
    generations: int
    rows: int
    ok: int
    dead: int
    duplicates: int
    dead_duplicates: int
    prompt_tokens: int
    completion_tokens: int
    usd: float | None
    unpriced: int
    bytes: int
    simulated: bool
    columns: list[Column]
    sources: list[Source]
    files: list[TableFile]
    card: StoredFile | None = None
    reused: dict[str, int] = Field(default_factory=dict)
    model: str | None = None
    output_mismatches: int | None = None

    def stored(self) -> Iterator[TableFile | StoredFile]:
        """Every object of the version beside its manifest."""
        yield from self.files
        if self.card:
            yield self.card

    @property
    def parts(self) -> int:
        """Number of Parquet files."""
        return len(self.files)

    @property
    def path(self) -> str:
        """Folder of this version, below the store's root."""
        return f"{self.dataset}/published/{self.version}"

    def uri(self, objects: Objects) -> str:
        """Folder as a path or `s3://` URL."""
        return objects.uri(self.path)

    def glob(self, objects: Objects) -> str:
        """All parts, for `polars.scan_parquet` and DuckDB's `read_parquet`."""
        return objects.uri(f"{self.path}/part-*.parquet")


def table_version(
    snapshot: str, current: Mapping[str, BatchObject], *, prompt: bool = True, output_columns: bool = False
) -> str:
    """Version (16 hex digits) of the table that a snapshot and its current objects make, with or without prompts, and
    the columns of outputs, which follow from the snapshot's schema.

    A table without them has the version that it had before there were such columns.
    """
    with_columns = f"{' prompt' if prompt else ''}{' output columns' if output_columns else ''}"
    digest = hashlib.sha256(f"{FORMAT} {snapshot}{with_columns}\n".encode())
    for key in sorted(current):
        digest.update(f"{current[key].name}\n".encode())
    return digest.hexdigest()[:16]


def table_versions(snapshot: str, current: Mapping[str, BatchObject]) -> tuple[str, ...]:
    """Versions of the tables that a snapshot and its current objects make: with prompts and columns of outputs, and
    without.
    """
    return tuple(
        table_version(snapshot, current, prompt=prompt, output_columns=output_columns)
        for output_columns in (False, True)
        for prompt in (True, False)
    )


def published_table(store: DatasetStore, version: str | None = None) -> PublishedTable | None:
    """The table that readers see, or the given version; None when there is none. Raises CorruptObject."""
    version = version or store.current_published()
    if version is None:
        return None
    path = store.published_path(version, "manifest.json")
    try:
        return read_sealed(store.objects, path, PublishedTable, store.mended_by_run)
    except FileNotFoundError:
        return None


def broken_files(store: DatasetStore, table: PublishedTable) -> list[str]:
    """Names of the table's files that are gone or have another size than the manifest says."""
    found = {info.path: info.size for info in store.objects.list(f"{table.path}/")}
    return [file.name for file in table.stored() if found.get(f"{table.path}/{file.name}") != file.bytes]
