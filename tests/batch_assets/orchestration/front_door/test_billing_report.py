"""The table of billing: adds up to the ledger to the token, and to what the fleet's engines cost."""

from __future__ import annotations

import contextlib
import datetime
import json
from pathlib import Path

import dagster as dg
import polars as pl
import pytest
from support.fleet_databases import Clock, ready

from batch_assets.api.billing.margin import LONGEST_NAME, fleet_name
from batch_assets.api.billing.usage import Kind, UsageKey, Used
from batch_assets.api.billing.usage_ledger import LedgerTotals, UsageLedger
from batch_assets.api.database.service_database import Records
from batch_assets.orchestration.front_door.billing_report import (
    COLUMNS,
    billing_report_sensor,
    signature,
    write_billing,
)
from gpu_runner.fleet_database.accounting.charges import SpendLine
from gpu_runner.fleet_database.database import FleetDatabase
from resources.fleet.resource import GpuFleet
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import BatchStore

NOON = datetime.datetime(2026, 3, 28, 12, tzinfo=datetime.UTC).timestamp()
DAY = datetime.date(2026, 3, 28)


def key(service_class: str, tenant: str = "acme", model: str = "m") -> UsageKey:
    return UsageKey(DAY, tenant, service_class, model, Kind.COMPLETIONS)


def spend(model: str, usd: float, dataset: str | None = None) -> SpendLine:
    return SpendLine(DAY, "p", "L4", 1, False, dataset or fleet_name(model), usd, 0, 0, 0, 1, 1, 1, 1)


def ledger_of(database: str, found: dict[UsageKey, Used]) -> UsageLedger:
    ledger = UsageLedger(Records(database))
    if found:
        ledger.apply("j", 0, 1, found)
    return ledger


def test_the_table_adds_up_and_shares_the_bills_out_by_tokens(tmp_path: Path, local_objects: Objects) -> None:
    found = {
        key("interactive"): Used(requests=2, input_tokens=60, output_tokens=40, amount=5 * 10**12),
        key("batch", "other"): Used(requests=4, input_tokens=200, output_tokens=100, amount=10**12),
        key("batch", "other", "n"): Used(requests=1, unmetered=1),
    }
    bills = [spend("m", 8.0), spend("n", 3.0), spend("", 50.0, "a-dataset")]
    with contextlib.closing(ledger_of(f"sqlite:///{tmp_path}/api.db", found)) as ledger:
        metadata = write_billing(local_objects, ledger.lines(), bills)
    table = pl.read_parquet(local_objects.uri("_platform/billing.parquet"))
    assert table.columns == [name for name, _, _ in COLUMNS]
    assert table["input_tokens"].sum() == 260 and table["output_tokens"].sum() == 140
    assert table["requests"].sum() == metadata["requests"] == 7
    assert table["gpu_usd"].sum() == pytest.approx(11.0), "a dataset's own bill is not the front door's"
    shares = {(row["class"], row["model"]): row["gpu_usd"] for row in table.iter_rows(named=True)}
    assert shares == {("interactive", "m"): 2.0, ("batch", "m"): 6.0, ("batch", "n"): 0.0, ("unused", "n"): 3.0}
    assert metadata["margin_usd"] == pytest.approx(6.0 - 11.0)
    assert "| interactive | 2 | 60 | 40 | 5.0000 | 2.0000 | 3.0000 |" in metadata["classes"].md_str


def test_before_anything_was_used_the_table_is_empty(local_objects: Objects) -> None:
    metadata = write_billing(local_objects, [], [])
    assert metadata["dagster/row_count"] == 0 and "Nothing was used" in metadata["classes"].md_str


def test_a_long_name_of_a_model_is_still_one_name_in_the_fleet() -> None:
    names = {fleet_name("a" * 200), fleet_name("a" * 201), fleet_name("a")}
    assert len(names) == 3 and all(len(name) <= LONGEST_NAME for name in names)


def test_the_sensor_writes_when_something_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(NOON)
    monkeypatch.setenv("BATCH_ASSETS_API_DB", database := f"sqlite:///{tmp_path}/api.db")
    fleet = GpuFleet(database="", home=str(tmp_path), config_path=str(tmp_path / "fleet.yaml"))
    store = BatchStore(root=str(tmp_path / "store"))
    cursor: str | None = None
    with (
        contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db", now=clock)) as fleet_db,
        dg.DagsterInstance.ephemeral() as instance,
    ):
        monkeypatch.setattr(GpuFleet, "open_database", lambda self: contextlib.nullcontext(fleet_db))

        def written() -> bool:
            nonlocal cursor
            resources = {"store": store, "fleet": fleet}
            with dg.build_sensor_context(instance, cursor=cursor, resources=resources) as context:
                found = billing_report_sensor.evaluate_tick(context)
            cursor = found.cursor
            assert found.run_requests == []
            return bool(found.asset_events)

        assert not written() and not (tmp_path / "api.db").exists()
        with contextlib.closing(ledger_of(database, {})) as ledger:
            assert not written()
            ready(fleet_db, dataset=fleet_name("m"), ttl=1e6)
            clock.forward(60)
            assert written() and not written()
            ledger.apply("j", 0, 1, {key("interactive"): Used(requests=1, input_tokens=5, output_tokens=1, amount=7)})
            assert written()
            with monkeypatch.context() as patched:  # lines are read only where there is something to write
                patched.delattr(UsageLedger, "lines")
                assert not written()
            clock.forward(86_400)
            assert written()
            table = pl.read_parquet(open_objects(store.root).uri("_platform/billing.parquet"))
            assert table["charged_usd"].sum() == pytest.approx(7e-12) and table["gpu_usd"].sum() > 0
            cursor = "nonsense"
            assert written() and json.loads(cursor)["tokens"] == 6
            assert signature(LedgerTotals(), []) == {"requests": 0, "tokens": 0, "amount": 0, "day": 1, "gpu_usd": 0}
