"""The table of the rows that pass a dataset's filter: a published table of its own in `NAME/passed`, one version for
each version of the dataset's table and of the rules.

Rows that fall out lie in the same folder, in `fallen-00000.parquet`, … The column `flags` of both names the rules that
flag a row. The dataset's own table stays as it is. Memory is that of one row group, and a byte a row and rule; what
compares rows uses the disk (`repeated_rows`). After a kill it is made anew, with the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import ConfigDict

from batch_assets.filtering.repeated_rows import RowsMark
from batch_assets.filtering.row_marks import Flags, Mark, NoAnswerMark, mark_of
from batch_assets.filtering.text_marks import files_digest
from batch_assets.publishing.derived_table import DerivedStore, renewed, report_of, write_manifest
from batch_assets.publishing.publish import PART_ROWS, whole_table
from batch_assets.publishing.published_table import PublishedTable, published_table, table_batches
from batch_assets.publishing.table_files import TableFile, TableWriter
from batch_assets.spec.models import FLAGS
from batch_assets.spec.row_rules import NO_ANSWER, SURPLUS, RowRule, WantSpec, rules_digest
from batch_assets.spec.source import PASSED
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import DatasetStore
from resources.store.object_integrity import Sealed, sha256_of
from resources.store.row_condition import BadCondition
from resources.store.snapshot_manifest import stratum_of

FORMAT = 1
STRETCHES = 64  # by which the acceptance of all rows is told; of many strata, four of each
REPORT = "filter.json"
_FLAGS_TYPE = pa.list_(pa.string())


class FilterReport(Sealed):
    """What a filter did, `filter.json` beside the table of the rows that pass.

    `table`: version of the dataset's table. `rules`: digest of the rules. `flagged`, `removed`: rows by rule, and
    by `error` those without an answer; a row that several rules remove counts at each. `files`: of the fallen rows.
    `not_compared`: by rule that compares rows, how many had no text or no vector.
    `wanted`: accepted rows that are wanted; `accepted`, by stratum: stretches of rows as (rows, accepted) in their
    order, those beyond `wanted` too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: int = FORMAT
    table: str
    rules: str
    passed: int
    fallen: int
    flagged: dict[str, int]
    removed: dict[str, int]
    files: list[TableFile]
    not_compared: dict[str, int] | None = None
    wanted: int | None = None
    accepted: dict[str, list[tuple[int, int]]] | None = None

    @property
    def all_wanted(self) -> int | None:
        """Accepted rows that are wanted, of all strata together."""
        return None if self.wanted is None else self.wanted * max(1, len(self.accepted or {}))


class PassedStore(DerivedStore):
    """The place of a dataset's passed rows in its store."""

    def __init__(self, of: DatasetStore) -> None:
        super().__init__(of, PASSED)


def filtered(
    store: DatasetStore,
    rules: Mapping[str, RowRule],
    *,
    base: Path,
    now: float,
    workdir: Path,
    part_rows: int = PART_ROWS,
    keep_versions: int = 2,
    target: DatasetStore | None = None,
    want: WantSpec | None = None,
) -> tuple[PublishedTable, FilterReport]:
    """Filter the published table of a dataset, and switch readers of the passed rows to what was found; one that was
    made of the same table by the same rules is taken as it is. `base`: where paths of rules begin. `target`: where the
    passed rows lie; PassedStore without. `want`: of rows that pass, only the first so many stay.

    Raises BadCondition where a rule does not fit the table, CorruptObject.
    """
    table = published_table(store)
    if table is None:
        raise BadCondition(f"filter: expected a published table of {store.dataset}, found none; {store.mended_by_run}")
    target, version = target or PassedStore(store), filter_version(table.version, rules, base, want)
    passed = renewed(
        target,
        version,
        not _fallen_changed(target, version),
        lambda: _write(store, table, target, version, rules, base, now, workdir, part_rows, want),
        keep_versions,
    )
    report = read_report(target, version)
    assert report is not None, "it is written before the manifest"
    return passed, report


def filter_version(table: str, rules: Mapping[str, RowRule], base: Path, want: WantSpec | None = None) -> str:
    """Version (16 hex digits) of the passed rows of a version of the table: another one where a rule has changed, or a
    file that it reads. Raises BadCondition."""
    digest = hashlib.sha256(f"{FORMAT} {table} {rules_digest(rules, want)}\n".encode())
    for name, rule in rules.items():
        if rule.overlap is not None:
            with _named(name):
                digest.update(f"{files_digest(rule.overlap, base)}\n".encode())
    return digest.hexdigest()[:16]


