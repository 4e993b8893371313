"""The tables of a store, published and being made, opened when the page asks for one; the last ones stay open."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batch_assets.publishing.derived_table import DerivedStore
from batch_assets.publishing.published_table import published_table
from batch_assets.spec.source import JUDGED, PASSED
from batch_assets.table_access.opened_table import Table, table
from batch_assets.viewer.table_reader import Database, TableReader
from batch_assets.viewer.unfinished_table import UNFINISHED, BeingMade, UnfinishedTable, is_unfinished
from resources.objects.opening import CorruptObject, LocalObjects, open_objects
from resources.store.dataset_store import DatasetStore

MOST_OPEN = 4
_MANIFEST = "/manifest.json"


@dataclass(frozen=True, slots=True)
class TableKey:
    """A version of a dataset's table, or of one that is made of it (`part`: PASSED or JUDGED), or what there is of one
    that is being made (UNFINISHED); None: the newest."""

    dataset: str
    version: str | None
    part: str | None


class Tables:
    """Those of one store. `names`: datasets to choose from; others can be named, too."""

    def __init__(self, root: str, names: Collection[str], folder: Path) -> None:
        """`folder` takes what DuckDB must spill. Raises StoreError."""
        self._root, self._names, self._objects = root, names, open_objects(root)
        below = [self._objects.uri("")] if isinstance(self._objects, LocalObjects) else []
        self._folder = folder / UNFINISHED
        self.database = Database(folder, [*below, str(self._folder)])
        self._unfinished: OrderedDict[str, UnfinishedTable] = OrderedDict()
        self._open: OrderedDict[TableKey, TableReader] = OrderedDict()
        self._used: dict[TableKey, int] = {}
        self._lock = threading.Lock()

    def datasets(self) -> list[dict[str, Any]]:
        """Datasets with something to look at, by name: whether there is a `table`, and which `parts` are made of it:
        of the rows that pass, of the judged ones, and what there is of the next one."""
        found = []
        for name in sorted(self._names):
            store = DatasetStore(self._objects, name)
            with contextlib.suppress(CorruptObject):
                there = store.current_published() is not None
                made = (PASSED, JUDGED) if there else ()
                parts = [one for one in made if DerivedStore(store, one).current_published() is not None]
                parts += [UNFINISHED] if is_unfinished(store) else []
                if there or parts:
                    found.append({"name": name, "table": there, "parts": parts})
        return found

    def versions(self, name: str, part: str | None) -> list[dict[str, Any]]:
        """Versions that are there, the newest first: version, rows, seconds since 1970."""
        store = self._store(name, part)
        prefix = f"{store.dataset}/published/"
        paths = [info.path[len(prefix) :] for info in self._objects.list(prefix)]
        found = []
        for path in paths:
            if path.endswith(_MANIFEST) and path.count("/") == 1:
                with contextlib.suppress(CorruptObject):
                    one = published_table(store, path.removesuffix(_MANIFEST))
                    if one is not None:
                        found.append({"version": one.version, "rows": one.rows, "created_at": one.created_at})
        return sorted(found, key=lambda one: -one["created_at"])

    def being_made(self, key: TableKey, stopped: Callable[[], bool]) -> tuple[TableKey, BeingMade]:
        """What there is by now of a table that is being made: read what was committed since. Raises TableError."""
        found, being_made = self._unfinished_table(key.dataset).look(stopped)
        return TableKey(key.dataset, found.version, UNFINISHED), being_made

    @contextlib.contextmanager
    def reader(self, key: TableKey) -> Iterator[TableReader]:
        """The reader of a version, which is not closed while the body runs. Raises TableError."""
        opened: Table | None = None
        if key.part == UNFINISHED:
            unfinished = self._unfinished_table(key.dataset)
            opened, _ = unfinished.known(key.version) or unfinished.look()
            known = TableKey(key.dataset, opened.version, UNFINISHED)
        else:
            known = TableKey(key.dataset, key.version or self._newest(key), key.part)
        with self._lock:
            if known not in self._open:
                opened = opened or table(
                    known.dataset,
                    known.version,
                    passed=known.part == PASSED,
                    judged=known.part == JUDGED,
                    store=self._root,
                )
                self._open[known] = TableReader(self.database, opened)
            self._open.move_to_end(known)
            reader = self._open[known]
            self._used[known] = self._used.get(known, 0) + 1
        try:
            yield reader
        finally:
            with self._lock:
                self._used[known] -= 1
                self._close_some()

    def close(self) -> None:
        """Close all of them."""
        self.database.close()

    def _unfinished_table(self, name: str) -> UnfinishedTable:
        with self._lock:
            if name not in self._unfinished:
                self._unfinished[name] = UnfinishedTable(DatasetStore(self._objects, name), self._folder / name)
            self._unfinished.move_to_end(name)
            while len(self._unfinished) > MOST_OPEN:
                _, forgotten = self._unfinished.popitem(last=False)
                forgotten.forget()
            return self._unfinished[name]

    def _newest(self, key: TableKey) -> str | None:
        return self._store(key.dataset, key.part).current_published()

    def _store(self, name: str, part: str | None) -> DatasetStore:
        store = DatasetStore(self._objects, name)
        return store if part is None else DerivedStore(store, part)

    def _close_some(self) -> None:
        idle = [key for key in self._open if not self._used.get(key)]
        for key in idle[: max(0, len(self._open) - MOST_OPEN)]:
            self._open.pop(key).close()
            self._used.pop(key, None)
