"""Reports that one process keeps for the next are those that are read anew, whatever happened in between."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa

from batch_assets.catalog import catalog_reader, kept_reports, ledger
from batch_assets.catalog.catalog_reader import Catalog
from batch_assets.catalog.kept_reports import BatchReport, KeptReports
from batch_assets.dagster_internals import SqlEventLogStorage
from batch_assets.dagster_internals import SqlEventLogStorageTable as EVENTS
from batch_assets.dagster_internals.event_batches import report_together
from batch_assets.tags import DATA_VERSION_TAG

ROWS = ledger.rows_key("d")
KEYS = [f"{number:05}" for number in range(12)]


@pytest.fixture
def instance(stored_instance: dg.DagsterInstance) -> dg.DagsterInstance:
    return stored_instance


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Written after three entries that are read anew."""
    monkeypatch.setattr(catalog_reader, "LEAST", 3)
    return tmp_path / "catalog_cache" / "d.json"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many events each fetch read, from now on."""
    seen: list[int] = []
    fetch = Catalog.fetch

    def counted(self: Catalog, numbers: Sequence[int]) -> dict[int, BatchReport]:
        seen.append(len(numbers))
        return fetch(self, numbers)

    monkeypatch.setattr(Catalog, "fetch", counted)
    return seen


def made(key: str, rows: int, *, version: int = 1) -> dg.AssetMaterialization:
    about = {"rows": rows, "ok": rows, "bytes": 10 * rows, "model": "m", "object": f"d/{key}", "sha256": "a" * 64}
    return dg.AssetMaterialization(ROWS, partition=key, metadata=about, tags={DATA_VERSION_TAG: f"{version:016x}"})


def read(instance: dg.DagsterInstance, file: Path) -> dict[str, BatchReport]:
    """What a new process reads."""
    ledger._REMEMBERED.pop(instance, None)
    ledger.remember_entries(instance)
    return Catalog(instance, "d", file).reports()


def anew(instance: dg.DagsterInstance) -> dict[str, BatchReport]:
    """What a process reads that keeps nothing."""
    ledger._REMEMBERED.pop(instance, None)
    return Catalog(instance, "d").reports()


def test_the_next_process_reads_only_what_is_new(instance: dg.DagsterInstance, file: Path, fetched: list[int]):
    report_together(instance, (made(key, 250) for key in KEYS[:10]))
    first = read(instance, file)
    assert read(instance, file) == first
    report_together(instance, [made(KEYS[0], 100), made(KEYS[11], 1)])
    assert read(instance, file) == anew(instance)
    assert fetched == [10, 0, 2, 11]
    assert file.stat().st_mode & 0o077 == 0 or file.parent.stat().st_mode & 0o077 == 0


def test_what_is_new_is_kept_too_once_it_is_much(instance: dg.DagsterInstance, file: Path, fetched: list[int]):
    report_together(instance, (made(key, 250) for key in KEYS[:5]))
    read(instance, file)
    report_together(instance, [made(KEYS[4], 9), *(made(key, 250) for key in KEYS[5:8])])
    for _ in range(2):
        found = read(instance, file)
    assert (len(found), found[KEYS[4]].rows) == (8, 9)
    assert fetched == [5, 4, 0]


def test_few_entries_are_not_kept(instance: dg.DagsterInstance, file: Path):
    report_together(instance, (made(key, 250) for key in KEYS[:2]))
    assert len(read(instance, file)) == 2
    assert not file.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"format": 0, "names": []}', b"\xff", None])
def test_a_file_that_cannot_be_used_is_none(
    instance: dg.DagsterInstance, file: Path, fetched: list[int], content: bytes | None
):
    report_together(instance, (made(key, 250) for key in KEYS[:5]))
    first = read(instance, file)
    file.write_bytes(file.read_bytes()[:-20] if content is None else content)
    assert KeptReports.load(file) is None
    assert read(instance, file) == first
    assert fetched == [5, 5]


def test_where_it_cannot_be_written_nothing_is_kept(instance: dg.DagsterInstance, file: Path):
    file.parent.write_text("no folder")
    report_together(instance, (made(key, 250) for key in KEYS[:5]))
    assert read(instance, file) == anew(instance)


def test_a_file_of_another_past_is_not_believed(instance: dg.DagsterInstance, file: Path):
    """The last event is deleted, and on SQLite its id is given again: to an entry of the same batch and version."""
    report_together(instance, (made(key, 250) for key in KEYS[:5]))
    read(instance, file)
    delete(instance, 1)
    report_together(instance, [made(KEYS[4], 7)])
    assert read(instance, file)[KEYS[4]].rows == 7


def delete(instance: dg.DagsterInstance, count: int) -> None:
    """The newest events are gone, as after a restore."""
    storage = instance.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    with storage.index_connection() as connection:
        for number in connection.scalars(sa.select(EVENTS.c.id).order_by(EVENTS.c.id.desc()).limit(count)).all():
            connection.execute(EVENTS.delete().where(EVENTS.c.id == number))
        if connection.in_transaction():
            connection.commit()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak("losses")) for seed in range(1, 3))])
def test_whatever_happens_in_between_what_is_kept_is_what_is_there(instance: dg.DagsterInstance, file: Path, seed: int):
    rng = random.Random(seed)
    for _ in range(25):
        kind = rng.choice(["report", "report", "void", "delete", "foreign"])
        if kind == "delete":
            delete(instance, rng.randint(1, 3))
        elif kind == "foreign":
            instance.report_runless_asset_event(dg.AssetMaterialization(ROWS, partition=rng.choice(KEYS)))
        elif kind == "void":
            version = ledger.LedgerVersion(f"{rng.randint(1, 2):016x}", 0)
            event = ledger.void_event("d", rng.choice(KEYS), version, "s", "gone", None)
            instance.report_runless_asset_event(event)
        else:
            keys = rng.sample(KEYS, rng.randint(1, 6))
            report_together(instance, (made(key, rng.randint(1, 9), version=rng.randint(1, 2)) for key in keys))
        assert read(instance, file) == anew(instance)


def test_all_fields_of_a_report_are_kept():
    assert set(kept_reports.NAMES) | {"version"} == set(BatchReport.__dataclass_fields__)
