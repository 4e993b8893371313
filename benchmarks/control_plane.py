"""What a control plane of many instances and rows has to carry, from what one batch, one run and one heartbeat cost.

    python -m benchmarks.control_plane [--rows-per-day 1e9] [--instances 1000]

`load_of` is a plain function: sizes and costs in, load out. `MEASURED` are figures of this repository, each with where
it is from; docs/performance.md has the result, and what it does not show. Both are printed: as it is, and with the
change that such a size needs.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace

DAY, HOUR, GIB = 86_400.0, 3_600.0, 2.0**30


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is asked of the platform. A run has one instance at a time; `batches_per_run` is its range."""

    rows_per_day: float = 1e9
    instances: float = 1_000
    batch_rows: float = 250
    batches_per_run: float = 500
    beat_seconds: float = 2.0
    journal_seconds: float = 2.0
    instance_usd: float = 1.0  # an hour of one


@dataclass(frozen=True, slots=True)
class Costs:
    """What one unit costs. Seconds are of CPU on one core, but for `lock_seconds`: for so long one claim of a batch
    holds the fleet's only lock, in wall seconds.

    `batch_…`: events and statements of Dagster's database, requests to the store that write and that read. `run_…`: the
    same of one run beside its batches. `idle_statements`: a second, of sensors and daemons. US dollars: one request to
    the store, an hour of a core.
    """

    batch_events: float
    batch_statements: float
    batch_writes: float
    batch_reads: float
    run_events: float
    run_statements: float
    run_seconds: float
    row_seconds: float
    event_bytes: float
    idle_statements: float
    statement_seconds: float
    heartbeat_statements: float
    heartbeat_seconds: float
    claim_statements: float
    lock_seconds: float
    write_usd: float
    read_usd: float
    core_usd: float


MEASURED = Costs(
    batch_events=2.0,  # planned, and materialized
    batch_statements=2.0,  # estimated: both events are written in groups
    batch_writes=1.0,  # a run over 40 batches with a store that counts: one object created for each
    batch_reads=1.25,  # the same run: 49 questions whether an object is there, one list, one read
    run_events=15.0,  # benchmarks.many_at_once
    run_statements=1_000.0,  # benchmarks.many_at_once, 20 runs over 40 batches, sensors taken off
    run_seconds=1.9,  # benchmarks.many_at_once
    row_seconds=0.30e-3,  # the bar of issue 27; 0.33 was measured in a run worker
    event_bytes=1_650.0,  # benchmarks.many_at_once: 2,485 and 803, without indexes
    idle_statements=20.0,  # estimated
    statement_seconds=0.4e-3,  # pg_stat_statements: 0.2 ms in the server, as much in the client
    heartbeat_statements=10.0,  # counted: 6 of a renewal, 4 of a beat
    heartbeat_seconds=6.5e-3,  # 4.8 ms in the client, the rest in the server
    claim_statements=10.0,  # counted: 7 of a claim, 3 of its release
    lock_seconds=2.5e-3,  # a renewal when it took it, least of 150 at loads of 3 and 38: 2.2 to 5.5 ms
    write_usd=5e-6,  # S3 standard, list price of us-east-1
    read_usd=0.4e-6,
    core_usd=0.04,
)


@dataclass(frozen=True, slots=True)
class Load:
    """What the control plane carries; a second on average, or a day where the name says so.

    `lock_share`: of each second, for how much the fleet's lock is held; 1 is all there is. Cores: of run workers, and
    of databases with their clients.
    """

    batches_a_day: float
    runs_a_day: float
    events_a_day: float
    event_gib_a_day: float
    objects_a_day: float
    dagster_statements: float
    fleet_statements: float
    lock_share: float
    store_writes_a_day: float
    store_reads_a_day: float
    worker_cores: float
    database_cores: float
    store_usd_a_day: float
    cores_usd_a_day: float
    instances_usd_a_day: float


def load_of(sizes: Sizes, costs: Costs = MEASURED) -> Load:
    """The load of so much work. Renewals and beats hold nobody off, only claims of batches do."""
    batches = sizes.rows_per_day / sizes.batch_rows
    runs = batches / sizes.batches_per_run
    beats = sizes.instances / sizes.beat_seconds
    events = batches * costs.batch_events + runs * costs.run_events
    dagster = (batches * costs.batch_statements + runs * costs.run_statements) / DAY + costs.idle_statements
    fleet = beats * costs.heartbeat_statements + batches * costs.claim_statements / DAY
    locked = 2 * batches / DAY  # a claim of each batch, and its release
    writes = batches * costs.batch_writes + sizes.instances * DAY / sizes.journal_seconds
    reads = batches * costs.batch_reads
    workers = (sizes.rows_per_day * costs.row_seconds + runs * costs.run_seconds) / DAY
    databases = dagster * costs.statement_seconds + beats * costs.heartbeat_seconds
    return Load(
        batches_a_day=batches,
        runs_a_day=runs,
        events_a_day=events,
        event_gib_a_day=events * costs.event_bytes / GIB,
        objects_a_day=batches,
        dagster_statements=dagster,
        fleet_statements=fleet,
        lock_share=locked * costs.lock_seconds,
        store_writes_a_day=writes,
        store_reads_a_day=reads,
        worker_cores=workers,
        database_cores=databases,
        store_usd_a_day=writes * costs.write_usd + reads * costs.read_usd,
        cores_usd_a_day=(workers + databases) * costs.core_usd * DAY / HOUR,
        instances_usd_a_day=sizes.instances * sizes.instance_usd * DAY / HOUR,
    )


def changed(sizes: Sizes) -> Sizes:
    """With batches of 4,000 rows, each run over as many rows as before, and a journal every ten seconds."""
    larger = 4_000 / sizes.batch_rows
    return replace(sizes, batch_rows=4_000, batches_per_run=sizes.batches_per_run / larger, journal_seconds=10.0)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows-per-day", type=float, default=Sizes().rows_per_day)
    parser.add_argument("--instances", type=float, default=Sizes().instances)
    options = parser.parse_args()
    sizes = Sizes(options.rows_per_day, options.instances)
    as_it_is, then = asdict(load_of(sizes)), asdict(load_of(changed(sizes)))
    for name, value in as_it_is.items():
        print(f"{name.replace('_', ' '):24} {value:14,.2f} {then[name]:14,.2f}")


if __name__ == "__main__":
    main()
