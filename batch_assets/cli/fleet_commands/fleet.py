"""What `batch-assets fleet` prints: instances, who leases them, and what everything cost; and `fleet down`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from batch_assets.capacity_planning.clock_scale import scale_words
from batch_assets.cli.output import output_console, print_json
from batch_assets.durations import duration
from batch_assets.local_dagster.local_fleet import the_fleet
from gpu_runner.fleet_database.accounting.bill_split import InstanceCost, Split
from gpu_runner.fleet_database.database import FleetDatabase, Instance
from gpu_runner.money import format_usd

PARTS = ("useful", "booting", "idle", "wasted")


@dataclass(frozen=True, slots=True)
class CostLine:
    """The bills of all instances of one provider's instance type, together."""

    provider: str
    instance_type: str
    gpu: str
    spot: bool
    instances: int
    rows: int
    usd: Split

    @property
    def usd_per_1k_rows(self) -> float | None:
        """US dollars per thousand rows, everything included; None without a row."""
        return self.usd.total / self.rows * 1000 if self.rows else None


def cost_lines(costs: Sequence[InstanceCost]) -> list[CostLine]:
    """Costs by provider and instance type, the dearest first."""
    groups: dict[tuple[str, str, str, bool], list[InstanceCost]] = {}
    for cost in costs:
        key = (cost.provider, cost.instance_type, _hardware(cost), cost.spot)
        groups.setdefault(key, []).append(cost)
    lines = [
        CostLine(*key, len(group), sum(cost.rows for cost in group), _total([cost.usd for cost in group]))
        for key, group in groups.items()
    ]
    return sorted(lines, key=lambda line: -line.usd.total)


def _hardware(cost: InstanceCost) -> str:
    return "by the token" if cost.by_tokens is not None else f"{cost.gpus}x {cost.gpu}"


def _total(parts: Sequence[Split]) -> Split:
    return Split(**{name: sum(getattr(part, name) for part in parts) for name in PARTS})


def cost_table(costs: Sequence[InstanceCost]) -> Table:
    """Per provider and GPU: rows, US dollars, US dollars per thousand rows, and what was not useful."""
    table = Table("provider", "GPU", "n", "rows", "$", "$/1k rows", "boot", "idle", "wasted", box=SIMPLE_HEAD)
    for column in table.columns[2:]:
        column.justify = "right"
    lines = cost_lines(costs)
    for line in lines:
        table.add_row(line.provider, line.gpu + (" spot" if line.spot else ""), str(line.instances), *_figures(line))
    if len(lines) > 1:
        whole = CostLine(
            "all", "", "", False, len(costs), sum(line.rows for line in lines), _total([x.usd for x in lines])
        )
        table.add_section()
        table.add_row("all", "", str(len(costs)), *_figures(whole))
    return table


def _figures(line: CostLine) -> list[str]:
    each = line.usd_per_1k_rows
    return [
        f"{line.rows:,}",
        _usd(line.usd.total),
        "–" if each is None else _usd(each),
        *(_usd(getattr(line.usd, name)) for name in ("booting", "idle", "wasted")),
    ]


def _usd(amount: float) -> str:
    return format_usd(amount, fine=True)


def instance_table(instances: Sequence[Instance]) -> Table:
    """What is rented now."""
    table = Table(
        "instance", "provider", "type", "GPU", "model", "state", "leased by", "age", "$/h", "$", box=SIMPLE_HEAD
    )
    for column in table.columns[7:]:
        column.justify = "right"
    for one in instances:
        table.add_row(
            one.name,
            one.provider + (f" {one.region}" if one.region else ""),
            one.instance_type + (" spot" if one.spot else ""),
            f"{one.gpus}x {one.gpu}",
            one.model,
            _state(one),
            _holder(one),
            duration(one.age),
            _usd(one.price_per_hour),
            _usd(one.usd),
        )
    return table


def _state(one: Instance) -> str:
    if one.notice_seconds is not None:
        return f"{one.state}, taken away in {max(0.0, one.notice_seconds):.0f} s"
    if one.state == "ready" and one.idle_seconds is not None:
        return f"idle for {duration(one.idle_seconds)}"
    return f"{one.state}: {one.reason}" if one.state == "ending" and one.reason else one.state


