"""Which objects of a dataset nothing refers to. Pure over listings: nothing is deleted here.

What is kept, whatever its age: the current snapshot; of each of its batches the newest object at its data version, and
where there is none every object of the batch, as a run takes rows over from them; the published versions that are
newest, that readers see, or that the snapshot of another dataset was made of; journals of batches that are not
committed, or that a regenerate or a redrive has not made anew; so do records of what was sent to a Batch API, as the
next run takes the answers. Anything else goes once it is older than a grace time,
as somebody may still read it.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from resources.objects.opening import ObjectInfo
from resources.store.dataset_store import BatchObject
from resources.store.stored_batches import ORDINARY


class Kind(enum.StrEnum):
    """Why an object is garbage."""

    OLD_SNAPSHOT = "old snapshot"
    SUPERSEDED_BATCH = "superseded batch"
    OLD_VERSION = "old published version"
    UNFINISHED = "unfinished"
    JOURNAL = "journal of committed batches"
    SUBMITTED = "record of a submitted batch"
    BACKUP = "old backup"
    UPLOAD = "broken upload"


@dataclass(frozen=True, slots=True)
class Garbage:
    """One object that nothing refers to."""

    kind: Kind
    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Grace:
    """Objects that were written at `before` or later (Unix seconds) are left alone, as are those of unknown age."""

    before: float

    def over(self, info: ObjectInfo) -> bool:
        """It was written long enough ago."""
        return 0.0 < info.modified_at < self.before


def superseded_batches(
    listed: Iterable[tuple[BatchObject, ObjectInfo]], wanted: Mapping[str, str], grace: Grace
) -> Iterator[Garbage]:
    """Objects of batches in the order of a listing. `wanted`: data version of each batch of the current snapshot.

    Memory is that of one batch's objects.
    """
    group: list[tuple[BatchObject, ObjectInfo]] = []
    for found in listed:
        if group and group[0][0].key != found[0].key:
            yield from _of_batch(group, wanted, grace)
            group = []
        group.append(found)
    if group:
        yield from _of_batch(group, wanted, grace)


def _of_batch(
    group: list[tuple[BatchObject, ObjectInfo]], wanted: Mapping[str, str], grace: Grace
) -> Iterator[Garbage]:
    version = wanted.get(group[0][0].key)
    if version is not None:
        current = [one for one in group if one[0].data_version == version]
        if not current or not grace.over(max(current, key=lambda one: one[0].generation)[1]):
            return  # a run makes it, or has made it just now while others read what was there before
        newest = max(batch.generation for batch, _ in current)
        group = [one for one in group if one[0].data_version != version or one[0].generation < newest]
    for _, info in group:
        if grace.over(info):
            yield Garbage(Kind.SUPERSEDED_BATCH, info.path, info.size)


@dataclass(frozen=True, slots=True)
class Version:
    """A published version or a snapshot: when it was made (Unix seconds); None: it has no manifest, it is unfinished.

    `objects`: all of it.
    """

    name: str
    made_at: float | None
    objects: tuple[ObjectInfo, ...]


def old_versions(
    versions: Collection[Version], keep: int, pinned: Collection[str], grace: Grace, kind: Kind
) -> Iterator[Garbage]:
    """Versions but the newest `keep` and those that are pinned, once what came after them is older than the grace time:
    who began to read one before that has had so long. The manifest of each comes first.
    """
    finished = sorted(
        (one for one in versions if one.made_at is not None), key=lambda one: (one.made_at or 0, one.name)
    )
    newest = {one.name for one in finished[-keep:]} if keep > 0 else set()
    for older, following in itertools.pairwise(finished):
        reachable = older.name in newest or older.name in pinned
        if not reachable and (following.made_at or 0.0) < grace.before:
            yield from _all_of(older, kind)
    for one in versions:
        if one.made_at is None and one.name not in pinned and all(grace.over(info) for info in one.objects):
            yield from _all_of(one, Kind.UNFINISHED)


def _all_of(version: Version, kind: Kind) -> Iterator[Garbage]:
    for info in sorted(version.objects, key=lambda info: not info.path.endswith("/manifest.json")):
        yield Garbage(kind, info.path, info.size)


def journals(
    listed: Iterable[ObjectInfo], prefix: str, committed: Mapping[str, float | None], grace: Grace
) -> Iterator[Garbage]:
    """Segments of which every batch is committed. Those of a regenerate or a redrive, which has a journal of its own
    below its run id, hold answers to batches that are committed already: every batch must have been committed later.

    `committed`: when the object of each batch of the current snapshot was written (Unix seconds); None: it has none.
    """
    keys = sorted(committed)
    for info in listed:
        first, last, purpose = (*info.path[len(prefix) :].partition("/")[0].split("-", 2), "", "")[:3]
        inside = [committed[key] for key in _within(keys, first, last)]
        if grace.over(info) and not _is_open(inside, info if purpose else None):
            yield Garbage(Kind.JOURNAL, info.path, info.size)


def submitted_batches(
    listed: Iterable[ObjectInfo],
    prefix: str,
    committed: Mapping[str, float | None],
    grace: Grace,
    range_of: Callable[[str], tuple[str, str] | None],
) -> Iterator[Garbage]:
    """Records of what was sent to a Batch API, which no run looks for any more. A run of ordinary work looks at all of
    that kind, so every batch must be committed; the retry of a regenerate or a redrive at those below its run id, whose
    batches must have been committed later. `committed`: as for `journals`. `range_of`: the first and the last batch of
    a record; None: all.
    """
    keys = sorted(committed)
    for info in listed:
        if not grace.over(info):
            continue
        ordinary = info.path[len(prefix) :].partition("/")[0] == ORDINARY
        inside = keys if ordinary or (ends := range_of(info.path)) is None else _within(keys, *ends)
        if not _is_open([committed[key] for key in inside], None if ordinary else info):
            yield Garbage(Kind.SUBMITTED, info.path, info.size)


def _within(keys: Sequence[str], first: str, last: str) -> Sequence[str]:
    return keys[bisect.bisect_left(keys, first) : bisect.bisect_right(keys, last)]


def _is_open(committed: Iterable[float | None], before: ObjectInfo | None) -> bool:
    """Whether a batch is not committed, or was so at the latest when this object was written."""
    return any(at is None or (before is not None and at <= before.modified_at) for at in committed)
