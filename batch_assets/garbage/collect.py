"""Finds what nobody needs in the store, and deletes it: all listings first, then the deletions.

What was found goes to a file on the disk, so that memory does not grow with it. A listing that fails ends it before
anything is deleted. Datasets at work, damaged ones, and those whose snapshot changes meanwhile are passed over.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from batch_assets.filtering.passed_table import PassedStore
from batch_assets.garbage.unreferenced import (
    Garbage,
    Grace,
    Kind,
    Version,
    journals,
    old_versions,
    submitted_batches,
    superseded_batches,
)
from batch_assets.publishing.published_table import published_table
from resources.objects.opening import CorruptObject, ObjectInfo, Objects
from resources.store.dataset_store import BatchObject, DatasetStore
from resources.store.stored_batches import range_of, records_prefix

KEEP_VERSIONS = 2
OLDER_THAN = "7d"
CHUNK = 1000


@dataclass(slots=True)
class Found:
    """What was found: objects and bytes by kind; `skipped`: datasets that were passed over, and why."""

    objects: Counter[Kind] = field(default_factory=Counter)
    bytes: Counter[Kind] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, one: Garbage) -> None:
        """Count it."""
        self.objects[one.kind] += 1
        self.bytes[one.kind] += one.bytes

    def add_all(self, other: Found) -> None:
        """Count what another look found."""
        self.objects += other.objects
        self.bytes += other.bytes


def find_all(
    stores: Sequence[DatasetStore],
    pinned: frozenset[str],
    keep: int,
    grace: Grace,
    busy: Callable[[str], str],
    more: Iterable[Garbage],
    spool: Path,
) -> Found:
    """Look at all datasets and write what nobody needs to `spool`.

    `pinned`: published versions that are kept (`pinned_versions`). `busy`: why a dataset is at work; "": it is not.
    `more`: garbage that is of no dataset. Raises as the store: nothing was deleted.
    """
    found = Found()
    with spool.open("w") as file:
        for store in stores:
            began, own = file.tell(), Found()
            if why := busy(store.dataset):
                found.skipped[store.dataset] = why
                continue
            try:
                before = store.current_snapshot()
                _write(_of_dataset(store, before, pinned, keep, grace), own, file)
                if store.current_snapshot() != before or busy(store.dataset):
                    raise CorruptObject("it was refreshed meanwhile")
            except CorruptObject as error:
                file.seek(began)
                file.truncate()
                found.skipped[store.dataset] = str(error)
                continue
            found.add_all(own)
        _write(more, found, file)
    return found


def _write(garbage: Iterable[Garbage], found: Found, file: IO[str]) -> None:
    for one in garbage:
        found.add(one)
        file.write(json.dumps(one.path) + "\n")


def _of_dataset(
    store: DatasetStore, snapshot: str | None, pinned: frozenset[str], keep: int, grace: Grace
) -> Iterator[Garbage]:
    """All garbage of one dataset. Raises CorruptObject where it cannot be known."""
    if snapshot is None:
        return
    wanted = {entry.key: entry.data_version for entry in store.entries(snapshot)}
    committed: dict[str, float | None] = dict.fromkeys(wanted)

    def listed() -> Iterator[tuple[BatchObject, ObjectInfo]]:
        for batch, info in store.batch_infos():
            if wanted.get(batch.key) == batch.data_version:
                committed[batch.key] = max(info.modified_at, committed[batch.key] or 0.0)
            yield batch, info

    yield from superseded_batches(listed(), wanted, grace)
    prefix = f"{store.dataset}/journal/"
    yield from journals(store.objects.list(prefix), prefix, committed, grace)
    prefix = records_prefix(store.dataset)
    yield from submitted_batches(
        store.objects.list(prefix), prefix, committed, grace, lambda path: range_of(store.objects, path)
    )
    yield from old_versions(_snapshots(store), 1, {snapshot}, grace, Kind.OLD_SNAPSHOT)
    for tables in (store, PassedStore(store)):
        seen = tables.current_published()
        kept = pinned | ({seen} if seen else set())
        yield from old_versions(_published(tables), max(keep, 1), kept, grace, Kind.OLD_VERSION)


def pinned_versions(stores: Sequence[DatasetStore]) -> frozenset[str]:
    """Published versions that current snapshots of any dataset were made of. Raises CorruptObject: it is not known."""
    found: set[str] = set()
    for store in stores:
        snapshot = store.current_snapshot()
        version = store.manifest(snapshot).upstream_version if snapshot is not None else None
        found |= {version} if version else set()
    return frozenset(found)


def _folders(store: DatasetStore, folder: str) -> dict[str, list[ObjectInfo]]:
    prefix = f"{store.dataset}/{folder}/"
    found: dict[str, list[ObjectInfo]] = {}
    for info in store.objects.list(prefix):
        name, slash, _ = info.path[len(prefix) :].partition("/")
        if slash:
            found.setdefault(name, []).append(info)
    return found


def _snapshots(store: DatasetStore) -> list[Version]:
    return [
        Version(name, store.manifest(name).created_at if _is_whole(objects) else None, tuple(objects))
        for name, objects in _folders(store, "snapshots").items()
    ]


def _published(store: DatasetStore) -> list[Version]:
    found = []
    for name, objects in _folders(store, "published").items():
        table = published_table(store, name) if _is_whole(objects) else None
        found.append(Version(name, table.created_at if table is not None else None, tuple(objects)))
    return found


def _is_whole(objects: Iterable[ObjectInfo]) -> bool:
    return any(info.path.endswith("/manifest.json") for info in objects)


def delete_all(objects: Objects, spool: Path) -> int:
    """Delete what is in the file, a thousand at a time; returns how many objects that were. May be repeated.

    Manifests go first: without one a version, a snapshot or a backup is none, whatever ends this half-way.
    """
    count = 0
    for manifests in (True, False):
        with spool.open() as file:
            found = (str(json.loads(line)) for line in file)
            paths = (path for path in found if path.endswith("/manifest.json") == manifests)
            while chunk := list(itertools.islice(paths, CHUNK)):
                objects.delete_many(chunk)
                count += len(chunk)
    return count
