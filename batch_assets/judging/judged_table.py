"""The table of the rows that a dataset judged: `NAME/judged`, one line for each, in the order of their first votes.

A line has the judged row's id, what was asked (`prompt`), what is judged (`output`) and the columns that are kept, so
that it is read and exported as a row of its own table is; beside these what the votes say (`votes`). A row without a
vote that counts has no score, and `error` says so. Memory is that of one row group; what is counted uses the disk.
After a kill it is made anew, with the same files.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import ConfigDict

from batch_assets.judging.votes import Pairs, Scores
from batch_assets.publishing.derived_table import DerivedStore, renewed, report_of, write_manifest
from batch_assets.publishing.prompt_column import PROMPT
from batch_assets.publishing.publish import PART_ROWS, whole_table
from batch_assets.publishing.published_table import PublishedTable, published_table, table_batches
from batch_assets.publishing.table_files import TableWriter
from batch_assets.spec.judge import JUDGED_ID, JUDGED_PROMPT, JUDGED_TEXT, SCORE, WRITTEN, JudgeSpec
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.source import JUDGED
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import DatasetStore
from resources.store.object_integrity import Sealed
from resources.store.row_condition import BadCondition
from resources.store.snapshot_manifest import SAMPLE_INDEX

FORMAT = 1
REPORT = "judge.json"
NO_VOTE = "no_vote"  # the `error` of a row of which nothing is known
UNREADABLE = "unreadable"  # votes that are lost because they are not of the form of one
_ORIGIN = ("model", "engine", "provider", "instance_type", "spot")
_USED = ("prompt_tokens", "completion_tokens", "usd")
MEANING = {
    "row_id": "id of the judged row",
    "prompt": "what was asked",
    "output": "what is judged",
    "error": "no_vote: no vote on the row counts",
    SCORE: "mean of the votes; of pairs the share that was won, ties count half",
    "votes": "how often the row was judged",
    "lost": "votes that do not count: dead letters, and what is not of the form of a vote",
    "agreement": "how much the votes agree: 1 is unanimous",
    "pairs": "pairs that were judged in both orders",
    "wins": "pairs that it won in both orders",
    "losses": "pairs that it lost in both orders",
    "ties": "pairs without a winner, or with another one in each order",
    "consistency": "share of the pairs in which both orders say the same",
    **dict.fromkeys(_USED, "of its votes"),
}


class JudgeReport(Sealed):
    """What the votes say of all rows, `judge.json` beside the table.

    `table`: version of the table of the votes. `rules`: digest of what a vote means. `rows`: that were judged, with
    `unscored` of which no vote counts. `lost_by`: votes that do not count, by error, or `unreadable`. `figures`: means,
    and how votes agree (`votes`); None where nothing can be said.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: int = FORMAT
    table: str
    rules: str
    rows: int
    unscored: int
    votes: int
    lost: int
    lost_by: dict[str, int]
    figures: dict[str, float | None]


def judged_store(store: DatasetStore) -> DatasetStore:
    """Where the judged rows of a dataset lie."""
    return DerivedStore(store, JUDGED)


def rows_store(spec: GeneratedDatasetSpec, store: DatasetStore) -> DatasetStore:
    """Where the table lies of which a filter lets rows pass: of a judge that of the judged rows."""
    return store if spec.judge is None else judged_store(store)


def read_report(store: DatasetStore, version: str | None = None) -> JudgeReport | None:
    """What was said of the judged rows that readers see. `store`: of the dataset. Raises CorruptObject."""
    return report_of(judged_store(store), REPORT, JudgeReport, version)


def judged(
    store: DatasetStore,
    spec: GeneratedDatasetSpec,
    *,
    now: float,
    workdir: Path,
    part_rows: int = PART_ROWS,
    keep_versions: int = 2,
) -> tuple[PublishedTable, JudgeReport]:
    """Count the votes of the published table of a dataset with a judge, and switch readers of the judged rows to what
    was found; one that was made of the same votes is taken as it is. Raises BadCondition, CorruptObject."""
    assert spec.judge is not None, "only a dataset with a judge has such a table"
    table = published_table(store)
    if table is None:
        raise BadCondition(f"judge: expected a published table of {store.dataset}, found none; {store.mended_by_run}")
    judge, target, version = spec.judge, judged_store(store), judged_version(table.version, spec.judge)
    made = _Judged(store, table, judge)
    found = renewed(
        target,
        version,
        _report_is_whole(store, version),
        lambda: made.write(target, version, now, workdir, part_rows),
        keep_versions,
    )
    report = read_report(store, version)
    assert report is not None, "it is written before the manifest"
    return found, report


def judged_version(table: str, judge: JudgeSpec) -> str:
    """Version (16 hex digits) of the judged rows of a version of the votes."""
    return hashlib.sha256(f"{FORMAT} {table} {_rules(judge)}\n".encode()).hexdigest()[:16]


def is_current(store: DatasetStore, judge: JudgeSpec) -> bool:
    """Whether the judged rows are those of the published table, with all their files."""
    table = published_table(store)
    try:
        found = whole_table(judged_store(store))
        return table is not None and found is not None and found.version == judged_version(table.version, judge)
    except CorruptObject:
        return False


def _report_is_whole(store: DatasetStore, version: str) -> bool:
    try:
        return read_report(store, version) is not None
    except CorruptObject:
        return False


def _rules(judge: JudgeSpec) -> str:
    """16 hex digits that change with all that decides what a vote counts for. The rubric is in the votes."""
    said = f"{judge.scores} {judge.bounds} {judge.whole} {judge.groups} {judge.question is None}"
    return hashlib.sha256(said.encode()).hexdigest()[:16]


