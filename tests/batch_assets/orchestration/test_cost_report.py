"""What everything cost, as a table in the store and as numbers in the catalog."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
import sqlalchemy as sa
from dagster._core.definitions.sensor_definition import SensorExecutionData
from support.fleet_databases import OFFER, Clock, intended, ready

from batch_assets.definitions import platform
from batch_assets.orchestration.cost_report import (
    COLUMNS,
    FOLDER,
    SPEND_KEY,
    Written,
    cost_report_sensor,
    datasets_markdown,
    write_spend,
)
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import load_spec
from gpu_runner.fleet_database.accounting.charges import SpendLine, by_day
from gpu_runner.fleet_database.connection import INSTANCES
from gpu_runner.fleet_database.database import FleetDatabase, LeaseUsage
from resources.fleet.resource import GpuFleet
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import BatchStore

CENT = 0.06  # US dollars of a real second: 3.6 an hour at a clock of 60
NOON = datetime.datetime(2026, 3, 28, 12, tzinfo=datetime.UTC).timestamp()


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON)


@pytest.fixture
def fleet_db(tmp_path: Path, clock: Clock) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db", now=clock)) as fleet_db:
        yield fleet_db


def table(objects: Objects) -> pl.DataFrame:
    """As a reader sees it."""
    return pl.read_parquet(objects.uri("_platform/spend/*.parquet"), storage_options=objects.storage_options())


@pytest.mark.slow
def test_the_table_has_a_line_per_day_gpu_and_dataset_and_numbers_for_plots(
    fleet_db: FleetDatabase, clock: Clock, any_objects: Objects
):
    lease = ready(fleet_db, dataset="sums", ttl=1e6)
    clock.forward(100)
    assert fleet_db.renew(lease, 1e6, LeaseUsage(80, 5, 2000, 10_000, 30_000))
    clock.forward(12 * 3600)
    found = write_spend(any_objects, fleet_db)
    assert found["usd_total"] == pytest.approx(43_300 * CENT)
    assert found["usd_today"] == pytest.approx(100 * CENT)  # what came after midnight
    assert [found[name] for name in ("useful_usd", "booting_usd", "wasted_usd")] == pytest.approx(
        [80 * CENT, 0, 5 * CENT]
    )
    assert (found["rows"], found["tokens"], found["instances"], found["dagster/row_count"]) == (2000, 40_000, 1, 2)
    assert found["usd_per_1k_rows"] == pytest.approx(43_300 * CENT / 2)
    assert found["usd_per_million_tokens"] == pytest.approx(43_300 * CENT / 0.04)
    lines = table(any_objects)
    assert lines.columns == [name for name, _, _ in COLUMNS]
    assert lines["day"].to_list() == [datetime.date(2026, 3, 28), datetime.date(2026, 3, 29)]
    assert lines["usd"].sum() == pytest.approx(found["usd_total"])
    assert set(lines["dataset"]) == {"sums"}
    assert set(lines["fleet"]) == {fleet_db.tag().rstrip("-")}


def test_a_new_table_replaces_the_old_one_but_not_that_of_another_fleet(
    fleet_db: FleetDatabase, clock: Clock, tmp_path: Path, local_objects: Objects
):
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/lost.db", now=clock)) as lost:
        ready(lost, dataset="before")
        clock.forward(10)
        write_spend(local_objects, lost)
    ready(fleet_db, dataset="sums")
    for _ in range(3):
        clock.forward(7)
        write_spend(local_objects, fleet_db)
    usd = dict(table(local_objects).select("dataset", "usd").iter_rows())
    assert usd == {"before": pytest.approx(10 * CENT), "sums": pytest.approx(21 * CENT)}


def test_before_anything_was_rented_the_table_is_empty_and_says_so(fleet_db: FleetDatabase, local_objects: Objects):
    found = write_spend(local_objects, fleet_db)
    assert (found["usd_total"], found["dagster/row_count"], table(local_objects).height) == (0, 0, 0)
    assert "usd_per_1k_rows" not in found
    assert "Nothing was rented" in found["datasets"].md_str
    # Dagster's UI has `dagster/column_schema` in a section above all figures.
    assert next(iter(found)) == "datasets" and "columns" in found and "dagster/column_schema" not in found


def test_the_dearest_dataset_comes_first_in_the_overview():
    day = datetime.date(2026, 3, 28)
    lines = [
        SpendLine(day, "p", "L4", 1, False, "small", 1.0, 0.25, 0.0, 0.0, 0, 0, 0, 1),
        SpendLine(day, "p", "L4", 1, False, "large", 90.0, 5.0, 3.0, 2.0, 50_000, 10**6, 10**6, 2),
        SpendLine(day - datetime.timedelta(days=1), "p", "L4", 1, False, "large", 100.0, 0, 0, 0, 50_000, 0, 0, 1),
    ]
    _, _, *rows = datasets_markdown(lines, day).splitlines()
    assert rows == [
        "| large | 100.00 | 200.00 | 95% | 2.0000 | 100.00 | 100,000 |",
        "| small | 1.2500 | 1.2500 | 80% | – | – | 0 |",
    ]


def test_no_dataset_can_take_the_folder_of_the_platform():
    folder = FOLDER.partition("/")[0]
    spec = {"name": folder, "source": {"grid": {"q": ["a"]}}, "prompt": {"user": "{{ q }}"}, "model": "m"}
    with pytest.raises(SpecError, match=f"found '{folder}'"):
        load_spec(spec, "d")


# the sensor


@dataclass
class CostedFleet:
    """The sensor's fleet, store and cursor. No daemon runs."""

    instance: dg.DagsterInstance
    fleet_db: FleetDatabase
    clock: Clock
    objects: Objects
    resources: dict[str, Any]
    cursor: str | None = None

    def tick(self) -> SensorExecutionData:
        with dg.build_sensor_context(self.instance, cursor=self.cursor, resources=self.resources) as context:
            found = cost_report_sensor.evaluate_tick(context)
        self.cursor = found.cursor
        return found

    def written(self, seconds: float = 0) -> bool:
        """Whether the sensor wrote the table after so many seconds more."""
        self.clock.forward(seconds)
        found = self.tick()
        assert found.run_requests == []
        return bool(found.asset_events)


