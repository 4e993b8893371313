"""The asset checks of the published table: figures from quality.py as Dagster check results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import dagster as dg

from batch_assets.ledger import LedgerVersion
from batch_assets.publish import PublishedTable
from batch_assets.spec import GeneratedDatasetSpec
from resources.store import DatasetStore, SnapshotManifest

CHECKS = {
    "one_outcome_per_row": "The table holds every source row exactly once; row ids are unique.",
    "dead_letter_rate": "Rows without a completion.",
    "schema_valid_rate": "Outputs that match the declared JSON schema.",
    "empty_rate": "Outputs that are empty or blank.",
    "repeated_rate": "The most frequent output's share of all outputs.",
    "catalog_matches_store": "Every batch object of the snapshot is in the catalog, at its data version and generation.",
}


def check_results(
    spec: GeneratedDatasetSpec,
    store: DatasetStore,
    manifest: SnapshotManifest,
    table: PublishedTable,
    versions: Mapping[str, LedgerVersion],
    workdir: Path,
) -> Iterator[dg.AssetCheckResult]:
    """One result per name in CHECKS, in one pass over the table."""
    yield _catalog_check(store, manifest, versions)


def _catalog_check(
    store: DatasetStore, manifest: SnapshotManifest, versions: Mapping[str, LedgerVersion]
) -> dg.AssetCheckResult:
    entries = store.entries(manifest.snapshot)
    current = store.current_objects(entries)
    wrong = [
        entry.key
        for entry in entries
        if entry.key not in current
        or versions.get(entry.key) != LedgerVersion(entry.data_version, current[entry.key].generation)
    ]
    return dg.AssetCheckResult(
        check_name="catalog_matches_store",
        passed=not wrong,
        metadata={"batches": len(entries), "differing": len(wrong), "first": ", ".join(wrong[:20])},
    )
