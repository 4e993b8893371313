"""A batch with a short window: the service rents what the window needs, keeps it, and falls back to what it had."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
import yaml
from support.api_service import api_service, line
from support.timing import PATIENCE

from batch_assets.api import service
from batch_assets.api.capacity import capacity
from batch_assets.api.execution import model_feed
from batch_assets.local_dagster.local_fleet import fleet_of
from batch_assets.settings import fleet_database
from gpu_runner.cost_meter import LeaseUsage
from gpu_runner.fleet_database.connection import INSTANCES, LEASES
from gpu_runner.fleet_database.database import FleetDatabase
from resources.fleet.resource import GpuFleet

pytestmark = [pytest.mark.soak("deadline"), pytest.mark.timeout(600)]

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
NAME = f"api/{MODEL}"
LINES = 2_000
KNOWN_SPEED = 2_000  # tokens a second; an instance does a quarter more, if the machine has time for it
IDLE_SECONDS = 2.0


def write_fleet(home: Path) -> None:
    """One kind of instance, that answers with 512 tokens."""
    offer = {"instance_type": "one.l40s", "gpu": "L40S", "price_per_hour": 0.6, "capacity": 6}
    provider = {"name": "sim-one", "boot_seconds": 3.0, "offers": [offer]}
    simulated = {"clock": 1.0, "arguments": ["--output-tokens", "fixed:512"], "providers": [provider]}
    fleet = {"simulated": simulated, "idle_minutes": 0.05, "max_instances": 6}
    (home / "fleet.yaml").write_text(yaml.safe_dump(fleet))


def know_speed(fleet: GpuFleet, fleet_db: FleetDatabase) -> None:
    """An instance that has ended did lines like these for ten hours."""
    ((offer,),) = [provider.offers() for provider in fleet.providers(fleet.config()).values()]
    lease = fleet_db.intend(
        "earlier", offer, clock=1.0, engine_key="key", model=MODEL, run_id="earlier", dataset=NAME, ttl=60, limit=None
    )
    assert lease is not None and fleet_db.created(lease, "earlier")
    assert fleet_db.ready(lease, "http://127.0.0.1:1", 256)
    rows = 36_000 * KNOWN_SPEED // 522
    fleet_db.renew(lease, 60, LeaseUsage(36_000, 0.0, rows, 10 * rows, 512 * rows))
    fleet_db.release(lease)
    with fleet_db.engine.begin() as connection:
        then = {name: INSTANCES.c[name] - 36_100 for name in ("created_at", "ready_at")}
        connection.execute(sa.update(INSTANCES).values(**then, state="ended", ended_at=INSTANCES.c.created_at))
        connection.execute(sa.update(LEASES).values(acquired_at=LEASES.c.acquired_at - 36_100))


def of_model(fleet_db: FleetDatabase) -> int:
    return sum(one.leased and one.works_for == NAME for one in fleet_db.fleet())


async def until(true: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds * PATIENCE):
        while not true():  # noqa: ASYNC110  (another thread's work)
            await asyncio.sleep(0.2)


@pytest.mark.parametrize(("known", "window"), [(True, 150), (False, 130)])  # the second one needs both cores
def test_a_short_window_rents_three_instances_and_gives_them_back(
    known: bool, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds. By what is known of its speed one instance takes more than twice as long; or nobody has measured it."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("BATCH_ASSETS_CAPACITY_SECONDS", "4")
    monkeypatch.setattr(service, "declared_specs", lambda: {"d": SimpleNamespace(model=MODEL)})
    monkeypatch.setattr(capacity, "IDLE_SECONDS", IDLE_SECONDS)
    monkeypatch.setattr(model_feed, "IDLE_SECONDS", IDLE_SECONDS)
    write_fleet(tmp_path)
    fleet = fleet_of(tmp_path, fleet_database())

    async def steps(fleet_db: FleetDatabase) -> None:
        lines = [line(str(number), model=MODEL, max_tokens=1024) for number in range(LINES)]
        async with api_service(tmp_path, None) as site:
            began = time.monotonic()
            batch = await site.create(lines, window=f"{window}s")
            await until(lambda: of_model(fleet_db) >= 3, 60)
            target = fleet_db.target(NAME)
            assert target is not None and target.plan is not None and target.plan.reason
            async with asyncio.timeout((window + 30) * PATIENCE):
                while (found := await site.get(batch["id"]))["status"] not in ("completed", "expired"):  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
            assert (found["status"], found["request_counts"]["completed"]) == ("completed", LINES), found
            print(f"completed in {time.monotonic() - began:.0f} s of {window}")
            out, errors = await site.results(found)
            assert sorted(int(one["custom_id"]) for one in out) == list(range(LINES)) and not errors

            def swept() -> bool:
                fleet.sweep(fleet_db)
                return not fleet_db.fleet()

            def over() -> bool:
                target = fleet_db.target(NAME)
                return target is not None and (target.request, target.instances) == ("", 1)

            await until(swept, 60)
            await until(over, 60)  # a look may have been under way when the batch ended

    with fleet.open_database() as fleet_db:
        try:
            if known:
                know_speed(fleet, fleet_db)
            asyncio.run(steps(fleet_db))
        finally:
            with contextlib.suppress(Exception):
                fleet.down(fleet_db)
