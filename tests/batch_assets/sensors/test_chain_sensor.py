"""The sensor that refreshes the next step of a chain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from support.sensor_dataset import KEYS, SPEC, S, SensorDataset
from support.snapshots import commit, questions, write_snapshot

from batch_assets.catalog import ledger
from batch_assets.catalog.publications import ledger_state
from batch_assets.filtering.passed_table import filtered
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.spec.models import load_spec
from batch_assets.spec.row_rules import RowRule
from batch_assets.tags import (
    AUTOMATIC_TAG,
    BUDGET_TAG,
    CANCELED_TAG,
    CHAIN_BUDGET_TAG,
    CHAIN_TAG,
    ENDPOINT_TAG,
    PUBLISH_TAG,
    REFRESH_TAG,
    UPSTREAM_TAG,
)
from resources.store.snapshot_manifest import WantedRows

CHAIN = {
    UPSTREAM_TAG: "answers",
    CHAIN_TAG: "first",
    CHAIN_BUDGET_TAG: "9.0",
    BUDGET_TAG: "3.0",
    ENDPOINT_TAG: "http://x",
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    """`answers` reads `questions`, which read `d`."""
    reads = {"d": None, "questions": "d", "answers": "questions"}
    specs = [
        {**SPEC, "name": name, **({"source": {"asset": f"{before}/dataset"}} if before else {})}
        for name, before in reads.items()
    ]
    with contextlib.ExitStack() as stack:
        yield SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack, *specs)


def refreshed(site: SensorDataset, **tags: str) -> str:
    run_id = site.run(S.STARTED, {REFRESH_TAG: "d", **CHAIN, **tags}, job_name="d_refresh")
    write_snapshot(site.store, questions(120))
    site.instance.add_dynamic_partitions("d", KEYS)
    site.end(run_id)
    return run_id


def committed(site: SensorDataset) -> None:
    snapshot = site.store.current_snapshot() or ""
    for footer in commit(site.store, site.store.manifest(snapshot)).values():
        site.instance.report_runless_asset_event(ledger.batch_event(site.store, footer, snapshot))


def published(site: SensorDataset, passed: bool = True) -> None:
    snapshot = site.store.current_snapshot() or ""
    state = ledger_state(snapshot, site.store.entries(snapshot), ledger.ledger_versions(site.instance, "d"))
    run_id = site.run(S.STARTED, {PUBLISH_TAG: state}, job_name="d_publish")
    if not passed:
        failed = dg.AssetCheckEvaluation(
            asset_key=ledger.table_key("d"), check_name="dead_letter_rate", passed=False, description="12% of rows"
        )
        event = dg.DagsterEvent(
            dg.DagsterEventType.ASSET_CHECK_EVALUATION.value, "d_publish", event_specific_data=failed
        )
        site.instance.report_dagster_event(event, run_id)
    site.end(run_id)


@pytest.mark.slow
def test_the_next_step_is_refreshed_once_when_the_table_that_it_reads_is_published(site: SensorDataset):
    assert "d: no chain" in site.reason("chain")
    refreshed(site)
    assert "d: questions waits for its table" in site.reason("chain")
    committed(site)
    assert "d: questions waits for its table" in site.reason("chain")
    published(site)
    (found,) = site.tick("chain").run_requests or ()
    assert (found.job_name, found.run_key) == ("questions_refresh", "first:questions")
    assert {tag: found.tags[tag] for tag in CHAIN if tag in found.tags} == {
        tag: value for tag, value in CHAIN.items() if tag != BUDGET_TAG
    }
    site.run(S.STARTING, {REFRESH_TAG: "questions", **CHAIN}, job_name="questions_refresh")
    assert "d: questions was started" in site.reason("chain")


def test_a_chain_that_was_canceled_goes_on_no_more(site: SensorDataset):
    refreshed(site, **{CANCELED_TAG: "true"})
    committed(site)
    published(site)
    assert "d: canceled: questions is not started" in site.reason("chain")


def test_a_table_that_fails_its_checks_stops_what_reads_it(site: SensorDataset):
    refreshed(site)
    committed(site)
    published(site, passed=False)
    assert "d: failed checks: dead_letter_rate: 12% of rows: questions is not started" in site.reason("chain")


def test_a_refresh_of_the_one_dataset_ends_the_chain_and_the_last_step_has_none_after_it(site: SensorDataset):
    refreshed(site)
    refreshed(site, **{UPSTREAM_TAG: "d"})
    committed(site)
    published(site)
    assert "d: the end of its chain" in site.reason("chain")
    site.end(site.run(S.STARTED, {REFRESH_TAG: "d"}, job_name="d_refresh"))
    assert "d: no chain" in site.reason("chain")


def test_a_refresh_by_the_automation_ends_no_chain(site: SensorDataset):
    refreshed(site)
    site.end(site.run(S.STARTED, {REFRESH_TAG: "d", AUTOMATIC_TAG: "true"}, job_name="d_refresh"))
    assert "d: questions waits for its table" in site.reason("chain")


def test_there_is_no_such_sensor_where_no_dataset_reads_another(tmp_path: Path):
    with contextlib.ExitStack() as stack:
        alone = SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack)
        assert "chain" not in alone.sensors()


def passes(site: SensorDataset, one_in: int) -> None:
    """The table of the snapshot, and its rows that pass: one in so many."""
    spec, folder = site.specs["d"]
    manifest = site.store.manifest(site.store.current_snapshot() or "")
    publish(site.store, manifest, card=Card(), now=1.0, workdir=folder)
    rules = {"level": RowRule(where=f"level < {5 // one_in}", remove=True)}
    filtered(site.store, rules, base=folder, now=1.0, workdir=folder, want=spec.want)


@pytest.mark.slow
def test_a_dataset_that_wants_more_accepted_rows_is_refreshed_once_more_before_the_next_step(site: SensorDataset):
    keys = {**SPEC, "keep_columns": ["topic", "level"], "filter": {"level": {"where": "level < 1", "remove": True}}}
    site.specs["d"] = (load_spec({**keys, "want": {"rows": 60}}, "defs.yaml"), site.folder)
    refreshed(site)
    manifest = site.store.manifest(site.store.current_snapshot() or "")
    wanted = WantedRows(otherwise=120, read={"": 120})
    site.store.put_manifest(manifest.model_copy(update={"wanted": wanted}))
    committed(site)
    passes(site, 5)
    assert "d: questions waits for its table" in site.reason("chain")
    published(site)
    (found,) = site.tick("chain").run_requests or ()
    assert (found.job_name, found.run_key) == ("d_refresh", "first:d:250")  # in whole batches
    assert found.tags[CHAIN_TAG] == "first" and found.tags[ENDPOINT_TAG] == "http://x"
    under_way = site.run(S.STARTED, {REFRESH_TAG: "d", **CHAIN}, job_name="d_refresh")
    assert "d: a refresh of its chain is under way" in site.reason("chain")
    site.instance.delete_run(under_way)

    ended = manifest.model_copy(update={"wanted": WantedRows(otherwise=240, read={"": 120})})
    site.store.put_manifest(ended)
    assert "d: 36 accepted rows are missing: 24 of 120 rows passed, and the source has no more" in site.reason("chain")
    site.specs["d"] = (load_spec({**keys, "want": {"rows": 24}}, "defs.yaml"), site.folder)
    passes(site, 5)
    (found,) = site.tick("chain").run_requests or ()
    assert found.job_name == "questions_refresh"
