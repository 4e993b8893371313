"""The rule that compares the vectors of a row with those of all rows before it, by their cosine. The first stays.

Vectors lie on disk, as 32-bit floats of length 1, in a file that is mapped: 3 GB at 2M rows of 384. They are read a
block at a time and compared with rows that were kept before. Up to EXACT_ROWS that is every one of them. Beyond, rows
are divided into cells around centroids (an inverted file: Sivic and Zisserman, "Video Google", 2003; spherical k-means:
Dhillon and Modha, 2001), and a row is compared with the kept ones of the PROBES cells that are nearest to it, and with
all of its own block. What is flagged is always near enough; of many rows, a few that are near enough are missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batch_assets.spec.row_rules import SemanticDuplicatesRule
from resources.store.row_condition import BadCondition

if TYPE_CHECKING:
    import polars as pl

EXACT_ROWS = 50_000
PROBES = 12
ROUNDING = 1e-6  # of a product of two vectors of length 1 in 32-bit floats
_SEED = 20  # centroids are those of the same rows each time
_LEARNED_FROM = 24  # rows of each cell, from which its centroid is computed
_ROUNDS = 5  # of k-means
_BLOCK_BYTES, _PRODUCT_BYTES = 1 << 25, 1 << 26


class SimilarVectors:
    """Flags vectors whose cosine with one of a row that was kept before is the threshold or more.

    A list that is null or empty, or all zeros, or has a null, NaN or infinity in it, has no direction: its row is never
    flagged, and counted in `skipped`. Lists of several lengths are an error.
    """

    def __init__(self, rule: SemanticDuplicatesRule, folder: Path, rows: int) -> None:
        self.columns: Sequence[str] = [rule.column]
        self.skipped = 0
        self._bound = np.float32(rule.threshold - ROUNDING)
        self._file = folder / "vectors.bin"
        self._vectors: Any = None
        self._there = np.zeros(rows, np.bool_)

    def learn(self, rows: pl.DataFrame, lines: Any) -> None:
        column = rows[self.columns[0]]
        lengths = _lengths(column)
        there = lengths > 0
        if there.any():
            width = int(lengths[there][0]) if self._vectors is None else self._vectors.shape[1]
            if (other := lengths[there & (lengths != width)]).size:
                raise BadCondition(
                    f"expected vectors of one length in {self.columns[0]}, found {width:,} and {other[0]:,} numbers: "
                    "vectors of several models cannot be compared"
                )
            if self._vectors is None:
                shape = (len(self._there), width)
                self._vectors = np.memmap(self._file, np.float32, "w+", shape=shape)
            found, directed = _directions(_numbers(column, there, width))
            lines = lines[there][directed]
            self._vectors[lines] = found[directed]
            self._there[lines] = True
            self.skipped -= len(lines)
        self.skipped += rows.height

    def flagged(self) -> Iterator[Any]:
        lines = np.flatnonzero(self._there)
        if not len(lines):
            return
        centroids = _centroids(self._vectors, lines)
        kept: list[list[Any]] = [[] for _ in centroids]
        step = max(1, _BLOCK_BYTES // (4 * self._vectors.shape[1]))
        for first in range(0, len(lines), step):
            numbers = lines[first : first + step]
            block = np.asarray(self._vectors[numbers])
            probes = _nearest(block, centroids)
            near = np.zeros(len(block), np.bool_)
            for cell, asked in _by_cell(probes):
                asked = asked[~near[asked]]
                if len(asked) and kept[cell]:
                    kept[cell] = [np.concatenate(kept[cell])]
                    near[asked] = self._near(block[asked], kept[cell][0])
            self._compare_within(block, near)
            for cell, home in _by_cell(probes[:, :1]):
                kept[cell].append(numbers[home[~near[home]]])
            yield numbers[near]

    def _near(self, asked: Any, kept: Any) -> Any:
        """Whether each vector is near one of the rows with these numbers."""
        near = np.zeros(len(asked), np.bool_)
        step = max(1, min(_BLOCK_BYTES // (4 * asked.shape[1]), _PRODUCT_BYTES // (4 * len(asked))))
        for first in range(0, len(kept), step):
            near |= (asked @ self._vectors[kept[first : first + step]].T >= self._bound).any(axis=1)
        return near

    def _compare_within(self, block: Any, near: Any) -> None:
        """Say of the rows of a block that are not near one before it which are near one that is kept in it."""
        rows = np.flatnonzero(~near)
        for first in range(0, len(rows), 512):
            before, part = rows[:first], rows[first : first + 512]
            before = before[~near[before]]
            near[part] = (block[part] @ block[before].T >= self._bound).any(axis=1)
            part = part[~near[part]]
            alike = block[part] @ block[part].T >= self._bound
            out = np.zeros(len(part), np.bool_)
            for place in np.flatnonzero(np.triu(alike, 1).any(axis=1)):
                if not out[place]:
                    out[place + 1 :] |= alike[place, place + 1 :]
            near[part] = out

    def close(self) -> None:
        self._vectors = None
        self._file.unlink(missing_ok=True)


def _lengths(column: pl.Series) -> Any:
    """How many numbers each list has; 0 for null. Raises BadCondition."""
    import polars as pl

    kind = column.dtype
    if not isinstance(kind, pl.List | pl.Array) or not kind.inner.is_numeric():
        raise BadCondition(f"expected a column of lists of numbers, found {column.name} of type {kind}")
    lists = column.arr.to_list() if isinstance(kind, pl.Array) else column
    return lists.list.len().fill_null(0).to_numpy().astype(np.int64)


def _numbers(column: pl.Series, there: Any, width: int) -> Any:
    """The lists that are there as a matrix; null is NaN."""
    import polars as pl

    numbers = column.filter(pl.Series(there)).explode().cast(pl.Float64).fill_null(float("nan"))
    return numbers.to_numpy().reshape(-1, width)


def _directions(vectors: Any) -> tuple[Any, Any]:
    """Vectors divided by their length, and which have one. Largest numbers first become 1: no square overflows."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    directed = np.isfinite(largest[:, 0]) & (largest[:, 0] > 0)
    vectors = vectors / np.where(directed[:, None], largest, 1)
    with np.errstate(invalid="ignore"):
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(directed[:, None], lengths, 1)).astype(np.float32), directed