class _Judged:
    """The judged rows of a table of votes."""

    def __init__(self, store: DatasetStore, table: PublishedTable, judge: JudgeSpec) -> None:
        self._store, self._table, self._judge = store, table, judge
        names = [column.name for column in table.columns]
        needed = [*judge.written, *judge.scores]
        if missing := [name for name in needed if name not in names]:
            raise BadCondition(
                f"judge: expected the column {missing[0]} in the table, found none; {store.mended_by_run}"
            )
        shown = [one for one in names[1 : names.index("output")] if one not in (*WRITTEN, PROMPT, SAMPLE_INDEX)]
        self._sources = {"row_id": JUDGED_ID, **{name: name for name in shown}}
        self._sources |= {"prompt": JUDGED_PROMPT} if judge.question is not None else {}
        self._sources |= {"output": JUDGED_TEXT}

    def write(self, target: DatasetStore, version: str, now: float, workdir: Path, part_rows: int) -> PublishedTable:
        schema, lost = self._schema(), Counter[str]()
        with (
            Pairs(workdir) if self._judge.pairwise else Scores(self._judge, workdir) as votes,
            TableWriter(target, version, schema, workdir, part_rows) as writer,
        ):
            columns = list(dict.fromkeys([*votes.columns, "error", "duplicate_of", *_USED]))
            for batch in table_batches(self._store, self._table, columns):
                rows = pa.Table.from_batches([batch])
                counts = votes.add(rows)
                errors = rows.column("error").filter(pa.array(~counts)).fill_null(UNREADABLE)
                lost.update({one["values"]: one["counts"] for one in errors.value_counts().to_pylist()})
            unscored = 0
            for rows in self._rows(votes.rows()):
                unscored += rows.column(SCORE).null_count
                writer.write(rows.select(schema.names))
            files, overall = writer.finish(), votes.overall()
        report = JudgeReport(
            table=self._table.version,
            rules=_rules(self._judge),
            rows=writer.totals.rows,
            unscored=unscored,
            votes=overall.votes,
            lost=overall.lost,
            lost_by=dict(sorted(lost.items())),
            figures=overall.figures,
        )
        criteria = {name: "mean of the votes on it" for name in self._judge.scores if name != SCORE}
        return write_manifest(
            self._table,
            target,
            version,
            totals=writer.totals,
            files=files,
            schema=schema,
            descriptions={**MEANING, **criteria},
            report=(REPORT, report),
            now=now,
        )

    def _schema(self) -> pa.Schema:
        with self._store.objects.open(f"{self._table.path}/{self._table.files[0].name}") as file:
            read = pq.read_schema(file)
        fields = [pa.field(name, self._one(name, read.field(old).type)) for name, old in self._sources.items()]
        own = [name for name in self._judge.columns if name not in {"row_id", "prompt", "output", "error"}]
        fields.append(pa.field("error", pa.string()))
        for name in sorted(own, key=lambda name: name in (*_ORIGIN, *_USED, "reused_from", "duplicate_of")):
            kind = read.field(name).type if name in (*_ORIGIN, *_USED, "reused_from", "duplicate_of") else pa.float64()
            kind = pa.int64() if name in ("votes", "lost", "pairs", "wins", "losses", "ties") else kind
            fields.append(pa.field(name, kind))
        return pa.schema(fields)

    def _one(self, name: str, kind: pa.DataType) -> pa.DataType:
        """The type of one row's value; of pairs a column holds those of both rows, but for what names their group."""
        return kind.value_type if self._of_two(name) else kind

    def _of_two(self, name: str) -> bool:
        return self._judge.pairwise and name not in self._judge.groups

    def _rows(self, figures: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """Figures of rows, with what the table has at the place of their first vote."""
        columns, first, waiting = [*dict.fromkeys(self._sources.values()), *_ORIGIN], 0, None
        for batch in table_batches(self._store, self._table, columns):
            lines, end = pa.Table.from_batches([batch]), first + batch.num_rows
            while True:
                waiting = waiting if waiting is not None and waiting.num_rows else next(figures, None)
                if waiting is None:
                    break
                here = int(np.searchsorted(waiting.column("line").to_numpy(), end))
                if here:
                    yield self._joined(waiting.slice(0, here), lines, first)
                    waiting = waiting.slice(here)
                if waiting.num_rows:
                    break
            first = end

    def _joined(self, figures: pa.Table, lines: pa.Table, first: int) -> pa.Table:
        lines = lines.take(pc.subtract(figures.column("line"), first)).combine_chunks()
        places = figures.column("place").to_numpy()
        found: dict[str, Any] = {}
        for name, old in self._sources.items():
            column = lines.column(old)
            found[name] = _elements(column, places) if self._of_two(name) else column
        found |= {name: lines.column(name) for name in _ORIGIN}
        there = figures.column(SCORE).is_valid()
        found["error"] = pc.if_else(there, pa.scalar(None, pa.string()), pa.scalar(NO_VOTE))
        figures = figures.drop_columns(["line", "place"])
        found |= {name: figures.column(name) for name in figures.column_names}
        found["reused_from"] = found["duplicate_of"] = pa.nulls(figures.num_rows, pa.string())
        return pa.table(found)


def _elements(column: pa.ChunkedArray, places: Any) -> pa.Array:
    """Of each list the element at its place."""
    lists = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) and lists.num_chunks else lists
    starts = np.asarray(lists.offsets)[:-1] if len(lists) else np.empty(0, np.int64)
    return lists.values.take(pa.array(starts + places))
