"""The batch list of a dataset's current snapshot, kept as long as the snapshot stays."""

from __future__ import annotations

from resources.store.dataset_store import BatchEntry, DatasetStore


class SnapshotCache:
    """The batch list of the current snapshot, read again only when the snapshot changed: 80,000 lines cost 0.1 s."""

    def __init__(self) -> None:
        self._snapshot: str | None = None
        self._entries: list[BatchEntry] = []

    def entries(self, store: DatasetStore) -> tuple[str | None, list[BatchEntry]]:
        """Current snapshot id and its batches; (None, []) before the first."""
        snapshot = store.current_snapshot()
        if snapshot is not None and snapshot != self._snapshot:
            # The list first: when it cannot be read, the next look tries again.
            self._entries = store.entries(snapshot)
            self._snapshot = snapshot
        return (snapshot, self._entries) if snapshot is not None else (None, [])
