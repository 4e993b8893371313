"""Answers of other datasets that rows of a snapshot can take: one small object per batch, beside the snapshot.

`NAME/reusable/SNAPSHOT/ASKED/KEY-rROWS.parquet` has the columns of a batch object. Its rows have the ids that they had
in the other dataset; a row is found by its row key. The name says how many there are, so that a listing is enough to
count. ASKED stands for the datasets that may be asked: answers of one that is not named any more are not taken.
Objects are never changed. One that is gone or damaged costs nothing but its answers: the rows are generated.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from gpu_runner.rows import Outcome, Row
from resources.objects.opening import CorruptObject, Objects
from resources.store.outcome_tables import is_outcomes_table, outcomes_from, without_empty_columns

_NAME = re.compile(r"(?P<key>\d{5,})-r(?P<rows>\d+)\.parquet")


@dataclass(frozen=True, slots=True)
class ReusableBatch:
    """What one batch can take: the object's path, and its rows."""

    path: str
    rows: int


class ReusableAnswers:
    """The reusable answers of one dataset. Safe to use from several threads.

    `reuse`: True for those of any dataset, or the names of the others, as its YAML has it now.
    """

    def __init__(self, objects: Objects, dataset: str, reuse: bool | Sequence[str]) -> None:
        self._objects, self._folder = objects, f"{dataset}/reusable/"
        names = "" if isinstance(reuse, bool) else "\n".join(reuse)
        self._asked = "any" if reuse is True else hashlib.sha256(names.encode()).hexdigest()[:16]

    def of_snapshot(self, snapshot: str, first: str = "", last: str = "~") -> dict[str, ReusableBatch]:
        """By batch key, from `first` to `last`; of several objects of one batch that with the most rows. Lists."""
        found: dict[str, ReusableBatch] = {}
        prefix = f"{self._folder}{snapshot}/{self._asked}/"
        for info in self._objects.list(prefix, start_after=prefix + first if first else ""):
            match = _NAME.fullmatch(info.path[len(prefix) :])
            if match is None:
                continue
            if match["key"] > last:
                break
            batch = ReusableBatch(info.path, int(match["rows"]))
            if match["key"] not in found or batch.rows > found[match["key"]].rows:
                found[match["key"]] = batch
        return found

    def add(self, snapshot: str, key: str, table: pa.Table) -> None:
        """Write a batch's answers, a table of outcomes with distinct row keys. One that has as many is left alone."""
        sink = io.BytesIO()
        pq.write_table(without_empty_columns(table), sink, compression="zstd", write_page_checksum=True)
        self._objects.create(f"{self._folder}{snapshot}/{self._asked}/{key}-r{table.num_rows}.parquet", sink.getvalue())

    def read(self, batch: ReusableBatch, rows: Iterable[Row]) -> dict[str, Outcome]:
        """The answers by row id, of those rows that ask the same. Raises CorruptObject, FileNotFoundError."""
        answers = {outcome.row_key: outcome for outcome in outcomes_from(self.table(batch))}
        return {row.row_id: replace(answers[row.row_key], row_id=row.row_id) for row in rows if row.row_key in answers}

    def table(self, batch: ReusableBatch) -> pa.Table:
        """The whole object. Raises CorruptObject, FileNotFoundError."""
        data = self._objects.get(batch.path)
        try:
            with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
                table = file.read(use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise CorruptObject(f"{batch.path}: not a whole object ({type(error).__name__})") from error
        if not is_outcomes_table(table) or table.num_rows != batch.rows:
            raise CorruptObject(f"{batch.path}: its columns or its number of rows are not as written")
        return table

    def paths(self) -> list[str]:
        """Every object, of whatever snapshot and look: garbage once all batches of the current one are committed."""
        return [info.path for info in self._objects.list(self._folder)]
