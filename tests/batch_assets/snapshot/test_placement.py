"""Which batch a row goes to: a row keeps its batch for life, whatever happens around it."""

from __future__ import annotations

import hashlib
import tempfile
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from support.examples import property_test
from support.timing import SOAK

from batch_assets.snapshot.placement import DUPLICATE, REFUSED, Counts, Placement
from batch_assets.snapshot.row_index import ColumnFile, halves, id_digest, index_file, previous_index


@dataclass(frozen=True)
class Placed:
    """A row of the result: where it went, or why it did not."""

    row_id: str
    key: str
    fate: int
    batch: int
    of_id: str | None


@dataclass
class Snapshot:
    """A placed source: rows in source order, and batches as lists of (row id, key) in order."""

    rows: list[Placed]
    batches: dict[int, list[tuple[str, str]]]
    counts: Counts

    def batch_of(self) -> dict[str, int]:
        return {row_id: batch for batch, rows in self.batches.items() for row_id, _ in rows}


def _digests(words: list[str]) -> tuple[np.ndarray, np.ndarray]:
    return halves(b"".join(hashlib.sha256(word.encode()).digest() for word in words), 32)


def _index(folder: Path, source: list[tuple[str | None, str]], with_id: bool) -> ColumnFile:
    index = index_file(folder / "index.parquet", with_id=with_id)
    key_hi, key_lo = _digests([key for _, key in source])
    columns = {"seq": range(len(source)), "file": [0] * len(source), "line": range(1, len(source) + 1)}
    if with_id:
        ids = [row_id or "" for row_id, _ in source]
        id_hi, id_lo = halves(b"".join(map(id_digest, ids)), 16)
        columns |= {"id_hi": id_hi, "id_lo": id_lo, "row_id": ids}
    index.add(key_hi=key_hi, key_lo=key_lo, **columns)
    index.close()
    return index


def _previous(folder: Path, snapshot: Snapshot, with_id: bool) -> ColumnFile:
    """The rows of a snapshot as `previous_file` reads them from a store."""
    lines = [
        (row_id, key, batch, place)
        for batch, rows in snapshot.batches.items()
        for place, (row_id, key) in enumerate(rows)
    ]
    out = previous_index(folder / "previous.parquet", with_id=with_id)
    ids, keys, batches, places = (list(column) for column in zip(*lines, strict=True))
    key_hi, key_lo = _digests(keys)
    columns: dict[str, object] = {"key_hi": key_hi, "key_lo": key_lo, "batch": batches, "place": places}
    if with_id:
        columns["id_hi"], columns["id_lo"] = halves(b"".join(map(id_digest, ids)), 16)
    out.add(occurrence=[0 if with_id else int(row_id.rpartition("#")[2]) for row_id in ids], **columns)
    out.close()
    return out