@pytest.fixture
def site(
    tmp_path: Path, fleet_db: FleetDatabase, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CostedFleet]:
    fleet = GpuFleet(database="", home=str(tmp_path), config_path=str(tmp_path / "fleet.yaml"))
    monkeypatch.setattr(GpuFleet, "open_database", lambda self: contextlib.nullcontext(fleet_db))
    store = BatchStore(root=str(tmp_path / "store"))
    with dg.DagsterInstance.ephemeral() as instance:
        yield CostedFleet(instance, fleet_db, clock, open_objects(store.root), {"store": store, "fleet": fleet})


def test_the_sensor_writes_while_something_is_rented_and_once_when_all_has_ended(site: CostedFleet):
    assert not site.written(60)  # nothing was ever spent
    lease = ready(site.fleet_db, ttl=1e6)
    assert site.written(60)
    assert not site.written(60)
    assert not site.written(780)
    assert site.written(60)
    site.fleet_db.give_up(lease, "done")
    assert not site.written(30)  # it still ends, and is billed
    site.fleet_db.ended("ba-1", 0)
    assert site.written(60)
    assert not any(site.written(900) for _ in range(5))


def test_the_last_event_holds_the_final_bill(site: CostedFleet):
    lease = ready(site.fleet_db, ttl=1e6)
    assert site.written(10)
    site.clock.forward(25)
    site.fleet_db.give_up(lease, "done")
    site.fleet_db.ended("ba-1", 5)  # the provider closed the bill 5 s ago
    assert not site.written()
    site.clock.forward(60)
    (event,) = site.tick().asset_events
    assert isinstance(event, dg.AssetMaterialization)
    assert event.asset_key == SPEND_KEY
    assert event.metadata["usd_total"].value == pytest.approx(30 * CENT)
    assert table(site.objects)["usd"].sum() == pytest.approx(30 * CENT)


@pytest.mark.slow
@pytest.mark.parametrize("cursor", [None, "", "{}", "[1]", "nonsense", '{"at": "x", "seconds": 1}'])
def test_a_lost_or_broken_cursor_costs_one_more_event(site: CostedFleet, cursor: str | None):
    ready(site.fleet_db, ttl=1e6)
    assert site.written(60)
    site.cursor = cursor
    assert site.written(60)
    assert not site.written(60)


def test_a_cursor_of_the_future_or_of_another_book_does_not_stop_the_table(site: CostedFleet):
    ready(site.fleet_db, ttl=1e6)
    site.cursor = json.dumps({"at": NOON + 1e6, "seconds": 9e9})
    assert site.written(60)
    assert Written.parse(site.cursor) == Written(NOON + 60, 60)


def test_the_asset_can_be_materialized_by_hand_and_the_platform_has_it(site: CostedFleet):
    defined = platform()
    assert "cost_report" in [sensor.name for sensor in defined.sensors or ()]
    made = [asset for asset in defined.assets or () if isinstance(asset, dg.AssetsDefinition)]
    (spend,) = [asset for asset in made if asset.key == dg.AssetKey(["platform", "spend"])]
    intended(site.fleet_db, offer=OFFER)
    site.clock.forward(10)
    result = dg.materialize([spend], instance=site.instance, resources=site.resources)
    (event,) = result.asset_materializations_for_node("platform__spend")
    assert event.metadata["usd_total"].value == pytest.approx(10 * CENT)
    assert event.metadata["usd_total"].value == pytest.approx(sum(line.usd for line in by_day(site.fleet_db.charges())))


def test_dollars_of_simulated_providers_are_said_to_be_simulated(site: CostedFleet):
    ready(site.fleet_db, "ba-real", dataset="real", ttl=1e6)
    with site.fleet_db.engine.begin() as connection:
        connection.execute(sa.update(INSTANCES).values(provider="lab", clock=1.0))
    ready(site.fleet_db, ttl=1e6)
    site.clock.forward(10)
    (event,) = site.tick().asset_events
    simulated, total = (event.metadata[name].value for name in ("usd_simulated", "usd_total"))
    assert simulated == pytest.approx(10 * CENT) and total > simulated
    assert str(event.metadata["datasets"].value).endswith("\n\n0.6000 $ of it simulated, paid by nobody.")
