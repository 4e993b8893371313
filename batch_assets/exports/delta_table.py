"""Lines of a published table to a Delta table, in one commit, row group by row group.

That a version was written stands in the commit itself, as a transaction of the application (`txn` in
https://github.com/delta-io/delta/blob/master/PROTOCOL.md#transaction-identifiers): what a killed process wrote is
either not there, or there and not written again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from batch_assets.exports.export import answered_lines, row_groups
from batch_assets.exports.record import ExportedFile, ExportRecord
from batch_assets.publishing.published_table import PublishedTable
from batch_assets.spec.export_options import TRAIN, ExportError, ExportOptions
from batch_assets.spec.exports import DeltaMode
from resources.objects.opening import Objects

if TYPE_CHECKING:
    from deltalake import DeltaTable

VERSION_COLUMN = "table_version"  # of a table to which each version is appended
MOST_PARTITIONS = 1000  # that one version replaces: each stands in the condition of the commit
_TARGET_BYTES = 256 << 20
_COMMIT_KEY = "batchAssetsVersion"
_COMMITS_SEEN = 1000


def write_delta(
    source: Objects,
    table: PublishedTable,
    place: Objects,
    options: ExportOptions,
    *,
    export: str,
    version: str,
    mode: DeltaMode,
    partition_by: Sequence[str],
) -> ExportRecord:
    """Write a version of an export (16 hex digits), unless that was done. Memory does not grow with the table.

    overwrite: it replaces what the table holds or, with `partition_by`, the partitions of which it has rows; append: it
    is added, with the version of the published table in the column `table_version`. Raises ExportError, CorruptObject.
    """
    deltalake, storage = _package(), _storage(place)
    if place.root.startswith("gs://"):
        raise ExportError(f"delta at {place.root}: expected a folder or s3://bucket/prefix as `to`, found gs://")
    with _errors(place):
        found = _opened(place, storage)
        app = _application(table, export, version, mode)
        if found is None or found.transaction_version(app) != _number(version):
            whole = mode == "overwrite" and not partition_by
            if whole and found is not None and found.transaction_version(app) is None:
                raise ExportError(
                    f"delta at {place.root}: expected an empty folder, or a table of this export, found another table"
                )
            _commit(deltalake, _Lines(source, table, options, mode), place, found, app, version, mode, partition_by)
            found = _opened(place, storage)
        assert found is not None, "it was there or was written"
        return _record(found, table, options, version)


def _commit(
    deltalake: Any,
    lines: _Lines,
    place: Objects,
    found: DeltaTable | None,
    app: str,
    version: str,
    mode: DeltaMode,
    partition_by: Sequence[str],
) -> None:
    """Write the lines in one commit; `found`: the table as it is, None: there is none."""
    replaces = mode == "overwrite" and bool(partition_by) and found is not None
    anew = mode == "overwrite" and not replaces
    try:
        deltalake.write_deltalake(
            _uri(place),
            pa.RecordBatchReader.from_batches(lines.schema, lines.batches()),
            mode=mode,
            partition_by=list(partition_by) or None,
            schema_mode="overwrite" if anew else "merge",
            storage_options=_storage(place),
            target_file_size=_TARGET_BYTES,
            predicate=lines.partitions(partition_by) if replaces else None,
            commit_properties=deltalake.CommitProperties(
                app_transactions=[deltalake.Transaction(app, _number(version))],
                custom_metadata={_COMMIT_KEY: version},
            ),
        )
    except Exception:
        if lines.failed is not None:
            raise lines.failed from None
        raise


def is_written(place: Objects, table: PublishedTable, *, export: str, version: str, mode: DeltaMode) -> bool:
    """Whether the Delta table holds a version of an export. Raises ExportError."""
    _package()
    with _errors(place):
        found = _opened(place, _storage(place))
        return found is not None and found.transaction_version(_application(table, export, version, mode)) == _number(
            version
        )


def _package() -> Any:
    try:
        import deltalake
    except ImportError:
        raise ExportError(
            "delta: expected the package deltalake, found none; `pip install 'batch-assets[delta]'` brings it"
        ) from None
    return deltalake


def _application(table: PublishedTable, export: str, version: str, mode: DeltaMode) -> str:
    """Of a table that is overwritten, the version that was written last; of one that grows, whether this one was."""
    name = f"batch-assets/{table.dataset}/{export}"
    return name if mode == "overwrite" else f"{name}/{version}"


def _number(version: str) -> int:
    """The version as a transaction's, a whole number of 64 bits with a sign: its first 60 bits."""
    return int(version[:15], 16)


def _uri(place: Objects) -> str:
    return place.root if "://" in place.root else Path(place.root).as_uri()


def _storage(place: Objects) -> dict[str, str]:
    found = place.storage_options()
    return found | ({"aws_conditional_put": "etag"} if place.root.startswith("s3://") else {})