def place(
    source: list[tuple[str | None, str]],
    before: Snapshot | None = None,
    *,
    with_id: bool = False,
    dedupe: bool = False,
    batch_rows: int = 3,
    step: int = 2,
) -> Snapshot:
    """Place (id, key) rows; decisions are read back `step` rows at a time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        index = _index(folder, source, with_id)
        previous = _previous(folder, before, with_id) if before is not None else None
        with Placement(folder, index, with_id=with_id, dedupe=dedupe, batch_rows=batch_rows) as placement:
            refused = [line for part in placement.repeated_ids() for line in part]
            counts = placement.place(previous)
            places = placement.places()
        rows: list[Placed] = []
        order: dict[int, list[tuple[int, str, str]]] = {}
        unsorted = places.last_batch_if_unsorted()
        for first in range(0, len(source), step):
            part = source[first : first + step]
            found = places.next(len(part))
            for i, (row_id, key) in enumerate(part):
                identity = row_id if row_id is not None else f"{key}#{found.occurrence[i]}"
                of_id = found.of_id.get(i) or (f"{key}#0" if not with_id and found.fate[i] == DUPLICATE else None)
                rows.append(Placed(identity, key, int(found.fate[i]), int(found.batch[i]), of_id))
                if found.fate[i] == 0:
                    order.setdefault(int(found.batch[i]), []).append((int(found.place[i]), identity, key))
    assert len(refused) == sum(row.fate == REFUSED for row in rows)
    batches = {batch: [line[1:] for line in sorted(lines)] for batch, lines in sorted(order.items())}
    flat = [row for lines in batches.values() for row in lines]
    if unsorted is None:
        assert flat == [(row.row_id, row.key) for row in rows if row.fate == 0]
    else:
        assert unsorted == max(batches)
    return Snapshot(rows, batches, counts)


def keys(text: str) -> list[tuple[str | None, str]]:
    return [(None, letter) for letter in text]


def with_ids(text: str) -> list[tuple[str | None, str]]:
    """`1a 2b` = id 1 with key a, id 2 with key b."""
    return [(word[0], word[1:]) for word in text.split()]


def shape(snapshot: Snapshot) -> dict[int, str]:
    return {batch: "".join(key for _, key in rows) for batch, rows in snapshot.batches.items()}


def test_a_first_snapshot_fills_batches_in_source_order() -> None:
    first = place(keys("abcdefgh"))
    assert shape(first) == {0: "abc", 1: "def", 2: "gh"}
    assert first.counts == Counts(8, 0, 0, 8, 0, 0, 0, False)


def test_a_row_inserted_at_the_head_goes_to_the_tail_and_moves_nothing() -> None:
    second = place(keys("xabcdefgh"), place(keys("abcdefgh")))
    assert shape(second) == {0: "abc", 1: "def", 2: "ghx"}
    assert (second.counts.added, second.counts.unchanged, second.counts.removed) == (1, 8, 0)


def test_new_rows_fill_the_last_batch_and_then_new_ones() -> None:
    assert shape(place(keys("abcdwxyz12"), place(keys("abcd")))) == {0: "abc", 1: "dwx", 2: "yz1", 3: "2"}


def test_a_removed_row_leaves_a_gap_that_is_not_filled() -> None:
    second = place(keys("acdefxg"), place(keys("abcdefg")))
    assert shape(second) == {0: "ac", 1: "def", 2: "gx"}
    assert second.counts.removed == 1


def test_a_batch_that_became_empty_is_left_out() -> None:
    second = place(keys("abcg"), place(keys("abcdefg")))
    assert shape(second) == {0: "abc", 2: "g"}


def test_when_the_last_batches_became_empty_new_rows_follow_the_last_that_is_left() -> None:
    assert shape(place(keys("abx"), place(keys("abcdefg")))) == {0: "abx"}


def test_when_nothing_survives_rows_are_placed_from_0_again() -> None:
    second = place(keys("wxyz"), place(keys("abcdefgh")))
    assert shape(second) == {0: "wxy", 1: "z"}
    assert second.counts == Counts(4, 0, 0, 4, 0, 8, 0, False)


def test_the_order_of_the_source_does_not_matter_to_a_refresh() -> None:
    first = place(keys("abcdefgh"))
    second = place(keys("hgfedcba"), first)
    assert second.batches == first.batches
    assert second.counts.unchanged == 8


def test_equal_rows_are_told_apart_by_their_occurrence() -> None:
    first = place(keys("aabab"))
    assert [row.row_id for row in first.rows] == ["a#0", "a#1", "b#0", "a#2", "b#1"]
    second = place(keys("abab"), first)
    assert set(first.batch_of()) - set(second.batch_of()) == {"a#2"}


def test_with_an_id_a_changed_row_keeps_its_batch_and_its_place() -> None:
    first = place(with_ids("1a 2b 3c 4d"), with_id=True)
    second = place(with_ids("1a 2B 3c 4d"), first, with_id=True)
    assert shape(second) == {0: "aBc", 1: "d"}
    assert second.counts == Counts(4, 0, 0, 0, 1, 0, 3, True)


def test_without_an_id_a_changed_row_is_a_removed_and_a_new_one() -> None:
    second = place(keys("aBcd"), place(keys("abcd")))
    assert shape(second) == {0: "ac", 1: "dB"}
    assert (second.counts.added, second.counts.changed, second.counts.removed) == (1, 0, 1)


def test_a_repeated_id_is_refused_with_the_first_row_named(tmp_path: Path) -> None:
    source = with_ids("1a 2b 1c 1a")
    index = _index(tmp_path, source, with_id=True)
    with Placement(tmp_path, index, with_id=True, dedupe=True, batch_rows=3) as placement:
        assert [line for part in placement.repeated_ids() for line in part] == [(0, 3, 0, 1), (0, 4, 0, 1)]
        assert placement.place(None) == Counts(2, 0, 2, 2, 0, 0, 0, False)


def test_ids_that_are_equal_in_unicode_are_one_id() -> None:
    composed, parted = "caf\u00e9", unicodedata.normalize("NFD", "caf\u00e9")
    assert composed != parted
    snapshot = place([(composed, "a"), (parted, "b")], with_id=True)
    assert [row.fate for row in snapshot.rows] == [0, REFUSED]


@pytest.mark.parametrize("with_id", [False, True])
def test_dedupe_asks_each_key_once_and_names_the_row_that_is_asked(with_id: bool) -> None:
    source = with_ids("1a 2b 3a 4a 5c") if with_id else keys("abaac")
    snapshot = place(source, with_id=with_id, dedupe=True)
    assert shape(snapshot) == {0: "abc"}
    asked = "1" if with_id else "a#0"
    assert [row.of_id for row in snapshot.rows] == [None, None, asked, asked, None]
    assert snapshot.counts.duplicates == 2
    assert len({row.row_id for row in snapshot.rows}) == 5


def test_the_row_that_was_asked_stays_the_one_when_an_equal_row_appears_before_it() -> None:
    first = place(with_ids("1a 2b"), with_id=True, dedupe=True)
    second = place(with_ids("9a 1a 2b"), first, with_id=True, dedupe=True)
    assert second.batches == first.batches
    assert [(row.fate, row.of_id) for row in second.rows] == [(DUPLICATE, "1"), (0, None), (0, None)]
    assert second.counts.unchanged == 2


def test_a_row_changed_into_another_becomes_its_duplicate() -> None:
    first = place(with_ids("1a 2b 3c"), with_id=True, dedupe=True)
    second = place(with_ids("1b 2b 3c"), first, with_id=True, dedupe=True)
    assert shape(second) == {0: "bc"}
    assert second.rows[0].of_id == "2"
    assert second.counts == Counts(2, 1, 0, 0, 0, 1, 2, True)


def test_other_batch_rows_hold_for_new_batches_only() -> None:
    first = place(keys("abcdefgh"), batch_rows=3)
    assert shape(place(keys("abcdefghvwxyz"), first, batch_rows=2)) == {
        0: "abc",
        1: "def",
        2: "gh",
        3: "vw",
        4: "xy",
        5: "z",
    }
    assert shape(place(keys("abcdefghvwxyz"), first, batch_rows=5)) == {0: "abc", 1: "def", 2: "ghvwx", 3: "yz"}


@pytest.mark.soak("rows")
@property_test(
    4,
    200 if SOAK else 20,
    data=st.data(),
    with_id=st.booleans(),
    dedupe=st.booleans(),
    batch_rows=st.integers(1, 5),
)
def test_through_any_edits_every_row_is_placed_once_and_keeps_its_batch(
    data: st.DataObject, with_id: bool, dedupe: bool, batch_rows: int
) -> None:
    one_key = st.sampled_from("abcdefghij")
    row = st.tuples(st.sampled_from("0123456789ABCDEF") if with_id else st.none(), one_key)
    before: Snapshot | None = None
    for _ in range(data.draw(st.integers(2, 4))):
        source = data.draw(st.lists(row, min_size=1, max_size=25))
        after = place(source, before, with_id=with_id, dedupe=dedupe, batch_rows=batch_rows)
        _check(source, before, after, dedupe, batch_rows)
        before = after


def _check(
    source: list[tuple[str | None, str]], before: Snapshot | None, after: Snapshot, dedupe: bool, batch_rows: int
) -> None:
    counts, fates = after.counts, Counter(row.fate for row in after.rows)
    assert (fates[0], fates[DUPLICATE], fates[REFUSED]) == (counts.rows, counts.duplicates, counts.refused)
    assert [row.key for row in after.rows] == [key for _, key in source]
    used = [row for row in after.rows if row.fate != REFUSED]
    assert len({row.row_id for row in used}) == len(used)
    placed = {row.row_id: row for row in used if row.fate == 0}
    assert sorted(after.batch_of()) == sorted(placed)
    assert all(1 <= len(rows) <= batch_rows for rows in after.batches.values())
    if dedupe:
        assert len({row.key for row in placed.values()}) == len(placed)
        assert all(placed[row.of_id or ""].key == row.key for row in used if row.fate == DUPLICATE)
    else:
        assert not fates[DUPLICATE]
    old, keys_before = (before.batch_of(), dict(r for b in before.batches.values() for r in b)) if before else ({}, {})
    kept = set(old) & set(placed)
    assert counts.unchanged == sum(keys_before[row_id] == placed[row_id].key for row_id in kept)
    assert (counts.changed, counts.added) == (len(kept) - counts.unchanged, len(placed) - len(kept))
    assert counts.removed == len(old) - len(kept)
    new = [row.batch for row in after.rows if row.row_id in placed and row.fate == 0 and row.row_id not in kept]
    assert new == sorted(new), "new rows go to the tail in the order of the source"
    if kept:
        assert all(placed[row_id].batch == old[row_id] for row_id in kept)
        assert min(new, default=10**9) >= max(old[row_id] for row_id in kept)
        for batch, rows in after.batches.items():
            here = [row_id for row_id, _ in rows if row_id in kept]
            assert before is not None
            assert here == [row_id for row_id, _ in before.batches.get(batch, []) if row_id in placed]


@pytest.mark.slow
@pytest.mark.parametrize("distinct", [3, 1_500_000])
def test_millions_of_equal_rows_fit_into_the_memory_limit(tmp_path: Path, distinct: int) -> None:
    rows, part = 3_000_000, 50_000
    index = index_file(tmp_path / "index.parquet", with_id=False)
    for first in range(0, rows, part):
        seq = np.arange(first, first + part)
        key = (seq % distinct).astype(np.uint64)
        index.add(seq=seq, file=np.zeros(part, np.int32), line=seq + 1, key_hi=key, key_lo=key)
    index.close()
    with Placement(tmp_path, index, with_id=False, dedupe=True, batch_rows=250) as placement:
        counts = placement.place(None)
        places = placement.places()
    assert (counts.rows, counts.duplicates) == (distinct, rows - distinct)
    fates = [places.next(part).fate for _ in range(0, rows, part)]
    assert sum(int((fate == DUPLICATE).sum()) for fate in fates) == rows - distinct
