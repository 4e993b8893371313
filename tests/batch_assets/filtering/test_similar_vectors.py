"""Rows whose vectors are near the one of a row that is kept before: which are flagged, and what is no vector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batch_assets.filtering import similar_vectors
from batch_assets.filtering.similar_vectors import SimilarVectors
from batch_assets.spec.row_rules import SemanticDuplicatesRule
from resources.store.row_condition import BadCondition


def flagged(folder: Path, vectors: pl.Series, threshold: float = 0.95, batch: int = 1000) -> tuple[list[int], int]:
    """Numbers of the rows that are flagged, and how many had no vector; shown are so many rows at a time."""
    mark = SimilarVectors(SemanticDuplicatesRule(column="v", threshold=threshold), folder, len(vectors))
    try:
        for first in range(0, len(vectors), batch):
            part = vectors.slice(first, batch)
            mark.learn(part.rename("v").to_frame(), first + np.arange(len(part)))
        return sorted(int(row) for found in mark.flagged() for row in found), mark.skipped
    finally:
        mark.close()
        assert not list(folder.glob("*.bin"))


def expected(vectors: list[list[float]], threshold: float) -> list[int]:
    """The same by comparing every row with every row that is kept before, in 64-bit floats."""
    kept: list[Any] = []
    near = []
    for number, vector in enumerate(np.array(vectors)):
        if not vector.any():
            continue
        unit = vector / np.linalg.norm(vector)
        cosines = [float(unit @ one) for one in kept]
        assume(all(abs(cosine - threshold) > 1e-5 for cosine in cosines))
        if any(cosine >= threshold for cosine in cosines):
            near.append(number)
        else:
            kept.append(unit)
    return near


def lists(vectors: Any) -> pl.Series:
    return pl.Series(list(vectors), dtype=pl.List(pl.Float64))


def planted(rows: int, width: int, copies: int, cosine: float) -> Any:
    """Rows in clusters, as of texts of several subjects, then copies of the first rows at this cosine to them."""
    draw = np.random.default_rng(3)
    subjects = draw.normal(size=(50, width))
    found = subjects[draw.integers(0, 50, rows)] + draw.normal(size=(rows, width))
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    aside = draw.normal(size=(copies, width))
    aside -= (aside * found[:copies]).sum(axis=1, keepdims=True) * found[:copies]
    aside /= np.linalg.norm(aside, axis=1, keepdims=True)
    return np.concatenate([found, cosine * found[:copies] + (1 - cosine**2) ** 0.5 * aside])


@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [1, 40, 1 << 25])
@given(
    vectors=st.lists(st.lists(st.integers(-3, 3).map(float), min_size=3, max_size=3), max_size=40),
    threshold=st.sampled_from([0.5, 0.8, 0.95, 0.999, 1.0]),
)
def test_exactly_the_rows_near_one_that_is_kept_before_are_flagged(
    tmp_path_factory: pytest.TempPathFactory, block_bytes: int, vectors: list[list[float]], threshold: float
) -> None:
    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similar_vectors, "_BLOCK_BYTES", block_bytes)
        found, skipped = flagged(folder, lists(vectors), threshold, batch=7)
    assert found == expected(vectors, threshold if threshold < 1 else 1 - similar_vectors.ROUNDING)
    assert skipped == sum(not any(vector) for vector in vectors)


def test_of_a_chain_of_near_rows_those_far_from_every_kept_one_stay(tmp_path: Path) -> None:
    turned = [[np.cos(angle), np.sin(angle)] for angle in np.radians([0, 15, 30, 45])]
    assert flagged(tmp_path, lists(turned))[0] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [1 << 16, 1 << 25])
def test_of_many_rows_nearly_all_planted_ones_are_found_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(similar_vectors, "EXACT_ROWS", 100)
    monkeypatch.setattr(similar_vectors, "_BLOCK_BYTES", block_bytes)
    vectors = planted(3000, 32, 500, 0.96)
    found, _ = flagged(tmp_path, pl.Series(vectors.astype(np.float32)))
    again, _ = flagged(tmp_path, pl.Series(vectors.astype(np.float32)))
    assert found == again
    assert sum(row >= 3000 for row in found) >= 490
    assert min(found) >= 3000


def test_a_row_without_a_direction_is_counted_and_never_flagged(tmp_path: Path) -> None:
    rows = [[1, 0], None, [1, 0], [0, 0], [0, 0], [], [1, None], [float("nan"), 1], [float("inf"), 0], [1e300, 1e-300]]
    assert flagged(tmp_path, lists(rows), batch=3) == ([2, 9], 7)
    assert flagged(tmp_path, lists([None, None])) == ([], 2)
    assert flagged(tmp_path, lists([])) == ([], 0)


def test_what_is_no_column_of_vectors_of_one_length_is_named(tmp_path: Path) -> None:
    for batch in (1, 9):
        with pytest.raises(BadCondition, match="expected vectors of one length in v, found 2 and 3 numbers"):
            flagged(tmp_path, lists([[1, 2], [1, 2, 3]]), batch=batch)
    for column in (pl.Series(["a"]), pl.Series([["a"]]), pl.Series([[[1.0]]]), pl.Series([1.5])):
        with pytest.raises(BadCondition, match="expected a column of lists of numbers, found v"):
            flagged(tmp_path, column)
