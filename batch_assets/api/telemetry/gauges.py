"""Figures that are read when Prometheus looks: what the records, the fleet and the certificates say now.

A source that cannot be read is left out of the page, and `batch_assets_source_up` says so: a page of metrics never
fails, and waits for a source `WAIT_SECONDS` at most. One is asked every `KEPT_SECONDS` at most, however often somebody
looks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from batch_assets.api.billing.margin import FLEET_PREFIX
from batch_assets.api.database.database_figures import RecordFigures, record_figures
from batch_assets.api.database.service_database import Records
from batch_assets.api.telemetry.metrics import MOST_MODELS, OTHER, Sample
from gpu_runner.bounded_http.tls_files import RotatingContext
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.reporting.backup_note import BackupNote
from gpu_runner.fleet_database.reporting.fleet_figures import FleetFigures
from gpu_runner.fleet_database.targets import DatasetTarget

log = logging.getLogger(__name__)

KEPT_SECONDS = 2.0
WAIT_SECONDS = 2.0
UNKNOWN = "unknown"


class KeptSamples:
    """The samples of one source. Safe to use from several threads. `clock`: monotonic seconds.

    One thread at a time reads, of our own: a database that hangs keeps nobody who looks longer than `wait_seconds`.
    """

    def __init__(
        self,
        source: str,
        read: Callable[[], Iterable[Sample]],
        clock: Callable[[], float],
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._source, self._read, self._clock, self._wait = source, read, clock, wait_seconds
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._kept: Sequence[Sample] = ()
        self._read_at: float | None = None

    def __call__(self) -> Iterable[Sample]:
        """Those of a moment ago, or new ones. Raises nothing, whatever the source raises."""
        with self._lock:
            reader = self._reader
            if reader is None and (self._read_at is None or self._clock() - self._read_at >= KEPT_SECONDS):
                name = f"metrics-{self._source}"
                reader = threading.Thread(target=self._read_now, name=name, daemon=True)
                reader.start()
                self._reader = reader
        if reader is not None:
            reader.join(self._wait)
        with self._lock:
            return [self._up(0.0)] if reader is not None and self._reader is reader else self._kept

    def _read_now(self) -> None:
        try:
            found = [*self._read(), self._up(1.0)]
        except Exception as error:  # a page without these figures is better than none; `up` says it
            log.warning("metrics: %s cannot be read: %s", self._source, type(error).__name__)
            found = [self._up(0.0)]
        with self._lock:
            self._kept, self._read_at, self._reader = found, self._clock(), None

    def _up(self, value: float) -> Sample:
        return "batch_assets_source_up", "Whether these figures could be read.", {"source": self._source}, value


class FleetSource:
    """The fleet's database, opened when somebody looks for the first time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._database: FleetDatabase | None = None

    def read(self) -> Iterable[Sample]:
        """Samples of the fleet. Raises SQLAlchemyError, FleetDatabaseTooNew."""
        if self._database is None:
            self._database = FleetDatabase(self._url)
        plans = plan_samples(self._database.targets(), self._database.engines_held())
        return [*fleet_samples(self._database.figures()), *plans, *backup_samples(self._database.last_backup())]

    def close(self) -> None:
        """Close all connections."""
        if self._database is not None:
            self._database.close()


def record_gauges(records: Records, clock: Callable[[], float]) -> Callable[[], Iterable[Sample]]:
    """Reads the records. `clock`: Unix seconds."""
    return lambda: record_samples(record_figures(records, clock()))


def record_samples(found: RecordFigures) -> Iterator[Sample]:
    """Samples of batches and files."""
    for state, count in found.batches.items():
        yield "batch_assets_batches", "Batches by state, all there are.", {"status": state.value}, count
    for state, seconds in found.oldest.items():
        text = "Age of the oldest open batch of a state."
        yield "batch_assets_batch_oldest_seconds", text, {"status": state.value}, seconds
    for model, lines in bounded_models(found.queued_lines).items():
        text = "Lines without an outcome in open batches."
        yield "batch_assets_queue_depth", text, {"model": model}, lines
    for model, seconds in sorted(found.windows.items(), key=lambda item: (item[1], item[0]))[:MOST_MODELS]:
        text = "Seconds until the earliest window of a model's open batches ends."
        yield "batch_assets_batch_window_seconds", text, {"model": model or UNKNOWN}, seconds
    text = "How long the window of an open batch has been over, at most."
    yield "batch_assets_batch_overdue_seconds", text, {}, found.overdue_seconds
    text = "Ended batches that the catalog may not have whole."
    yield "batch_assets_catalog_waiting_batches", text, {}, found.unreported
    text = "How long the oldest batch that the catalog may not have whole has ended."
    yield "batch_assets_catalog_lag_seconds", text, {}, found.unreported_seconds
    yield "batch_assets_stored_bytes", "Bytes of all files.", {}, found.stored_bytes
    text = "Tokens in the usage ledger since midnight (UTC), by whether they have a price."
    priced = found.day_tokens - found.day_unpriced_tokens
    for has_price, tokens in (("true", priced), ("false", found.day_unpriced_tokens)):
        yield "batch_assets_usage_day_tokens", text, {"priced": has_price}, tokens


