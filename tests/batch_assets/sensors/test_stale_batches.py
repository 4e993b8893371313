"""Batches of an earlier snapshot: Dagster counts them as materialized, so a check of the table counts them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from support.sensor_dataset import KEYS, S, SensorDataset
from support.snapshots import questions, write_snapshot

from batch_assets.catalog import ledger
from batch_assets.orchestration.asset_checks import CURRENT, StaleBatches
from batch_assets.sensors import catalog_changes

TODO = "the job `d_refresh` or `batch-assets run d` makes them."


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SensorDataset]:
    """A dataset whose 12 batches are all there."""
    monkeypatch.setattr(catalog_changes, "OVERLAP_SECONDS", 0.0)
    with contextlib.ExitStack() as stack:
        found = SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack)
        found.snapshot()
        found.commit(*KEYS)
        yield found


def checks(
    site: SensorDataset, kept: dict[str, dg.SensorDefinition] | None = None
) -> list[tuple[bool | None, str | None]]:
    """What one tick of the publisher says of the table's batches; the same tick of another process adds nothing."""
    found = [one for one in site.tick("publisher", kept).asset_events if isinstance(one, dg.AssetCheckEvaluation)]
    assert all((one.asset_key, one.check_name) == (ledger.table_key("d"), CURRENT) for one in found)
    assert not site.tick("publisher").asset_events
    return [(one.passed, one.description) for one in found]


def changed(site: SensorDataset) -> None:
    """The template was edited, and the source read again."""
    write_snapshot(site.store, questions(120, start=1000))


def test_what_is_of_the_newest_snapshot_needs_no_report(site: SensorDataset):
    assert checks(site) == []


def test_batches_that_were_never_made_count_as_missing_in_dagster_itself(tmp_path: Path):
    with contextlib.ExitStack() as stack:
        site = SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack)
        site.snapshot()
        site.commit(*KEYS[:3])
        assert checks(site) == []


@pytest.mark.slow
def test_an_interrupted_refresh_is_told_with_what_is_left_and_what_to_do_until_nothing_is(site: SensorDataset):
    changed(site)
    assert checks(site) == [(False, f"12 of 12 batches are of an earlier snapshot, lost or to be made anew: {TODO}")]
    assert checks(site) == []
    run = site.batches(S.STARTED, KEYS[0], KEYS[-1], site.request())
    assert checks(site) == [
        (False, "12 of 12 batches are of an earlier snapshot, lost or to be made anew: they are being made.")
    ]
    site.commit(*KEYS[:4])
    assert checks(site) == [], "not an event for each batch"
    site.end(run, dg.DagsterEventType.RUN_CANCELED)
    assert checks(site) == [(False, f"8 of 12 batches are of an earlier snapshot, lost or to be made anew: {TODO}")]
    assert site.instance.get_materialized_partitions(ledger.rows_key("d")) == set(KEYS), "Dagster's bar has no gap"
    site.commit(*KEYS[4:])
    assert checks(site) == [(True, "All 12 batches are of the newest snapshot, or were never made.")]
    assert checks(site) == []


def test_it_is_a_warning_with_the_first_batches_and_their_number(site: SensorDataset):
    changed(site)
    (event,) = site.tick("publisher").asset_events
    assert isinstance(event, dg.AssetCheckEvaluation)
    assert event.severity == dg.AssetCheckSeverity.WARN
    assert {name: value.value for name, value in event.metadata.items()} == {
        "snapshot": site.store.current_snapshot(),
        "stale": 12,
        "first_batches": ", ".join(KEYS),
    }


def test_a_batch_that_is_lost_is_told_too(site: SensorDataset):
    version = ledger.ledger_versions(site.instance, "d")[KEYS[3]]
    site.instance.report_runless_asset_event(
        ledger.void_event("d", KEYS[3], version.voided(), "snapshot", "its object is gone", None)
    )
    assert checks(site) == [(False, f"1 of 12 batches are of an earlier snapshot, lost or to be made anew: {TODO}")]


def test_a_snapshot_that_comes_back_is_current_again(site: SensorDataset):
    first = site.store.current_snapshot()
    assert first is not None
    changed(site)
    assert checks(site)[0][0] is False
    site.store.set_current_snapshot(first)
    assert checks(site)[0][0] is True


@pytest.mark.slow
def test_a_cursor_of_before_or_of_a_dataset_that_is_gone_is_no_obstacle(site: SensorDataset):
    for cursor in ("", "nonsense", "[]", '{"gone": "x:3"}'):
        site.cursors["publisher"] = cursor
        assert checks(site) == []
        assert site.cursors["publisher"] == "{}"


def test_a_publication_says_what_was_stale_when_it_ended(site: SensorDataset):
    """Another snapshot may have been made while the table was written."""
    changed(site)
    snapshot = site.store.current_snapshot() or ""
    versions = ledger.ledger_versions(site.instance, "d")
    found = StaleBatches.of(snapshot, site.store.entries(snapshot), versions).result("d")
    assert (found.passed, found.check_name) == (False, CURRENT)
