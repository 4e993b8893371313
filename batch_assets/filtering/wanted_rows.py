"""Where a dataset with `want` stands, and how much of its source it reads next, by what its store holds.

The rounds have no state of their own: a snapshot says how much of the source it asks (`WantedRows`), and grows when its
table is published and filtered, and too few rows passed. So a round that was interrupted goes on as it was, and one
that is read twice is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batch_assets.capacity_planning.acceptance import Expected, Round, Stratum, Stretch, next_round, prior_of, rows_for
from batch_assets.filtering.passed_table import FilterReport, PassedStore, read_report
from batch_assets.judging.judged_table import judged_store, judged_version
from batch_assets.publishing.published_table import published_table
from batch_assets.spec.chain import round_of, wanting
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.row_rules import SURPLUS, WantSpec, rules_digest
from batch_assets.spec.source import TABLE, table_read_by
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest
from resources.store.snapshot_manifest import WantedRows


@dataclass(frozen=True, slots=True)
class Standing:
    """`round`: what is to be made next; None: the rows that were read last are not all made and judged. `accepted`:
    rows, of which those beyond `wanted` are surplus. `made`: rows in all."""

    wanted: int
    accepted: int
    made: int
    round: Round | None

    @property
    def grows(self) -> bool:
        """Whether more of the source is to be read."""
        return self.round is not None and bool(self.round.limits) and not self.hopeless

    @property
    def hopeless(self) -> bool:
        """Whether nothing at all was accepted: nothing says that more rows would help."""
        return self.round is not None and bool(self.round.missing) and not self.accepted

    def said(self) -> str:
        """Why no more rows are made although some are missing, and what to do; "" otherwise."""
        if self.round is None or self.grows or not self.round.missing:
            return ""
        missing = f"{self.round.missing:,} accepted rows are missing: {self.accepted:,} of {self.made:,} rows passed"
        if self.hopeless:
            return f"{missing}, so no more are made: `filter` or the prompt is to be changed"
        return f"{missing}, and the source has no more: add rows to it, loosen `filter`, or lower `want.rows`"


Specs = Mapping[str, GeneratedDatasetSpec]


def standing(spec: GeneratedDatasetSpec, store: DatasetStore, specs: Specs) -> Standing | None:
    """Where the dataset stands; None where it wants no number of rows, or nothing was read yet. `specs`: of all
    datasets, of which another one may accept the rows."""
    want = spec.want
    manifest = _manifest(store)
    if want is None or manifest is None or manifest.wanted is None:
        return None
    report = _report(spec, store, manifest, specs)
    if report is None:
        return Standing(want.rows, 0, 0, None)
    accepted = sum(passed for stretches in (report.accepted or {}).values() for _, passed in stretches)
    made = report.passed + report.fallen
    return Standing(want.rows, accepted, made, _round(want, spec, manifest.wanted, report))


def rounds_follow(accepts: str, objects: Objects, specs: Specs) -> bool:
    """Whether more rows are made than those that a dataset has just judged or filtered, until enough are accepted.
    `accepts`: the dataset whose rules accept rows, of itself or of one before it."""
    wants = wanting(specs, accepts)
    found = None if wants is None else standing(wants, DatasetStore(objects, wants.name), specs)
    return found is not None and (found.grows or found.round is None)


def wanted_rows(spec: GeneratedDatasetSpec, store: DatasetStore, specs: Specs) -> WantedRows | None:
    """How much of its source a dataset is to read now; None: all of it."""
    want = spec.want
    if want is None:
        return None
    manifest = _manifest(store)
    if manifest is None or manifest.wanted is None or manifest.wanted.per != want.per:
        return _first(want, spec, store, manifest)
    found, before = standing(spec, store, specs), manifest.wanted
    if found is None or found.round is None:
        return before
    if not found.grows:
        return before.model_copy(update={"to_come": (0.0, 0.0, 0.0)})
    limits = found.round.limits
    made = manifest.expected_rows / max(1, manifest.source_rows)  # of a row of the source, here
    asked = made * sum(limit - before.limit(name) for name, limit in limits.items())
    to_come = _less(_made_here(found.round, found.made, manifest), asked)
    return WantedRows(per=want.per, limits={**before.limits, **limits}, otherwise=before.otherwise, to_come=to_come)


def _made_here(found: Round, judged: int, manifest: SnapshotManifest) -> Expected:
    """Rows still to be made, of this dataset, where another one may judge them as fewer rows or more."""
    times = manifest.expected_rows / judged if judged else 1.0
    return Expected(*(number * times for number in found.expected))


def rows_to_come(spec: GeneratedDatasetSpec, store: DatasetStore, specs: Specs) -> Expected:
    """Rows that are expected to be made after those of the current snapshot: at the upper bound of the rate, in the
    middle, and at its lower bound."""
    found, manifest = standing(spec, store, specs), _manifest(store)
    if found is None or manifest is None or manifest.wanted is None:
        return Expected()
    if found.round is None:
        return Expected(*manifest.wanted.to_come)
    return _made_here(found.round, found.made, manifest) if found.grows else Expected()


def _first(
    want: WantSpec, spec: GeneratedDatasetSpec, store: DatasetStore, manifest: SnapshotManifest | None
) -> WantedRows:
    """The first round: as many rows as are to be accepted, which are never too many; all that were asked before the
    dataset had `want`."""
    rows = -(-want.rows // spec.samples)
    if want.per is None:
        batch = max(1, spec.batch_rows // spec.samples)
        rows = -(-rows // batch) * batch
    if manifest is not None and manifest.wanted is None:
        rows = max(rows, manifest.source_rows)
    to_come = _less(rows_for(want.rows, prior_of(want.expected_rate or _rate_before(store))), rows * spec.samples)
    return WantedRows(per=want.per, otherwise=rows, to_come=to_come)


def _rate_before(store: DatasetStore) -> float | None:
    """The share of rows that passed in the version before; None: there is none."""
    try:
        report = read_report(PassedStore(store))
    except CorruptObject:
        return None
    if report is None or not report.passed + report.fallen:
        return None
    return (report.passed + report.removed.get(SURPLUS, 0)) / (report.passed + report.fallen)


def _less(expected: Expected, rows: float) -> tuple[float, float, float]:
    low, middle, high = (max(0.0, number - rows) for number in expected)
    return low, middle, high


def _round(want: WantSpec, spec: GeneratedDatasetSpec, asked: WantedRows, report: FilterReport) -> Round:
    stretches = report.accepted or {}
    strata = {
        name: Stratum(
            asked.limit(name), asked.read.get(name, 0), tuple(Stretch(*one) for one in stretches.get(name, []))
        )
        for name in dict.fromkeys([*asked.read, *stretches])
    }
    prior = prior_of(want.expected_rate)
    each = max(0.01, (report.passed + report.fallen) / max(1, sum(asked.read.values())))
    return next_round(strata, want.rows, each=each, batch=spec.batch_rows, prior=prior)


def _manifest(store: DatasetStore) -> SnapshotManifest | None:
    try:
        snapshot = store.current_snapshot()
        return None if snapshot is None else store.manifest(snapshot)
    except (CorruptObject, FileNotFoundError):
        return None


def _report(
    spec: GeneratedDatasetSpec, store: DatasetStore, manifest: SnapshotManifest, specs: Specs
) -> FilterReport | None:
    """What the rules that accept rows did to those of this snapshot; None: they did not yet, or other rules did."""
    try:
        for name in round_of({**specs, spec.name: spec}, spec)[1:]:  # each has read what the one before has made
            place = table_read_by(specs[name].source) or ""
            read = published_table(DatasetStore(store.objects, place.removesuffix(f"/{TABLE}")))
            below = _manifest(DatasetStore(store.objects, name))
            if read is None or below is None or read.snapshot != manifest.snapshot:
                return None
            if below.upstream_version != read.version or below.streaming is not None:
                return None
            manifest = below
        accepts = spec if spec.accepted_by == spec.name else specs[spec.accepted_by]
        target = PassedStore(DatasetStore(store.objects, accepts.name))
        passed, newest = published_table(target), _rows_to_filter(accepts, DatasetStore(store.objects, accepts.name))
        report = None if passed is None else read_report(target, passed.version)
    except CorruptObject:
        return None
    if passed is None or report is None or passed.snapshot != manifest.snapshot or report.table != newest:
        return None
    rules = accepts.rules
    return report if rules and report.rules == rules_digest(rules, spec.want) else None


def _rows_to_filter(spec: GeneratedDatasetSpec, store: DatasetStore) -> str | None:
    """Version of the table that the rules of a dataset look at; None: it is not there, or not of the newest votes."""
    table = published_table(store)
    if table is None or spec.judge is None:
        return None if table is None else table.version
    judged = published_table(judged_store(store))
    return judged.version if judged and judged.version == judged_version(table.version, spec.judge) else None
