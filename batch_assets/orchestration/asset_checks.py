"""The asset checks of the published table: figures of quality.py, and the catalog against the store."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import dagster as dg

from batch_assets.catalog.ledger import LedgerVersion, missing, table_key
from batch_assets.durations import duration
from batch_assets.publishing.published_table import PublishedTable
from batch_assets.publishing.quality import CHECKS, CheckFigure, Thresholds, quality
from batch_assets.spec.models import GeneratedDatasetSpec
from gpu_runner.fleet_database.targets import DatasetTarget
from resources.store.dataset_store import BatchEntry, DatasetStore, SnapshotManifest

_CATALOG = "catalog_matches_store"
ON_TIME = "on_time"
CURRENT = "batches_current"
NOT_PAUSED = "not_paused"
SHOWN_BATCHES = 20
ALL_THERE = "Nothing is paused: all rows are there."
_DESCRIPTIONS = {
    **CHECKS,
    _CATALOG: "Every batch object of the snapshot is in the catalog, at its data version and generation.",
    CURRENT: "No batch of an earlier snapshot is left. Dagster counts such a batch as materialized.",
    NOT_PAUSED: "What is being made is not paused: by a gate, because most rows that came are bad, or by its budget.",
    ON_TIME: "The rows were done by their deadline; while they are being made: they are expected to be.",
}


def check_specs(spec: GeneratedDatasetSpec, key: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """The checks of a dataset's table; `schema_valid_rate` only where a JSON schema is declared."""
    return [dg.AssetCheckSpec(name, asset=key, description=_DESCRIPTIONS[name]) for name in _names(spec)]


def _names(spec: GeneratedDatasetSpec) -> list[str]:
    return [name for name in _DESCRIPTIONS if name != "schema_valid_rate" or spec.output.json_schema is not None]


def check_results(
    spec: GeneratedDatasetSpec,
    store: DatasetStore,
    manifest: SnapshotManifest,
    table: PublishedTable,
    versions: Mapping[str, LedgerVersion],
    target: DatasetTarget | None,
) -> list[dg.AssetCheckResult]:
    """One result per check spec, in one pass over the table. `target`: the dataset's row of the fleet's database."""
    thresholds = Thresholds(
        max_dead_rate=spec.checks.max_dead_rate,
        min_schema_valid_rate=spec.checks.min_schema_valid_rate,
        max_empty_rate=spec.checks.max_empty_rate,
        max_repeated_rate=spec.checks.max_repeated_rate,
        max_cut_rate=spec.checks.max_cut_rate,
        max_thinking_rate=spec.checks.max_thinking_rate,
    )
    results = [_result(figure) for figure in quality(store, table, manifest, thresholds)]
    newest = store.current_snapshot() or manifest.snapshot  # which may be another one by now
    stale = StaleBatches.of(newest, store.entries(newest), versions)
    results += [_catalog_result(store, manifest, versions), stale.result(store.dataset), on_time_result(target)]
    results.append(dg.AssetCheckResult(check_name=NOT_PAUSED, passed=True, description=ALL_THERE))
    return list(_as_declared(spec, results))


def _as_declared(spec: GeneratedDatasetSpec, results: Sequence[dg.AssetCheckResult]) -> Iterator[dg.AssetCheckResult]:
    """Exactly the declared checks: the spec may have gained or lost its JSON schema since the snapshot was taken."""
    found = {result.check_name: result for result in results}
    for name in _names(spec):
        yield found.get(name) or dg.AssetCheckResult(
            check_name=name,
            passed=False,
            severity=dg.AssetCheckSeverity.WARN,
            description="The snapshot was taken without a JSON schema; materialize prompts again.",
        )


def _result(figure: CheckFigure) -> dg.AssetCheckResult:
    threshold = {} if figure.threshold is None else {"threshold": figure.threshold}
    return dg.AssetCheckResult(
        check_name=figure.name,
        passed=figure.passed,
        severity=dg.AssetCheckSeverity.ERROR if figure.severity == "error" else dg.AssetCheckSeverity.WARN,
        description=figure.description,
        metadata={"value": figure.value, **threshold},
    )