def _centroids(vectors: Any, lines: Any) -> Any:
    """Directions around which rows are divided: one for all up to EXACT_ROWS, else about as many as the root of the
    number of rows."""
    cells = 1 if len(lines) <= EXACT_ROWS else int(len(lines) ** 0.5)
    draw = np.random.default_rng(_SEED)
    drawn = np.sort(draw.choice(lines, min(len(lines), cells * _LEARNED_FROM), replace=False))
    sample = np.asarray(vectors[drawn])
    centroids = sample[np.sort(draw.choice(len(sample), cells, replace=False))]
    for _ in range(_ROUNDS if cells > 1 else 0):
        for cell, members in _by_cell(_nearest(sample, centroids)[:, :1]):
            middle = sample[members].mean(axis=0)
            if (length := np.linalg.norm(middle)) > 0:
                centroids[cell] = middle / length
    return centroids


def _nearest(block: Any, centroids: Any) -> Any:
    """Of each vector the cells around the nearest centroids, PROBES or all of them, the nearest first."""
    count, found = min(PROBES, len(centroids)), []
    step = max(1, _PRODUCT_BYTES // (4 * len(centroids)))
    for first in range(0, len(block), step):
        far = -(block[first : first + step] @ centroids.T)
        near = np.argpartition(far, count - 1, axis=1)[:, :count]
        order = np.argsort(np.take_along_axis(far, near, axis=1), axis=1, kind="stable")
        found.append(np.take_along_axis(near, order, axis=1))
    return np.concatenate(found)


def _by_cell(cells: Any) -> Iterator[tuple[int, Any]]:
    """Each cell that stands in a matrix, with the lines of the matrix in which it stands."""
    flat = cells.ravel()
    order = np.argsort(flat, kind="stable")
    starts = np.flatnonzero(np.diff(flat[order], prepend=-1))
    for start, lines in zip(starts, np.split(order // cells.shape[1], starts[1:]), strict=True):
        yield int(flat[order[start]]), lines
