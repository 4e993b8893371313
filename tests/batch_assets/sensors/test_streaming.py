"""Steps of a chain that read what the step before has committed so far."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from support.sensor_dataset import KEYS, SPEC, S, SensorDataset
from support.snapshots import commit, questions, write_snapshot

from batch_assets.catalog import ledger
from batch_assets.sensors.chain_sensor import worth_reading
from batch_assets.spec.models import load_spec
from batch_assets.tags import (
    CANCELED_TAG,
    CHAIN_TAG,
    PUBLISH_TAG,
    REFRESH_TAG,
    REQUEST_TAG,
    STREAMING_TAG,
    UPSTREAM_TAG,
)
from resources.store.dataset_store import DatasetStore
from resources.store.snapshot_manifest import RowsSoFar

CHAIN = {UPSTREAM_TAG: "answers", CHAIN_TAG: "first"}
BELOW = {**SPEC, "batch_rows": 10, "batches_per_run": 4}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    """`answers` reads `d`, 120 rows in 12 batches, while it is made."""
    answers = {**BELOW, "name": "answers", "source": {"dataset": "d", "streaming": True}}
    with contextlib.ExitStack() as stack:
        yield SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack, SPEC, answers)


def begun(site: SensorDataset) -> None:
    run_id = site.run(S.STARTED, {REFRESH_TAG: "d", **CHAIN}, job_name="d_refresh")
    write_snapshot(site.store, questions(120))
    site.instance.add_dynamic_partitions("d", KEYS)
    site.end(run_id)


def below(site: SensorDataset) -> DatasetStore:
    return DatasetStore(site.store.objects, "answers")


def read(site: SensorDataset, rows: int, **tags: str) -> str:
    """A refresh of `answers` that has read so many rows."""
    tags = {REFRESH_TAG: "answers", STREAMING_TAG: "true", **CHAIN, **tags}
    run_id = site.run(S.STARTED, tags, job_name="answers_refresh")
    manifest = write_snapshot(below(site), questions(rows))
    below(site).put_manifest(manifest.model_copy(update={"streaming": RowsSoFar(read=rows, of=120)}))
    site.end(run_id)
    return run_id


def answer(site: SensorDataset, *keys: str) -> None:
    snapshot = below(site).current_snapshot() or ""
    for footer in commit(below(site), below(site).manifest(snapshot), keys=keys).values():
        site.instance.report_runless_asset_event(ledger.batch_event(below(site), footer, snapshot))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batch_assets.sensors.chain_sensor.PAUSE", 0.0)


def test_rows_that_are_committed_are_read_in_the_order_of_their_batches(site: SensorDataset) -> None:
    begun(site)
    assert "d: answers waits for its table" in site.reason("chain")
    site.commit("00001", "00002")
    assert "d: answers waits for its table" in site.reason("chain"), "there is a gap"
    site.commit("00000")
    (found,) = site.tick("chain").run_requests or ()
    assert (found.job_name, found.run_key) == ("answers_refresh", "first:answers:30")
    assert {tag: found.tags[tag] for tag in (*CHAIN, STREAMING_TAG)} == {**CHAIN, STREAMING_TAG: "true"}
    run_id = site.run(S.STARTED, {REFRESH_TAG: "answers", STREAMING_TAG: "true", **CHAIN}, job_name="answers_refresh")
    assert "d: answers waits for a refresh of its chain" in site.reason("chain")
    site.end(run_id, dg.DagsterEventType.RUN_FAILURE)
    assert "d: answers waits for its table" in site.reason("chain"), "after one that failed"


def test_the_last_batch_of_rows_so_far_is_not_asked_and_no_table_is_made_of_them(site: SensorDataset) -> None:
    begun(site)
    site.commit("00000", "00001", "00002")
    read(site, 30)
    site.instance.add_dynamic_partitions("answers", KEYS[:3])
    (found,) = [one for one in site.launches() if one.tags["dagster/asset_partition_range_start"] == "00000"]
    assert found.tags["dagster/asset_partition_range_end"] == "00001"
    assert "answers has read 30 rows, 0 more are committed" in site.reason("chain")
    answer(site, "00000", "00001", "00002")
    publisher = site.tick("publisher")
    assert not publisher.run_requests and "30 of 120 rows so far" in (publisher.skip_message or "")
    site.commit("00003")
    assert "answers has read 30 rows, 10 more are committed" in site.reason("chain"), "not a full batch of its own"
    site.commit("00004")
    (again,) = site.tick("chain").run_requests or ()
    assert again.run_key == "first:answers:50"


def test_the_table_has_the_last_word(site: SensorDataset) -> None:
    begun(site)
    site.commit(*KEYS)
    reading = site.run(S.STARTED, {REFRESH_TAG: "answers", STREAMING_TAG: "true", **CHAIN}, job_name="answers_refresh")
    (found,) = site.tick("publisher").run_requests or ()
    site.end(site.run(S.STARTED, {PUBLISH_TAG: found.tags[PUBLISH_TAG]}, job_name="d_publish"))
    assert "d: its table is published: answers waits for a refresh of its chain" in site.reason("chain")
    site.end(reading)
    (last,) = site.tick("chain").run_requests or ()
    assert last.run_key == "first:answers" and STREAMING_TAG not in last.tags
    site.run(S.STARTING, {REFRESH_TAG: "answers", **CHAIN}, job_name="answers_refresh")
    assert "d: answers was started" in site.reason("chain")


def test_nothing_more_is_read_after_a_cancel_or_where_a_whole_snapshot_is_there(site: SensorDataset) -> None:
    begun(site)
    site.commit("00000", "00001", "00002", "00003", "00004")
    run_id = read(site, 20)
    answer(site, "00000")
    assert site.tick("chain").run_requests
    site.instance.add_run_tags(run_id, {CANCELED_TAG: "true"})
    assert "d: answers waits for its table" in site.reason("chain")
    write_snapshot(below(site), questions(20))
    read_of = site.run(S.STARTED, {REFRESH_TAG: "answers", STREAMING_TAG: "true", **CHAIN}, job_name="answers_refresh")
    site.end(read_of)
    assert "d: answers waits for its table" in site.reason("chain"), "its rows keep their places"


def test_nothing_more_is_read_where_what_came_of_it_is_refused(site: SensorDataset) -> None:
    begun(site)
    site.commit(*KEYS[:-1])
    run_id = read(site, 20)
    assert site.tick("chain").run_requests
    tags = {REQUEST_TAG: run_id, "dagster/asset_partition_range_start": "00000"}
    tags["dagster/asset_partition_range_end"] = "00000"
    rows = frozenset([ledger.rows_key("answers")])
    site.run(S.CANCELED, tags, job_name="__ASSET_JOB", asset_selection=rows)
    assert "d: answers waits for its table" in site.reason("chain")


def test_rows_are_read_again_when_there_is_little_left_and_much_has_come() -> None:
    spec = load_spec({**BELOW, "name": "answers"}, "defs.yaml")  # 40 rows a run
    assert worth_reading(0, 40, 40, 0, spec) and worth_reading(0, 20, 20, 0, spec)
    assert not worth_reading(0, 19, 19, 0, spec)  # not a full batch for certain
    assert not worth_reading(0, 39, 39, 10, spec) and worth_reading(0, 40, 40, 10, spec)
    assert not worth_reading(0, 500, 500, 40, spec)  # it has a whole run to do
    assert not worth_reading(1000, 100, 100, 0, spec) and worth_reading(1000, 125, 125, 0, spec)
    assert worth_reading(0, 2, 20, 0, spec)  # each row makes ten


@pytest.mark.slow
def test_two_steps_of_a_chain_are_not_refreshed_at_once(tmp_path: Path) -> None:
    last = {**BELOW, "name": "last", "source": {"dataset": "answers", "streaming": True}}
    answers = {**BELOW, "name": "answers", "source": {"dataset": "d", "streaming": True}}
    with contextlib.ExitStack() as stack:
        site = SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack, SPEC, answers, last)
        run_id = site.run(S.STARTED, {REFRESH_TAG: "d", **CHAIN, UPSTREAM_TAG: "last"}, job_name="d_refresh")
        write_snapshot(site.store, questions(120))
        site.end(run_id)
        site.commit("00000", "00001", "00002", "00003", "00004", "00005")
        read(site, 30, **{UPSTREAM_TAG: "last"})
        answer(site, "00000", "00001")
        (one,) = site.tick("chain").run_requests or ()
        assert one.job_name in ("answers_refresh", "last_refresh")
