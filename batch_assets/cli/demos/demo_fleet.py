"""`batch-assets demo-fleet`: the 5,000 rows of `example` on a simulated market, by a deadline.

Three providers compete. The cheapest machine is a spot one, and it is taken away in the middle of the work. Machines,
prices and texts are simulated; the rest (leases, the plan, the move, the bill, the table) is as it is anywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from batch_assets.cli.demos.demo import EXAMPLE, SAMPLE_ROWS, Demo, generate, say
from batch_assets.durations import duration
from batch_assets.local_dagster.home import StackError, prepare_home, running_stack
from batch_assets.local_dagster.local_fleet import the_fleet
from batch_assets.planning.clock_scale import scale_words
from batch_assets.tags import DEADLINE_TAG
from gpu_runner.fleet.accounting.bill_split import InstanceCost
from gpu_runner.fleet.database import Instance
from gpu_runner.money import format_usd
from gpu_runner.providers.simulated.config import SimulatedCloudConfig
from gpu_runner.providers.simulated.default import default_cloud
from resources.fleet.config import ENDPOINT_VARIABLE

MODEL = "Qwen/Qwen3-8B"  # long enough to write for a machine to be lost in the middle
CLOCK = 4.0
DEADLINE, DEADLINE_SECONDS = "30m", 1800.0
# Real seconds that a spot machine works until it is taken away, and of these the notice.
SPOT_SECONDS, NOTICE = 15.0, 4.0


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
    os.environ.setdefault("BATCH_ASSETS_CAPACITY_SECONDS", "5")
    os.environ.pop(ENDPOINT_VARIABLE, None)
    cloud = demo_cloud()
    say(
        f"Engines: simulated ones, of three providers; their machines, prices and texts are invented ({config})",
        f"{scale_words({one.name: cloud.clock for one in cloud.providers})}",
        f"Deadline: {DEADLINE} from now, in real time. A spot machine is taken away after {SPOT_SECONDS:g} s of work",
    )
    demo = Demo(EXAMPLE, ("topic", "audience", "format"), SAMPLE_ROWS, "", MODEL)
    status = generate(demo, began, {DEADLINE_TAG: DEADLINE})
    if status == 0:
        with the_fleet().open_database() as fleet_db:
            left = DEADLINE_SECONDS - (time.monotonic() - began)
            say(
                "",
                f"Deadline: {'kept with' if left >= 0 else 'missed by'} {duration(abs(left))}{' left' * (left >= 0)}",
            )
            say("Machines, with their real time:", *machine_lines(fleet_db.fleet(ended=True), fleet_db.costs()))
    return status


def demo_cloud() -> SimulatedCloudConfig:
    """The embedded providers on a slower clock, their spot machines taken away again and again."""
    cloud = default_cloud(clock=CLOCK)
    taken = {"boot_seconds": 120.0, "taken_after_seconds": SPOT_SECONDS * CLOCK, "notice_seconds": NOTICE}
    spot = [one.model_copy(update=taken) for one in cloud.providers[2:]]
    return cloud.model_copy(update={"providers": (*cloud.providers[:2], *spot)})


def write_fleet(config: Path) -> None:
    """The demo's fleet.yaml, which stands beside the home's own."""
    content = {
        "simulated": demo_cloud().model_dump(mode="json", exclude_defaults=True),
        "idle_minutes": 0.1,
        "move_seconds": 2,
    }
    config.write_text(f"# Written by `batch-assets demo-fleet`, which uses no other.\n{yaml.safe_dump(content)}")


def machine_lines(instances: Sequence[Instance], costs: Sequence[InstanceCost]) -> list[str]:
    """What was rented, in order, what it did, and how it ended."""
    bills = {one.name: one for one in costs}
    lines = []
    for one in sorted(instances, key=lambda one: -one.age):
        bill = bills[one.name]
        what = f"{one.provider} {one.gpu}{' spot' if one.spot else ''}"
        lines.append(
            f"  {what}: {bill.rows:,} rows for {format_usd(bill.usd.total, fine=True)} $ "
            f"in {duration(bill.seconds.total)}; {one.reason or one.state}"
        )
    return lines
