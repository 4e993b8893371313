"""Reading the ledger quickly: the same as Dagster's own reader, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from batch_assets.catalog import ledger
from batch_assets.catalog.catalog_reader import Catalog, current_reports
from resources.objects.opening import open_objects
from resources.store.dataset_store import BatchEntry, BatchFooter, DatasetStore


def footer(key: str, *, generation: int = 0, dead: int = 1, run: str = "run-1") -> BatchFooter:
    return BatchFooter(
        dataset="d",
        key=key,
        snapshot="s1",
        data_version="0123456789abcdef",
        generation=generation,
        epoch=1,
        run_id=run,
        root_run_id=run,
        rows=250,
        ok=250 - dead,
        dead=dead,
        prompt_tokens=1000,
        completion_tokens=2000,
        seconds=4.0,
        model="m",
        engine="e",
    )


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as found:
        yield found


@pytest.fixture
def store(tmp_path: Path) -> DatasetStore:
    return DatasetStore(open_objects(str(tmp_path / "store")), "d")


def report(instance: dg.DagsterInstance, store: DatasetStore, *footers: BatchFooter) -> None:
    for found in footers:
        instance.report_runless_asset_event(ledger.batch_event(store, found, "s1"))


def test_a_report_says_what_the_entry_says(instance: dg.DagsterInstance, store: DatasetStore):
    report(instance, store, footer("00000"), footer("00001"), footer("00001", generation=1, dead=0))
    found = Catalog(instance, "d").reports()
    assert set(found) == {"00000", "00001"}
    newest = found["00001"]
    assert newest.version == ledger.LedgerVersion("0123456789abcdef", 1)
    assert (newest.rows, newest.ok, newest.dead, newest.prompt_tokens, newest.completion_tokens) == (
        250,
        250,
        0,
        1000,
        2000,
    )
    assert newest.author == "run-1"
    assert not newest.fresh  # nobody's run reported it
    assert newest.path is not None
    assert newest.path.endswith("d/batches/00001/0123456789abcdef-g1.parquet")


def test_the_stored_events_read_as_they_are_equal_dagsters_own_reading(
    instance: dg.DagsterInstance, store: DatasetStore, monkeypatch: pytest.MonkeyPatch
):
    report(instance, store, *(footer(f"{i:05d}") for i in range(5)))
    instance.report_runless_asset_event(ledger.empty_event("d", "00009", "s1"))
    quickly = Catalog(instance, "d").reports()
    assert quickly["00009"].rows == 0
    monkeypatch.setattr("batch_assets.catalog.catalog_reader._stored_reports", lambda *_: iter(()))
    assert Catalog(instance, "d").reports() == quickly


def test_what_was_read_is_not_read_again(
    instance: dg.DagsterInstance, store: DatasetStore, monkeypatch: pytest.MonkeyPatch
):
    report(instance, store, *(footer(f"{i:05d}") for i in range(3)))
    catalog = Catalog(instance, "d")
    catalog.reports()
    asked: list[int] = []
    fetch = catalog._fetch
    monkeypatch.setattr(catalog, "_fetch", lambda numbers: asked.extend(numbers) or fetch(numbers))
    report(instance, store, footer("00003"))
    assert len(catalog.reports()) == 4
    assert len(asked) == 1


def test_only_batches_at_the_snapshots_data_version_are_current(instance: dg.DagsterInstance, store: DatasetStore):
    report(instance, store, footer("00000"), footer("00001"))
    entries = [
        BatchEntry("00000", 250, "0123456789abcdef", 0, 0),
        BatchEntry("00001", 250, "f" * 16, 0, 1),
        BatchEntry("00002", 250, "e" * 16, 0, 2),
    ]
    assert set(current_reports(entries, Catalog(instance, "d").reports())) == {"00000"}
