"""Entries that are remembered are those that are read anew, whatever happens to the event log in between.

What is leant on is private to Dagster: when it changes, these tests fail.
"""

from __future__ import annotations

import random
from typing import Any

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.test_utils import create_run_for_test
from support.fleet_databases import Clock

from batch_assets.catalog import ledger
from batch_assets.catalog.ledger import RememberedEntries
from batch_assets.dagster_internals import SqlEventLogStorage
from batch_assets.dagster_internals import SqlEventLogStorageTable as EVENTS
from batch_assets.dagster_internals.event_batches import report_together
from batch_assets.tags import DATA_VERSION_TAG

ROWS = ledger.rows_key("d")
KEYS = [f"{number:05}" for number in range(12)]


@pytest.fixture
def instance(stored_instance: dg.DagsterInstance) -> dg.DagsterInstance:
    return stored_instance


def ours(key: str, number: int) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(ROWS, partition=key, tags={DATA_VERSION_TAG: f"{number:016x}"})


def full_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Datasets whose entries are all read, from now on."""
    seen: list[str] = []
    read_all, read = ledger._all_entries, RememberedEntries._events

    def counted(instance: dg.DagsterInstance, dataset: str) -> dict[str, tuple[int, ledger.LedgerVersion]]:
        seen.append(dataset)
        return read_all(instance, dataset)

    def events(self: RememberedEntries, storage: SqlEventLogStorage, after: int, upto: int) -> list[ledger._Event]:
        if not after:
            seen.append(self._dataset)
        return read(self, storage, after, upto)

    monkeypatch.setattr(ledger, "_all_entries", counted)
    monkeypatch.setattr(RememberedEntries, "_events", events)
    return seen


@pytest.mark.slow
def test_only_new_events_are_read_again(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    remembered, anew = RememberedEntries("d", clock), ledger._all_entries
    seen = full_reads(monkeypatch)
    report_together(instance, [ours(KEYS[11], 1)])
    with monkeypatch.context() as patch:  # an event comes while all are read
        read = RememberedEntries._events

        def beside(self: RememberedEntries, *asked: Any) -> list[ledger._Event]:
            report_together(instance, [ours(KEYS[10], 1)])
            return read(self, *asked)

        patch.setattr(RememberedEntries, "_events", beside)
        assert remembered.read(instance).keys() == {KEYS[11]}
    for number in range(40):
        report_together(instance, [ours(KEYS[number % 7], number), ours(KEYS[number % 5], 100 + number)])
        clock.forward(4)
        assert remembered.read(instance) == anew(instance, "d")
    assert seen == ["d"]
    instance.report_runless_asset_event(dg.AssetMaterialization(ledger.rows_key("other"), partition="x"))
    assert remembered.read(instance) == anew(instance, "d")
    assert seen == ["d"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak("losses")) for seed in range(1, 4))])
def test_whatever_happens_to_the_event_log_it_is_as_read_anew(instance: dg.DagsterInstance, seed: int):
    """Entries of ours and others', by runs and without; a wiped asset, a deleted run, an event that appears late."""
    chance, clock = random.Random(seed), Clock()
    remembered, late = RememberedEntries("d", clock), list[dict[str, object]]()
    for number in range(60):
        what = chance.choice(["ours"] * 6 + ["foreign", "run", "run", "delete", "wipe", "late", "late"])
        key = chance.choice(KEYS)
        if what == "ours":
            report_together(instance, [ours(one, number) for one in chance.sample(KEYS, chance.randint(1, 4))])
        elif what == "foreign":
            instance.report_runless_asset_event(dg.AssetMaterialization(ROWS, partition=key))
        elif what == "run":
            run = create_run_for_test(instance, "j")
            dagster_event = dg.DagsterEvent(
                event_type_value="ASSET_MATERIALIZATION",
                job_name="j",
                event_specific_data=_made(ours(key, number)),
            )
            instance.report_dagster_event(dagster_event, run.run_id)
        elif what == "delete" and (runs := instance.get_runs()):
            instance.delete_run(chance.choice(runs).run_id)
        elif what == "wipe" and chance.random() < 0.4:
            instance.wipe_assets([ROWS])
        elif what == "late" and instance.event_log_storage.__class__.__name__.startswith("Postgres"):
            _late(instance, late)
        clock.forward(chance.choice([0.1, 5, 30]))
        if chance.random() < 0.7:
            assert remembered.read(instance) == ledger._all_entries(instance, "d"), f"after step {number}: {what}"
    assert remembered.read(instance) == ledger._all_entries(instance, "d")


def _made(event: dg.AssetMaterialization) -> object:
    from dagster._core.events import StepMaterializationData

    return StepMaterializationData(event)


def _late(instance: dg.DagsterInstance, hidden: list[dict[str, object]]) -> None:
    """Hide the newest event of the batches, as if its transaction had not ended; or show one that was hidden."""
    with instance.event_log_storage.index_connection() as connection:  # type: ignore[attr-defined]
        if hidden:
            connection.execute(EVENTS.insert(), hidden.pop())
        else:
            mine = sa.select(EVENTS).where(EVENTS.c.asset_key == ROWS.to_string()).order_by(EVENTS.c.id.desc()).limit(1)
            found = connection.execute(mine).mappings().first()
            if found is not None:
                hidden.append(dict(found))
                connection.execute(EVENTS.delete().where(EVENTS.c.id == found["id"]))
        if connection.in_transaction():
            connection.commit()


def test_an_instance_remembers_when_it_is_told_to(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch):
    seen = full_reads(monkeypatch)
    report_together(instance, [ours(KEYS[0], 1)])
    for _ in range(2):
        assert list(ledger.ledger_versions(instance, "d")) == [KEYS[0]]
    assert seen == ["d", "d"]
    ledger.remember_entries(instance)
    for _ in range(3):
        found = ledger.ledger_entries(instance, "d")
        found.clear()  # a copy
    assert list(ledger.ledger_versions(instance, "d")) == [KEYS[0]]
    assert seen == ["d", "d", "d"]


@pytest.mark.slow
def test_a_foreign_report_brings_back_nothing_from_before_the_asset_was_wiped(instance: dg.DagsterInstance):
    """On SQLite Dagster deletes the events of a wiped asset, but not their tags, which a later event gets."""
    if not instance.event_log_storage.__class__.__name__.startswith("Postgres"):
        pytest.skip("about Postgres")
    report_together(instance, [ours(KEYS[0], 1), ours(KEYS[1], 1)])
    instance.wipe_assets([ROWS])
    instance.report_runless_asset_event(dg.AssetMaterialization(ROWS, partition=KEYS[0]))
    assert ledger.ledger_entries(instance, "d") == {}