def fleet_samples(found: FleetFigures) -> Iterator[Sample]:
    """Samples of instances, leases and runs."""
    counted = (
        ("instances", "Rented instances that have not ended.", found.instances),
        ("leases", "Leases that nobody has ended.", found.leases),
        ("runs", "Runs and services that have not ended.", found.runs),
    )
    for name, text, counts in counted:
        for state, count in counts.items():
            yield f"batch_assets_fleet_{name}", text, {"state": state}, count
    for provider, usd in found.spent_usd.items():
        text = "US dollars that rented instances have cost, by the fleet's books."
        yield "batch_assets_fleet_spend_usd", text, {"provider": provider}, usd
    text = "US dollars an hour of the instances that stand now."
    yield "batch_assets_fleet_usd_per_hour", text, {}, found.usd_per_hour
    text = "Seconds since the last heartbeat of the run that is silent longest."
    yield "batch_assets_fleet_silent_seconds", text, {}, found.silent_seconds


def backup_samples(last: BackupNote) -> Iterator[Sample]:
    """Samples of the backups of the databases."""
    text = "Seconds since the last backup of the databases was complete; -1: there was none."
    yield "batch_assets_backup_age_seconds", text, {}, -1.0 if last.age_seconds is None else last.age_seconds
    text = "1 when a backup has failed since the last one that is complete, else 0."
    yield "batch_assets_backup_failed", text, {}, float(bool(last.failure))


def plan_samples(targets: Iterable[DatasetTarget], held: Mapping[str, int]) -> Iterator[Sample]:
    """Samples of the plans for open batches, by model: those with most lines left. `held`: leased engines, by
    dataset.
    """
    planned = [one for one in targets if one.request and one.plan is not None and one.dataset.startswith(FLEET_PREFIX)]
    planned.sort(key=lambda one: (-(0 if one.plan is None else one.plan.rows_left), one.dataset))
    for one in planned[:MOST_MODELS]:
        model = {"model": one.dataset.removeprefix(FLEET_PREFIX)}
        assert one.plan is not None
        text = "Engines that the plan for a model's open batches commands, reserve and those of fleet.yaml included."
        yield "batch_assets_plan_engines_wanted", text, model, one.instances
        text = "Engines leased for a model of the front door: rented ones that answer, and those of fleet.yaml."
        yield "batch_assets_plan_engines_held", text, model, held.get(one.dataset, 0)
        text = "Lines without a result, as of the last plan."
        yield "batch_assets_plan_rows_left", text, model, one.plan.rows_left
        if one.deadline_in is not None:
            text = "Seconds until the window ends that asks for most engines."
            yield "batch_assets_plan_window_seconds", text, model, one.deadline_in


def certificate_gauges(service: RotatingContext | None, engines: RotatingContext | None) -> Iterable[Sample]:
    """When the certificates in use end, in Unix seconds."""
    text = "End of the certificate in use, Unix seconds."
    for name, context in {"service": service, "engines": engines}.items():
        if context is not None:
            context.current()  # where nobody has connected since the files were replaced
        if context is not None and context.ends_at is not None:
            yield "batch_assets_certificate_end_seconds", text, {"certificate": name}, context.ends_at


def bounded_models(lines: Mapping[str, int]) -> dict[str, int]:
    """Lines by model: of the models with most lines, and of all others together."""
    ordered = sorted(lines.items(), key=lambda item: (-item[1], item[0]))
    found = {name or UNKNOWN: count for name, count in ordered[:MOST_MODELS]}
    if rest := ordered[MOST_MODELS:]:
        found[OTHER] = found.get(OTHER, 0) + sum(count for _, count in rest)
    return found
