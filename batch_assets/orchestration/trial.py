"""A trial: a request for the first rows of a snapshot only, in whole batches. They count: a later request reuses them.

The run tag `batch/rows` of a refresh says for how many rows it is; `batch-assets run NAME --rows N` sets it. A trial
ends when its batches are committed. A table is published only when every batch of the snapshot is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batch_assets.spec.request_options import InvalidTag
from batch_assets.tags import ROWS_TAG, STREAMING_TAG
from resources.store.dataset_store import BatchEntry


def trial_rows(tags: Mapping[str, str]) -> int | None:
    """Rows that the request is for; None: all. Raises InvalidTag."""
    text = tags.get(ROWS_TAG)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 12 and int(text)):
        raise InvalidTag(ROWS_TAG, f"expected a whole number of rows from 1, found {text[:80]!r}")
    return int(text)


def wanted_entries(entries: Sequence[BatchEntry], tags: Mapping[str, str]) -> Sequence[BatchEntry]:
    """The batches that a request with these tags is for: all, or the first ones that hold so many rows. Of rows that
    are read so far, the last batch is left out: more may come into it.

    Raises InvalidTag.
    """
    if STREAMING_TAG in tags:
        return entries[:-1]
    rows = trial_rows(tags)
    if rows is None:
        return entries
    for number, entry in enumerate(entries):
        rows -= entry.rows
        if rows <= 0:
            return entries[: number + 1]
    return entries
