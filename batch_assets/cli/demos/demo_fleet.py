"""`batch-assets demo-fleet`: the 5,000 rows of `example` on a simulated market, by a deadline that one machine misses.

Three providers rent out the same GPU, so that prices decide. The cheapest machine is a spot one, and is taken away in
the middle of the work; the deadline needs several machines at once; then another provider cuts its price, and the work
rolls over. Machines, prices and texts are simulated; the rest (leases, the plan, the moves, the bill, the table) is as
it is anywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

from batch_assets.capacity_planning.clock_scale import scale_words
from batch_assets.catalog import ledger
from batch_assets.cli.demos.demo import EXAMPLE, SAMPLE_ROWS, Demo, generate, say
from batch_assets.durations import duration
from batch_assets.local_dagster.home import StackError, prepare_home, running_stack
from batch_assets.local_dagster.local_fleet import the_fleet
from batch_assets.orchestration.request_summary import RequestStatus, request_status
from batch_assets.request_status.dataset_status import observing
from batch_assets.tags import DEADLINE_TAG
from gpu_runner.fleet_database.accounting.bill_split import InstanceCost
from gpu_runner.fleet_database.database import Instance
from gpu_runner.money import format_usd
from gpu_runner.providers.simulated.config import (
    OfferChange,
    SimulatedCloudConfig,
    SimulatedOffer,
    SimulatedProviderConfig,
)
from resources.fleet.fleet_config import ENDPOINT_VARIABLE

MODEL = "Qwen/Qwen3-8B"  # on an L4, long enough to write for machines to come and go
CLOCK = 2.0
DEADLINE = "2m 30s"
# Real seconds: of a boot; that a spot machine works until it is taken away, and of these the notice; until sim-east
# cuts its price.
BOOT_SECONDS, SPOT_SECONDS, NOTICE, CUT_SECONDS = 5.0, 25.0, 4.0, 55.0
FIRST_PRICE, CUT_PRICE = 0.95, 0.2  # of sim-east, US dollars per hour
DECISIONS = 20  # that are shown
NO_DECISION = "  nothing: all rows were there already; with another DAGSTER_HOME and BATCH_ASSETS_STORE it begins anew"


class DagsterRuns(StackError):
    """A Dagster runs on this home already, with a fleet of its own: says what to do."""


def run_fleet_demo() -> int:
    """Generate, verify, show the machines and the bill; returns the exit status. Raises DagsterRuns."""
    began = time.monotonic()
    home = prepare_home()
    if running_stack(home) is not None:
        raise DagsterRuns(f"expected no Dagster on {home}, found one that runs with its own fleet.yaml: end it first")
    config = home / "demo-fleet.yaml"
    write_fleet(config)
    os.environ["BATCH_ASSETS_FLEET"] = str(config)
    os.environ.setdefault("BATCH_ASSETS_CAPACITY_SECONDS", "3")
    os.environ.pop(ENDPOINT_VARIABLE, None)
    cloud = demo_cloud()
    say(
        f"Engines: simulated ones, of three providers; their machines, prices and texts are invented ({config})",
        f"{scale_words({one.name: cloud.clock for one in cloud.providers})}",
        f"Deadline: {DEADLINE} from now, in real time: one machine alone would miss it",
        f"A spot machine is taken away after {SPOT_SECONDS:g} s. After {CUT_SECONDS:g} s sim-east cuts its price from "
        f"{format_usd(FIRST_PRICE)} to {format_usd(CUT_PRICE)} $/h",
    )
    asked = time.time()
    demo = Demo(EXAMPLE, ("topic", "audience", "format"), SAMPLE_ROWS, "", MODEL)
    status = generate(demo, began, {DEADLINE_TAG: DEADLINE})
    if status == 0:
        with the_fleet().open_database() as fleet_db:
            say("", deadline_line(request_status(fleet_db, EXAMPLE), time.time()))
            with observing([EXAMPLE]) as (seen,):
                decided = decision_lines(seen.instance, EXAMPLE, asked) or [NO_DECISION]
            say("What the fleet did, in real seconds:", *decided)
            say("Machines, with their real time:", *machine_lines(fleet_db.fleet(ended=True), fleet_db.costs()))
    return status


def deadline_line(status: RequestStatus, now: float) -> str:
    """Whether the request kept its deadline, by the moment at which its last row was there."""
    finished = now if status.finished_at is None else status.finished_at
    left = (finished if status.deadline is None else status.deadline) - finished
    return f"Deadline: {'kept with' if left >= 0 else 'missed by'} {duration(abs(left))}{' left' * (left >= 0)}"


def demo_cloud() -> SimulatedCloudConfig:
    """sim-spot is cheapest and takes its machine away, sim-north is sure, and sim-east is dear at first."""
    offers = {
        "sim-north": SimulatedOffer(instance_type="n.l4", gpu="L4", price_per_hour=0.8, capacity=4),
        "sim-east": SimulatedOffer(instance_type="e.l4", gpu="L4", price_per_hour=FIRST_PRICE, capacity=4),
        "sim-spot": SimulatedOffer(instance_type="s.l4", gpu="L4", price_per_hour=0.3, capacity=1, spot=True),
    }
    cut = OfferChange(at=CUT_SECONDS * CLOCK, offer="e.l4", price_per_hour=CUT_PRICE)
    more: dict[str, dict[str, Any]] = {
        "sim-east": {"changes": (cut,)},
        "sim-spot": {"taken_after_seconds": SPOT_SECONDS * CLOCK, "notice_seconds": NOTICE, "reliability": 0.9},
    }
    return SimulatedCloudConfig(
        clock=CLOCK,
        providers=tuple(
            SimulatedProviderConfig(name=name, boot_seconds=BOOT_SECONDS * CLOCK, offers=(offer,), **more.get(name, {}))
            for name, offer in offers.items()
        ),
    )


def write_fleet(config: Path) -> None:
    """The demo's fleet.yaml, which stands beside the home's own."""
    content = {
        "simulated": demo_cloud().model_dump(mode="json", exclude_defaults=True),
        "idle_minutes": 0.1,
        "move_seconds": 2,
    }
    config.write_text(f"# Written by `batch-assets demo-fleet`, which uses no other.\n{yaml.safe_dump(content)}")


def decision_lines(instance: dg.DagsterInstance, dataset: str, since: float) -> list[str]:
    """How many machines of which offers were wanted, and when; moves. Of the events after `since` (Unix seconds)."""
    records = instance.fetch_observations(ledger.rows_key(dataset), limit=1000).records
    lines: list[str] = []
    offers = None
    for record in sorted(records, key=lambda one: one.timestamp):
        seen = record.asset_observation
        if seen is None or record.timestamp < since:
            continue
        told = {name: value.value for name, value in seen.metadata.items()}
        seconds = f"  {record.timestamp - since:4.0f} s  "
        if told.get("decision") == "capacity" and told.get("instances") and told.get("offers") not in (None, offers):
            offers = told["offers"]
            lines.append(f"{seconds}{told['kind']}: {offers}")
        if told.get("decision") == "move":
            saved = told["saved_usd"]
            words = f", which saves {format_usd(saved)} $" if isinstance(saved, float) and saved > 0 else ""
            lines.append(f"{seconds}move from {told['from']} to {told['to']}{words}")
    return lines[:DECISIONS] + (["  …"] if len(lines) > DECISIONS else [])


def machine_lines(instances: Sequence[Instance], costs: Sequence[InstanceCost]) -> list[str]:
    """What was rented, in order, what it did, and how it ended."""
    bills = {one.name: one for one in costs}
    lines = []
    for one in sorted(instances, key=lambda one: -one.age):
        bill = bills[one.name]
        what = f"{one.provider} {one.gpu}{' spot' if one.spot else ''}"
        lines.append(
            f"  {what}: {bill.rows:,} rows for {format_usd(bill.usd.total, fine=True)} $ "
            f"in {duration(bill.seconds.total)}; {(one.reason or one.state).partition('; ')[0]}"
        )
    return lines
