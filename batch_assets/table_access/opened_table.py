"""A version of a published table, to be read with Polars, PyArrow or DuckDB, from a folder or from S3.

What is opened stays the same: the files are those of one version, whatever is published meanwhile. A version is there
until two newer ones are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batch_assets import settings
from batch_assets.publishing.derived_table import DerivedStore
from batch_assets.publishing.published_table import PublishedTable, broken_files, published_table
from batch_assets.spec.source import JUDGED, PASSED
from gpu_runner.errors import ExitStatus, UserFacingError
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import DatasetStore

if TYPE_CHECKING:
    import duckdb
    import polars as pl
    import pyarrow as pa
    import pyarrow.dataset
    from pyarrow.fs import FileSystem

_NAME, _VERSION = re.compile(r"[a-z0-9][a-z0-9_]{0,62}"), re.compile(r"[0-9a-f]{16}")


class TableError(UserFacingError):
    """There is no such table: says which are there, and what to do."""

    exit_status = ExitStatus.WRONG_REQUEST


@dataclass(frozen=True)
class Table:
    """One version of a dataset's table: one line per source row, of its `columns` (names in order).

    `uris`: its Parquet files, as paths or `s3://` addresses. Nothing of them is read before one of the methods is
    called, and by `lazy`, `dataset` and `relation` not before somebody asks for rows.
    """

    name: str
    version: str
    rows: int
    columns: tuple[str, ...]
    uris: tuple[str, ...]
    _objects: Objects

    def lazy(self) -> pl.LazyFrame:
        """The table as a Polars LazyFrame: filters and columns are pushed down to the files."""
        import polars as pl

        return pl.scan_parquet(list(self.uris), glob=False, storage_options=self._objects.storage_options() or None)

    def dataset(self) -> pyarrow.dataset.Dataset:
        """The table as a PyArrow dataset, which is read batch by batch."""
        import pyarrow.dataset as ds

        filesystem, scheme = _filesystem(self._objects)
        return ds.dataset([uri.removeprefix(scheme) for uri in self.uris], format="parquet", filesystem=filesystem)

    def arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The whole table in memory, or these columns of it."""
        return self.dataset().to_table(columns=None if columns is None else list(columns))

    def relation(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """The table as a DuckDB relation of this connection, or of one of its own. Needs no extension, also for S3."""
        import duckdb

        return (connection or duckdb.connect()).from_arrow(self.dataset())


def table(
    name: str, version: str | None = None, *, passed: bool = False, judged: bool = False, store: str | None = None
) -> Table:
    """The table of a dataset: the newest, or the given version (16 hex digits).

    `passed`: of the rows that pass its filter. `judged`: of those that it judged.

    `store`: a folder or s3://bucket/prefix; BATCH_ASSETS_STORE without. Keys for S3 come from the environment, as
    everywhere. Raises TableError where there is no such table, StoreError for a store that cannot be opened.
    """
    objects = open_objects(store or settings.store_root())
    found = find_table(objects, name, version, part_of(passed=passed, judged=judged))
    uris = tuple(objects.uri(f"{found.path}/{file.name}") for file in found.files)
    return Table(name, found.version, found.rows, tuple(column.name for column in found.columns), uris, objects)


def part_of(*, passed: bool, judged: bool) -> str | None:
    """Which of the tables that are made of a dataset's own one is meant; None: that one itself. Raises TableError."""
    if passed and judged:
        raise TableError("expected one of passed and judged, found both: rows that pass have their scores, too")
    return PASSED if passed else JUDGED if judged else None


def check_name(name: str) -> None:
    """Raise TableError for what is no name of a dataset."""
    if not _NAME.fullmatch(name):
        raise TableError(f"expected the name of a dataset (a-z, 0-9 and _), found {name[:80]!r}")


def find_table(objects: Objects, name: str, version: str | None = None, part: str | None = None) -> PublishedTable:
    """What is known of the table, or of one that is made of it (`part`: PASSED or JUDGED); its files are all there, of
    their sizes. Raises TableError.
    """
    check_name(name)
    if version is not None and not _VERSION.fullmatch(version):
        raise TableError(f"{name}: expected a version of 16 hex digits, found {version[:80]!r}")
    data = DatasetStore(objects, name)
    data = data if part is None else DerivedStore(data, part)
    found = published_table(data, version)
    if found is None or found.dataset != data.dataset:
        raise TableError(_no_table(data, version))
    if broken := broken_files(data, found):
        named = ", ".join(broken[:5])
        raise TableError(f"{objects.uri(found.path)}: {named} gone or of another size; {data.mended_by_run}")
    return found


def _no_table(data: DatasetStore, version: str | None) -> str:
    prefix = f"{data.dataset}/published/"
    paths = (info.path[len(prefix) :] for info in data.objects.list(prefix))
    there = [path.removesuffix("/manifest.json") for path in paths if path.endswith("/manifest.json")]
    if not there:
        name, _, part = data.dataset.partition("/")
        hint = f" where the dataset has a `{'judge' if part == JUDGED else 'filter'}`" if part else ""
        return f"{data.dataset}: no table in {data.objects.root}; `batch-assets run {name}` makes one{hint}"
    current = data.current_published()
    wanted = f"version {version}" if version else "a table"
    return (
        f"{data.dataset}: expected {wanted}, found {', '.join(there)} (current: {current}). A version is deleted when "
        "two newer ones are published: copy or export what must stay"
    )


def _filesystem(objects: Objects) -> tuple[FileSystem | None, str]:
    """The file system of a store for Arrow, and what its addresses begin with there."""
    from pyarrow import fs

    options: dict[str, Any] = objects.storage_options()
    if not options:
        return None, ""
    if objects.root.startswith("gs://"):
        raise TableError("expected a store in a folder or in S3 for Arrow and DuckDB, found one in gs://; use lazy()")
    endpoint = options.get("aws_endpoint_url")
    scheme, _, address = endpoint.partition("://") if endpoint else ("https", "", None)
    return (
        fs.S3FileSystem(
            access_key=options.get("aws_access_key_id"),
            secret_key=options.get("aws_secret_access_key"),
            session_token=options.get("aws_session_token"),
            region=options["aws_region"],
            endpoint_override=address,
            scheme=scheme,
        ),
        "s3://",
    )