def _holder(one: Instance) -> str:
    held = [*([one.lease] if one.lease else []), *one.draining]
    return ", ".join(f"{lease.dataset} run {lease.run_id[:8]} (epoch {lease.epoch})" for lease in held) or "–"


def instance_json(one: Instance) -> dict[str, Any]:
    """Stable keys of one instance."""
    return {
        "name": one.name,
        "provider": one.provider,
        "region": one.region,
        "instance_type": one.instance_type,
        "gpu": one.gpu,
        "gpus": one.gpus,
        "spot": one.spot,
        "model": one.model,
        "state": one.state,
        "reason": one.reason,
        "run": one.lease.run_id if one.lease else None,
        "dataset": one.lease.dataset if one.lease else None,
        "epoch": one.epoch,
        "draining_runs": [lease.run_id for lease in one.draining],
        "age_seconds": round(one.age, 3),
        "lease_seconds": None if one.lease_age is None else round(one.lease_age, 3),
        "idle_seconds": None if one.idle_seconds is None else round(one.idle_seconds, 3),
        "notice_seconds": None if one.notice_seconds is None else round(one.notice_seconds, 3),
        "usd_per_hour": one.price_per_hour,
        "usd": one.usd,
    }


def cost_json(line: CostLine) -> dict[str, Any]:
    """Stable keys of one line of the bill."""
    return {
        "provider": line.provider,
        "instance_type": line.instance_type,
        "gpu": line.gpu,
        "spot": line.spot,
        "instances": line.instances,
        "rows": line.rows,
        "usd": line.usd.total,
        "usd_per_1k_rows": line.usd_per_1k_rows,
        **{f"{name}_usd": getattr(line.usd, name) for name in PARTS},
    }


def show_fleet(*, as_json: bool) -> None:
    """Print what is rented now and what everything cost so far."""
    fleet = the_fleet()
    with fleet.open_database() as fleet_db:
        instances, costs = fleet_db.fleet(), fleet_db.costs()
        played = fleet.simulated_providers(fleet_db)
    simulated = sum(cost.usd.total for cost in costs if cost.provider in played)
    if as_json:
        lines = [cost_json(line) for line in cost_lines(costs)]
        usd = _total([cost.usd for cost in costs])
        total = {"usd": usd.total, **{f"{name}_usd": getattr(usd, name) for name in PARTS}}
        total["simulated_usd"] = simulated
        told = {"costs": lines, "total": total, "clocks": _clocks(instances, costs)}
        print_json({"instances": [instance_json(one) for one in instances], **told})
        return
    console = output_console()
    console.print(instance_table(instances) if instances else "Nothing is rented now.")
    if costs:
        console.print(cost_table(costs))
    if simulated:
        console.print(f"{format_usd(simulated, fine=True)} $ of it simulated, paid by nobody", highlight=False)
    _print_scale(console, instances, costs)


def _clocks(instances: Sequence[Instance], costs: Sequence[InstanceCost]) -> dict[str, float]:
    """Simulated seconds per real second of every provider that is shown."""
    return {cost.provider: cost.clock for cost in costs} | {one.provider: one.clock for one in instances}


def _print_scale(console: Console, instances: Sequence[Instance], costs: Sequence[InstanceCost]) -> None:
    if scale := scale_words(_clocks(instances, costs)):
        console.print(scale, highlight=False)


def end_fleet(*, force: bool) -> int:
    """End every instance. Refused while runs are under way unless forced: they would rent anew. Exit status."""
    fleet = the_fleet()
    with fleet.open_database() as fleet_db:
        runs = [beat for beat in fleet_db.runs() if beat.age <= 2 * fleet.ttl]
        if runs and not force:
            sys.stderr.write(
                f"{len(runs)} runs are under way and would rent anew: cancel them in the UI first, or use --force\n"
            )
            return 1
        said, left = fleet.down(fleet_db)
    sys.stdout.write("".join(f"{sentence}\n" for sentence in said) or "Nothing was rented.\n")
    for name in left:
        sys.stderr.write(f"{name} could not be ended: look at its provider; the reaper goes on trying\n")
    return 1 if left else 0


def print_costs(fleet_db: FleetDatabase) -> None:
    """The bill, for the end of a demo."""
    if costs := fleet_db.costs():
        output_console().print(cost_table(costs))
        _print_scale(output_console(), (), costs)
