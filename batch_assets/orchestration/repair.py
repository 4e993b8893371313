"""Has made again what `verify` found to differ, as far as that needs no new reading of the source.

The means are those of `reconcile`: a batch that is gone or changed becomes void, an object that the catalog describes
wrongly is reported again, a table or list of dead letters that is not as it was written has its publication void.
Launcher and publisher do the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import dagster as dg

from batch_assets.catalog.catalog_reader import BatchReport
from batch_assets.catalog.publications import ledger_state
from batch_assets.orchestration.reconcile import CHANGED, GONE, Findings, Lost, heal
from batch_assets.publishing.differences import Difference, Kind
from batch_assets.publishing.verify import Verification
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import BatchEntry, BatchFooter, DatasetStore

LOST: frozenset[Kind] = frozenset({"missing_batch", "void_catalog_entry", "corrupt_object"})
MISREPORTED: frozenset[Kind] = frozenset(
    {"missing_catalog_entry", "wrong_data_version", "stale_catalog_entry", "wrong_catalog_counts"}
)
# Its files are as their manifest says, and say something else than the batches: they are written anew.
MISWRITTEN: frozenset[Kind] = frozenset({"wrong_table_counts", "duplicate_ids"})
OF_TABLE: frozenset[Kind] = MISWRITTEN | frozenset[Kind](
    {"corrupt_pointer", "missing_table", "stale_table", "broken_table", "stale_dead_letters"}
)


def can_repair(found: Verification) -> bool:
    """Whether all that differs can be made again from the snapshot; a damaged snapshot needs its source."""
    # Without a snapshot it is the snapshot's pointer that is damaged.
    return found.snapshot is not None and all(one.kind in LOST | MISREPORTED | OF_TABLE for one in found.differences)


def repair(
    instance: dg.DagsterInstance,
    store: DatasetStore,
    found: Verification,
    entries: Sequence[BatchEntry],
    current: Mapping[str, BatchReport],
) -> list[str]:
    """Write down what is to be made again; returns it in words.

    `entries`: batches of the snapshot, `current`: the catalog's entries of all of them.
    """
    kinds: dict[Kind, list[Difference]] = {}
    for one in found.differences:
        kinds.setdefault(one.kind, []).append(one)
    lost = [
        _lost(one.batch or "", kind, current) for kind in LOST for one in kinds.get(kind, ()) if one.batch in current
    ]
    unlike = {one.batch for kind in MISREPORTED for one in kinds.get(kind, ())}
    findings = Findings(found.snapshot, lost, _footers(store, entries, unlike))
    of_table = [one for kind in OF_TABLE for one in kinds.get(kind, ())]
    if of_table and not lost:  # with other batches there is another table
        assert found.snapshot is not None
        if kinds.keys() & MISWRITTEN:
            _forget_manifest(store)
        findings.state = ledger_state(found.snapshot, entries, {key: said.version for key, said in current.items()})
        findings.table = "; ".join(f"{one.expected}: {one.found}" for one in of_table[:3])
    return list(heal(instance, store, findings))


def _lost(key: str, kind: Kind, current: Mapping[str, BatchReport]) -> Lost:
    said = current[key]
    return Lost(key, said.version, CHANGED if kind == "corrupt_object" else GONE, said.sha256)


def _footers(store: DatasetStore, entries: Sequence[BatchEntry], keys: set[str | None]) -> list[BatchFooter]:
    """What the current objects of these batches say. They were sound a moment ago."""
    current = store.current_objects(entries) if keys else {}
    footers = []
    for key in sorted(current.keys() & keys):
        with contextlib.suppress(CorruptObject, FileNotFoundError):
            footers.append(store.read_batch(current[key])[1])
    return footers


def _forget_manifest(store: DatasetStore) -> None:
    """A version without a manifest is written anew by the next publication."""
    with contextlib.suppress(CorruptObject):
        if (version := store.current_published()) is not None:
            store.objects.delete([store.published_path(version, "manifest.json")])