def on_time_result(target: DatasetTarget | None) -> dg.AssetCheckResult:
    """Whether all rows were there by the deadline. Asked when the last of them is: of a request that the capacity
    sensor has not ended yet, this is now."""
    deadline: float | None = None
    done = 0.0
    if target is not None and target.request:
        deadline, done = target.deadline_at, target.since + target.age
    elif target is not None and target.ended is not None:
        deadline, done = target.ended.deadline, target.ended.finished_at
    if deadline is None:
        return dg.AssetCheckResult(check_name=ON_TIME, passed=True, description="There was no deadline.")
    margin = deadline - done
    return dg.AssetCheckResult(
        check_name=ON_TIME,
        passed=margin >= 0,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"Done {duration(abs(margin))} {'before' if margin >= 0 else 'after'} the deadline.",
        metadata={
            "deadline": dg.MetadataValue.timestamp(deadline),
            "done": dg.MetadataValue.timestamp(done),
            "seconds_left": round(margin, 1),
        },
    )


@dataclass(frozen=True, slots=True)
class StaleBatches:
    """Batches that the catalog has, and not as the newest snapshot asks for them: of an earlier one, or void.

    Dagster counts them as materialized. One that it never had counts as missing there, too.
    """

    snapshot: str
    batches: int
    keys: tuple[str, ...]
    making: bool = False

    @classmethod
    def of(
        cls,
        snapshot: str,
        entries: Sequence[BatchEntry],
        versions: Mapping[str, LedgerVersion],
        *,
        making: bool = False,
    ) -> Self:
        keys = tuple(entry.key for entry in missing(entries, versions) if entry.key in versions)
        return cls(snapshot, len(entries), keys, making)

    def result(self, dataset: str) -> dg.AssetCheckResult:
        """The check of a publication."""
        return dg.AssetCheckResult(check_name=CURRENT, **self._said(dataset))

    def event(self, dataset: str) -> dg.AssetCheckEvaluation:
        """The check at any other time."""
        return dg.AssetCheckEvaluation(asset_key=table_key(dataset), check_name=CURRENT, **self._said(dataset))

    def _said(self, dataset: str) -> dict[str, Any]:
        said = f"All {self.batches:,} batches are of the newest snapshot, or were never made."
        if self.keys:
            todo = "they are being made" if self.making else f"{to_go_on(dataset)} makes them"
            what = "are of an earlier snapshot, lost or to be made anew"
            said = f"{len(self.keys):,} of {self.batches:,} batches {what}: {todo}."
        return {
            "passed": not self.keys,
            "severity": dg.AssetCheckSeverity.WARN,
            "description": said,
            "metadata": {
                "snapshot": self.snapshot,
                "stale": len(self.keys),
                **_first(self.keys),
            },
        }


def to_go_on(dataset: str) -> str:
    """What generates what is left, for people: in the UI and on the command line."""
    return f"the job `{dataset}_refresh` or `batch-assets run {dataset}`"


def _catalog_result(
    store: DatasetStore, manifest: SnapshotManifest, versions: Mapping[str, LedgerVersion]
) -> dg.AssetCheckResult:
    wrong = list(_unlike_catalog(store, manifest, versions))
    return dg.AssetCheckResult(
        check_name=_CATALOG,
        passed=not wrong,
        description=f"{len(wrong)} of {manifest.batches} batches differ.",
        metadata={"differing": len(wrong), **_first(wrong)},
    )


def _first(keys: Sequence[str]) -> dict[str, str]:
    return {"first_batches": ", ".join(keys[:SHOWN_BATCHES])} if keys else {}


def _unlike_catalog(
    store: DatasetStore, manifest: SnapshotManifest, versions: Mapping[str, LedgerVersion]
) -> Iterator[str]:
    entries = store.entries(manifest.snapshot)
    current = store.current_objects(entries)
    for entry in entries:
        batch = current.get(entry.key)
        if batch is None or versions.get(entry.key) != LedgerVersion(entry.data_version, batch.generation):
            yield entry.key
