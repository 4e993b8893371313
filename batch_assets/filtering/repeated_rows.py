"""Rules that compare a row with all rows before it: equal texts and similar texts. The first of them stays.

What is compared lies on disk: DuckDB groups it, which uses the disk where memory ends, and signatures are in a file
that is mapped. At 20M rows of 60 words that is 0.5 GB for equal texts, and 6 GB for similar ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from batch_assets.filtering.text_marks import texts_of
from batch_assets.gates.text_features import PERMUTATIONS, runs_of, signatures, similarities, words_of
from batch_assets.spec.row_rules import DuplicatesRule, NearDuplicatesRule

if TYPE_CHECKING:
    import polars as pl


_FOUND_ENOUGH = 0.97  # chance that two texts which are just similar enough are compared at all
_MEMORY = "1GB"
_PAIRS_AT_ONCE = 50_000
_FIRSTS = """
SELECT DISTINCT firsts.line AS earlier, keys.line AS later
FROM keys JOIN (SELECT a, b, min(line) AS line FROM keys GROUP BY a, b HAVING count(*) > 1) firsts USING (a, b)
WHERE keys.line > firsts.line
"""


class RowsMark(Protocol):
    """A rule that compares rows: it is shown all of them first. `columns`: those that it reads."""

    columns: Sequence[str]
    skipped: int
    """Rows that it was shown and that have nothing to compare: no text, no vector. They are not flagged."""

    def learn(self, rows: pl.DataFrame, lines: Any) -> None:
        """Rows with their numbers (ascending), without those that have fallen out. Raises BadCondition."""

    def flagged(self) -> Iterator[Any]:
        """Numbers of the rows that are flagged, in parts. Nothing is learned after that."""

    def close(self) -> None:
        """Delete what lies on disk."""


class EqualKeys:
    """Rows of which each has keys of two 64-bit numbers, on disk: which are the first with a key, and which follow."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "keys.duckdb"
        config: dict[str, Any] = {"memory_limit": _MEMORY, "temp_directory": str(folder / "duckdb")}
        config["preserve_insertion_order"] = False
        import duckdb

        self._connection = duckdb.connect(str(self._file), config=config)
        self._connection.execute("CREATE TABLE keys (a UBIGINT, b UBIGINT, line BIGINT)")

    def add(self, a: Any, b: Any, lines: Any) -> None:
        """Arrays of one length."""
        added = pa.table({"a": pa.array(a), "b": pa.array(b), "line": pa.array(lines)})
        self._connection.register("added", added)
        self._connection.execute("INSERT INTO keys SELECT a, b, line FROM added")
        self._connection.unregister("added")

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """The first row with a key and a later one with the same key, each pair once, in arrays."""
        for batch in self._connection.sql(_FIRSTS).to_arrow_reader(_PAIRS_AT_ONCE):
            yield batch.column("earlier").to_numpy(), batch.column("later").to_numpy()

    def close(self) -> None:
        self._connection.close()
        self._file.unlink(missing_ok=True)


class EqualTexts:
    """Flags texts that stand in an earlier row, but for case, spaces and forms of Unicode (NFKC). 128 bits of hashes
    are compared: among 20M texts, no two that differ have the same ones by chance. Texts that are blank count as none.
    """

    def __init__(self, rule: DuplicatesRule, folder: Path) -> None:
        self.columns: Sequence[str] = [rule.column]
        self.skipped = 0
        self._keys = EqualKeys(folder)

    def learn(self, rows: pl.DataFrame, lines: Any) -> None:
        texts = texts_of(rows, self.columns[0]).fill_null("")
        plain = texts.str.normalize("NFKC").str.to_lowercase().str.replace_all(r"\s+", " ").str.strip_chars()
        there = (plain != "").to_numpy()
        self.skipped += int((~there).sum())
        self._keys.add(plain.hash(1).to_numpy()[there], plain.hash(2).to_numpy()[there], lines[there])

    def flagged(self) -> Iterator[Any]:
        for _, later in self._keys.pairs():
            yield later

    def close(self) -> None:
        self._keys.close()


class SimilarTexts:
    """Flags texts that have most of their words in common with an earlier row, by MinHash (Broder, 1997).

    Compared are sets of runs of words. Bands of the signatures say which two texts are looked at, the whole signatures
    how similar they are.
    """

    def __init__(self, rule: NearDuplicatesRule, folder: Path, rows: int) -> None:
        self.columns: Sequence[str] = [rule.column]
        self.skipped = 0
        self._rule = rule
        self._band = band_length(rule.threshold)
        self._keys = EqualKeys(folder)
        self._file = folder / "signatures.bin"
        self._signatures: Any = np.memmap(self._file, np.uint8, "w+", shape=(max(rows, 1), PERMUTATIONS))

    def learn(self, rows: pl.DataFrame, lines: Any) -> None:
        texts = texts_of(rows, self.columns[0]).fill_null("")
        words = [words_of(text) for text in texts]
        there = np.array([bool(one) for one in words], np.bool_)
        self.skipped += int((~there).sum())
        if not there.any():
            return
        runs = [runs_of(one, self._rule.words) for one in words if one]
        found, lines = signatures(runs), lines[there]
        self._signatures[lines] = found.astype(np.uint8)  # as `similarities` takes them
        for band in range(PERMUTATIONS // self._band):
            part = found[:, band * self._band : (band + 1) * self._band]
            self._keys.add(np.full(len(lines), band, np.uint64), _mixed(part), lines)

    def flagged(self) -> Iterator[Any]:
        for earlier, later in self._keys.pairs():
            similarity = similarities(self._signatures[earlier], self._signatures[later])
            yield later[similarity >= self._rule.threshold]

    def close(self) -> None:
        self._keys.close()
        self._signatures = None
        self._file.unlink(missing_ok=True)


def band_length(threshold: float) -> int:
    """How many hashes a band has: as many as can be while two texts that are `threshold` similar are nearly always
    compared ("Mining of Massive Datasets", section 3.4.2)."""
    lengths = range(PERMUTATIONS, 0, -1)
    return next((n for n in lengths if 1 - (1 - threshold**n) ** (PERMUTATIONS // n) >= _FOUND_ENOUGH), 1)


def _mixed(part: Any) -> Any:
    """One 64-bit number of each line of 32-bit numbers: FNV-1a over them."""
    found = np.full(len(part), 0xCBF29CE484222325, np.uint64)
    for column in part.T:
        found = (found ^ column.astype(np.uint64)) * np.uint64(0x100000001B3)
        found ^= found >> np.uint64(29)
    return found