def read_report(target: DatasetStore, version: str | None = None) -> FilterReport | None:
    """What the filter did for the version that readers see, or another one; None before. Raises CorruptObject."""
    return report_of(target, REPORT, FilterReport, version)


def is_current(
    store: DatasetStore,
    rules: Mapping[str, RowRule],
    base: Path,
    target: DatasetStore | None = None,
    want: WantSpec | None = None,
) -> bool:
    """Whether the passed rows are those of the published table, by these rules, with all their files. Raises
    BadCondition."""
    table, target = published_table(store), target or PassedStore(store)
    try:
        passed = whole_table(target)
        if table is None or passed is None:
            return False
        return passed.version == filter_version(table.version, rules, base, want)
    except CorruptObject:
        return False


@dataclass(frozen=True, slots=True)
class FilteredRow:
    """What the filter made of a row: the rules that flag it, and whether it fell out. `table`: of which version."""

    flags: Sequence[str]
    fell_out: bool
    table: str

    def describe(self) -> str:
        """For people."""
        by = ", ".join(self.flags)
        if self.fell_out:
            return f"fell out by {by}"
        return f"passes, marked by {by}" if by else "passes"


def filtered_row(store: DatasetStore, row_id: str) -> FilteredRow | None:
    """What the filter made of a row when the rows that pass were made last; None where it did not see the row. Reads
    all ids. Raises CorruptObject."""
    target = PassedStore(store)
    passed = published_table(target)
    report = None if passed is None else read_report(target, passed.version)
    if passed is None or report is None:
        return None
    for files, fell_out in ((report.files, True), (passed.files, False)):
        for file in files:
            path = target.published_path(passed.version, file.name)
            with target.objects.open(path) as opened, pq.ParquetFile(opened) as part:
                for batch in part.iter_batches(columns=["row_id", FLAGS]):
                    place = pc.index(batch.column("row_id").cast(pa.string()), row_id).as_py()
                    if place >= 0:
                        return FilteredRow(batch.column(FLAGS)[place].as_py(), fell_out, report.table)
    return None


def _fallen_changed(target: DatasetStore, version: str) -> bool:
    """Whether files of the fallen rows are not as they were written."""
    try:
        report = read_report(target, version)
        return report is None or any(
            sha256_of(target.objects, target.published_path(version, file.name)) != file.sha256 for file in report.files
        )
    except (CorruptObject, FileNotFoundError):
        return True


def _write(
    store: DatasetStore,
    table: PublishedTable,
    target: DatasetStore,
    version: str,
    rules: Mapping[str, RowRule],
    base: Path,
    now: float,
    workdir: Path,
    part_rows: int,
    want: WantSpec | None,
) -> PublishedTable:
    names = [column.name for column in table.columns]
    with store.objects.open(f"{table.path}/{table.files[0].name}") as file:
        schema = pq.read_schema(file)
    if (taken := next((name for name in names if name.lower() == FLAGS), None)) is not None:
        raise BadCondition(
            f"filter: expected no column called {FLAGS} in the table, found {taken}: source.rename helps"
        )
    flags = _flags(store, table, rules, names, base, workdir, wanted=want is not None)
    accepted = None if want is None else _flag_surplus(store, table, want, flags)
    written = schema.append(pa.field(FLAGS, _FLAGS_TYPE, nullable=False))
    with (
        TableWriter(target, version, written, workdir, part_rows) as passed,
        TableWriter(target, version, written, workdir, part_rows, "fallen") as fallen,
    ):
        first = 0
        for rows in _tables(store, table, names):
            out = flags.fallen(first, rows.num_rows)
            rows = rows.append_column(written.field(FLAGS), flags.column(first, rows.num_rows))
            passed.write(rows.filter(pa.array(~out)))
            fallen.write(rows.filter(pa.array(out)))
            first += rows.num_rows
        files, others = passed.finish(), fallen.finish()
    flagged, removed = flags.counts()
    report = FilterReport(
        table=table.version,
        rules=rules_digest(rules, want),
        passed=passed.totals.rows,
        fallen=fallen.totals.rows,
        flagged=flagged,
        removed=removed,
        files=others,
        not_compared=flags.not_compared,
        wanted=None if want is None else want.rows,
        accepted=accepted,
    )
    return write_manifest(
        table,
        target,
        version,
        totals=passed.totals,
        files=files,
        schema=written,
        descriptions={FLAGS: "rules of the filter that mark the row"},
        report=(REPORT, report),
        now=now,
    )