def _opened(place: Objects, storage: dict[str, str]) -> DeltaTable | None:
    """The table as it is now; None where the folder is empty."""
    deltalake = _package()
    if "://" not in place.root:
        Path(place.root).mkdir(parents=True, exist_ok=True)
    if deltalake.DeltaTable.is_deltatable(_uri(place), storage):
        found: DeltaTable = deltalake.DeltaTable(_uri(place), storage_options=storage)
        return found
    other = next((info.path for info in place.list("") if not info.path.endswith(".parquet")), None)
    if other is not None:  # Parquet files without a log: a first write that was killed
        raise ExportError(f"delta at {place.root}: expected an empty folder or a Delta table, found {other:.200}")
    return None


class _Lines:
    """Lines of the published table that an export has, batch by batch."""

    def __init__(self, source: Objects, table: PublishedTable, options: ExportOptions, mode: DeltaMode) -> None:
        self._source, self._table, self._options = source, table, options
        self._kept = list(options.kept) or [column.name for column in table.columns]
        self.failed: Exception | None = None
        with source.open(f"{table.path}/{table.files[0].name}") as file:
            schema = pq.read_schema(file)
        self.schema = pa.schema([schema.field(name) for name in self._kept])
        self._appended = mode == "append"
        if self._appended:
            if VERSION_COLUMN in map(str.lower, self._kept):
                raise ExportError(f"delta: expected no column {VERSION_COLUMN} beside mode append, found one")
            self.schema = self.schema.append(pa.field(VERSION_COLUMN, pa.string()))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All of them. What fails stays in `failed`: deltalake says only that its stream failed."""
        try:
            for lines in self._groups(self._kept):
                if self._appended:
                    versions = pa.repeat(pa.scalar(self._table.version), lines.num_rows)
                    lines = lines.append_column(VERSION_COLUMN, versions)
                yield from lines.cast(self.schema).to_batches()
        except Exception as error:
            self.failed = error
            raise

    def _groups(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        for _, lines in row_groups(self._source, self._table, self._options, 0):
            yield answered_lines(lines, self._options).select(list(columns))

    def partitions(self, by: Sequence[str]) -> str:
        """The condition under which a row is in a partition of which there are lines."""
        found: dict[tuple[Any, ...], None] = {}
        for lines in self._groups(by):
            found |= dict.fromkeys(zip(*(column.to_pylist() for column in lines.columns), strict=True))
            if len(found) > MOST_PARTITIONS:
                raise ExportError(
                    f"delta: expected at most {MOST_PARTITIONS:,} partitions of {', '.join(by)} to replace, found more"
                )
        if not found:
            return "false"
        return " OR ".join(f"({' AND '.join(map(_equal, by, values))})" for values in found)


def _equal(column: str, value: Any) -> str:
    name = '"' + column.replace('"', '""') + '"'
    if value is None:
        return f"{name} IS NULL"
    if isinstance(value, str):
        return f"{name} = '" + value.replace("'", "''") + "'"
    if isinstance(value, bool | int):
        return f"{name} = {str(value).lower()}"
    raise ExportError(f"delta: expected partitions by texts, whole numbers or truth values, found {column}, another")


def _record(found: DeltaTable, table: PublishedTable, options: ExportOptions, version: str) -> ExportRecord:
    """What was written, by the log; files are all of the Delta table."""
    actions = pa.table(found.get_add_actions(flatten=True))
    files = [
        ExportedFile(name=name, rows=rows or 0, bytes=size)
        for name, rows, size in zip(
            *(actions.column(name).to_pylist() for name in ("path", "num_records", "size_bytes")), strict=True
        )
    ]
    commits = (one for one in found.history(_COMMITS_SEEN) if one.get(_COMMIT_KEY) == version)
    metrics = next(commits, {}).get("operationMetrics") or {}
    rows = int(metrics.get("num_added_rows", sum(file.rows for file in files)))
    others = max(0, table.rows - table.dead - rows)
    left_out = {reason: count for reason, count in (("error", table.dead), ("where", others)) if count}
    return ExportRecord(
        dataset=table.dataset,
        version=table.version,
        options=options.as_json(),
        parts=len(files),
        lines=table.rows,
        complete=True,
        rows={TRAIN: rows},
        left_out=left_out,
        files=files,
    )


@contextlib.contextmanager
def _errors(place: Objects) -> Iterator[None]:
    """What deltalake refuses as ExportError, without its words about rows."""
    from deltalake.exceptions import CommitFailedError, DeltaError, SchemaMismatchError

    try:
        yield
    except SchemaMismatchError as error:
        raise ExportError(
            f"delta at {place.root}: expected columns that fit those of the table, found others "
            f"({str(error).splitlines()[0]:.200})"
        ) from None
    except CommitFailedError:
        raise ExportError(
            f"delta at {place.root}: expected to be the only writer of these rows, found another commit; run it again"
        ) from None
    except DeltaError as error:
        raise ExportError(f"delta at {place.root}: it cannot be written ({type(error).__name__})") from None