def _flags(
    store: DatasetStore,
    table: PublishedTable,
    rules: Mapping[str, RowRule],
    known: list[str],
    base: Path,
    folder: Path,
    *,
    wanted: bool,
) -> Flags:
    """Which rows each rule flags, one rule after the other. Neighbours that look at a row alone share a pass over their
    columns; one that compares rows has a pass of its own, over the rows that have not fallen out before."""
    flags = Flags(rules, table.rows, wanted=wanted)
    marks: list[tuple[str, Mark | Callable[[Path, int], RowsMark]]] = [(NO_ANSWER, NoAnswerMark())]
    for name, rule in rules.items():
        with _named(name):
            marks.append((name, mark_of(rule, known, base)))
    for compares, group in itertools.groupby(marks, lambda one: callable(one[1])):
        if not compares:
            _flag_alone(store, table, {name: cast(Mark, mark) for name, mark in group}, flags)
            continue
        for name, make in group:
            made = cast(Callable[[Path, int], RowsMark], make)
            with _named(name), contextlib.closing(made(folder, table.rows)) as mark:
                _flag_compared(store, table, name, mark, flags)
    return flags


def _flag_alone(store: DatasetStore, table: PublishedTable, marks: Mapping[str, Mark], flags: Flags) -> None:
    import polars as pl

    columns = list(dict.fromkeys(itertools.chain.from_iterable(mark.columns for mark in marks.values())))
    first = 0
    for rows in _tables(store, table, columns):
        frame = pl.DataFrame(pl.from_arrow(rows))
        for name, mark in marks.items():
            with _named(name):
                flags.flag(name, first, mark.flagged(frame).to_numpy())
        first += rows.num_rows


def _flag_compared(store: DatasetStore, table: PublishedTable, name: str, mark: RowsMark, flags: Flags) -> None:
    import polars as pl

    first = 0
    for rows in _tables(store, table, list(mark.columns)):
        stays = ~flags.fallen(first, rows.num_rows)
        mark.learn(pl.DataFrame(pl.from_arrow(rows)).filter(pl.Series(stays)), first + np.flatnonzero(stays))
        first += rows.num_rows
    flags.not_compared[name] = mark.skipped
    for found in mark.flagged():
        flags.flag_rows(name, found)


def _flag_surplus(
    store: DatasetStore, table: PublishedTable, want: WantSpec, flags: Flags
) -> dict[str, list[tuple[int, int]]]:
    """Flag rows that pass after as many as are wanted, in the order of the table: rows that are added later come after
    them, and change no choice. Returns what was accepted of each stratum, by stretches of its rows."""
    stays, codes, strata = ~flags.fallen(0, table.rows), np.zeros(table.rows, np.int32), {"": 0}
    if want.per is not None:
        strata, first = {}, 0
        for rows in _tables(store, table, [want.per]):
            values = rows.column(0)
            if values.type == pa.timestamp("ns", getattr(values.type, "tz", None)):
                values = values.cast(pa.string())  # as a source has them: Python's datetime ends at microseconds
            for value in values.to_pylist():
                codes[first] = strata.setdefault(stratum_of(value), len(strata))
                first += 1
    parts = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes, minlength=len(strata)))[:-1])
    most = max(4, STRETCHES // len(strata))
    found = {}
    for stratum, rows in zip(strata, parts, strict=True):
        flags.flag_rows(SURPLUS, rows[stays[rows]][want.rows :])
        ends = [len(rows) * part // most for part in range(most + 1)]
        found[stratum] = [
            (end - begin, int(stays[rows[begin:end]].sum())) for begin, end in itertools.pairwise(ends) if end > begin
        ]
    return found


@contextlib.contextmanager
def _named(rule: str) -> Iterator[None]:
    """What is wrong names the rule."""
    try:
        yield
    except BadCondition as error:
        raise BadCondition(f"filter.{rule}: {error}") from None


def _tables(store: DatasetStore, table: PublishedTable, columns: list[str]) -> Iterator[pa.Table]:
    for batch in table_batches(store, table, columns):
        yield pa.Table.from_batches([batch])
