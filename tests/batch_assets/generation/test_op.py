"""The rows op as Dagster runs it: a range in, one ledger entry per batch out, the lease given back once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.errors import DagsterExecutionInterruptedError
from support.dataset_project import BATCH, MODEL, DatasetProject, dataset_project
from support.simulated_engine import SimulatedEngine, simulated_engine

import batch_assets.orchestration.assets
from batch_assets.catalog import ledger
from batch_assets.catalog.backfills import range_of, range_runs
from batch_assets.dagster_internals import kept_connections
from batch_assets.generation import progress_report
from batch_assets.generation.op import LedgerEntries, keys_of
from batch_assets.tags import ENDPOINT_TAG, RANGE_END_TAG, RANGE_START_TAG, REQUEST_TAG
from resources.endpoints import allow

QUESTIONS = [f"What is {i} plus {i}?" for i in range(60)]
FIVE_TAGS = {
    "dagster/data_version",
    "dagster/code_version",
    "dagster/input_data_version/d/prompts",
    "dagster/input_event_pointer/d/prompts",
    "dagster/data_version_is_user_provided",
}


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[SimulatedEngine]:
    with simulated_engine("--speed", "100", "--max-num-seqs", "16", model=MODEL) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: SimulatedEngine) -> SimulatedEngine:
    shared_engine.set_faults()
    return shared_engine


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DatasetProject]:
    with dataset_project(tmp_path) as site:
        site.source(QUESTIONS)
        assert site.materialize("prompts").success
        yield site


@pytest.mark.slow
def test_a_range_run_writes_one_entry_per_batch_with_the_five_version_tags(
    site: DatasetProject, engine: SimulatedEngine
):
    assert site.run_rows("00001", "00003", engine.url).success
    events = site.events()
    assert sorted(key for key, _, _ in events) == ["00001", "00002", "00003"]
    versions = {entry.key: entry.data_version for entry in site.store.entries(site.manifest().snapshot)}
    for key, tags, metadata in events:
        assert {name for name in tags if name in FIVE_TAGS} == FIVE_TAGS
        assert tags["dagster/data_version"] == versions[key]
        assert tags["dagster/input_data_version/d/prompts"] == site.manifest().snapshot
        assert tags["dagster/input_event_pointer/d/prompts"] == "NULL"
        assert (metadata["rows"], metadata["ok"], metadata["dead"]) == (BATCH, BATCH, 0)
        assert Path(metadata["object"]).exists()
        assert f"| What is {10 * int(key)} plus" in metadata["first_rows"] and metadata["first_rows"].count("→") == 6
    assert ledger.ledger_versions(site.instance, "d").keys() == {"00001", "00002", "00003"}
    assert site.fleet_db.runs() == []


@pytest.mark.slow
def test_the_page_of_a_run_has_rows_and_rate(
    site: DatasetProject, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress_report, "FIRST_SECONDS", 0.0)
    assert site.run_rows("00000", "00005", engine.url).success
    records = site.instance.fetch_observations(ledger.rows_key("d"), limit=100).records
    seen = [one.asset_observation for one in reversed(records) if one.asset_observation is not None]
    told = [one for one in seen if one.metadata["decision"].value == "progress"]
    assert len(told) >= 2
    assert told[-1].metadata["rows_done"].value == told[-1].metadata["run_rows"].value == 60
    assert told[-1].metadata["run_rows_per_second"].value > 0
    assert str(told[-1].description).startswith("60 of 60 rows, ")


@pytest.mark.slow
def test_committed_batches_are_reported_again_and_cost_nothing(site: DatasetProject, engine: SimulatedEngine):
    assert site.run_rows("00000", "00002", engine.url).success
    first = {key: tags["dagster/data_version"] for key, tags, _ in site.events()}
    nobody = "http://127.0.0.1:9"  # were an engine needed, this run would fail
    assert site.run_rows("00000", "00002", nobody).success
    again = site.events()[3:]
    assert {key: tags["dagster/data_version"] for key, tags, _ in again} == first
    assert site.fleet_db.history(site.instance.get_runs(limit=1)[0].run_id) == []
    assert all(len(objects) == 1 for objects in site.store.objects_by_batch().values())


def test_a_run_for_some_batches_of_its_range_leaves_the_others_alone(site: DatasetProject, engine: SimulatedEngine):
    allow(site.folder, engine.url, None)
    tags = {RANGE_START_TAG: "00000", RANGE_END_TAG: "00005", ENDPOINT_TAG: engine.url}
    some = {"ops": {"d__rows": {"config": {"only": "00001 00004"}}}}
    assert site.materialize("rows", tags=tags, run_config=some).success
    assert sorted(key for key, _, _ in site.events()) == ["00001", "00004"]
    assert sorted(key for key, objects in site.store.objects_by_batch().items() if objects) == ["00001", "00004"]
    (run,) = site.instance.get_runs(dg.RunsFilter(tags={RANGE_START_TAG: "00000"}))
    keys = range_of(run)
    assert keys is not None and "00004" in keys and "00005" not in keys


@pytest.mark.slow
def test_a_failure_names_the_missing_batches_and_keeps_the_committed_ones(
    site: DatasetProject, engine: SimulatedEngine
):
    assert site.run_rows("00000", "00001", engine.url).success
    (site.folder / "fleet.yaml").write_text("engines: [{name: e, kind: process, command: ['false']}]\n")
    result = site.run_rows("00000", "00003", None)
    assert not result.success
    assert "2 of 4 batches are not committed: 00002, 00003. 3 engines in a row did not start" in site.reason()
    assert site.instance.get_materialized_partitions(ledger.rows_key("d")) == {"00000", "00001"}
    history = site.fleet_db.history(result.run_id)
    assert [released for _, _, released in history] == [True, True, True]
    assert site.fleet_db.runs() == []


@pytest.mark.slow
def test_a_run_whose_engine_refuses_every_request_says_so_to_the_launcher(site: DatasetProject):
    asked = {RANGE_START_TAG: "00000", RANGE_END_TAG: "00003", REQUEST_TAG: "r"}
    with simulated_engine(model="another") as engine:
        allow(site.folder, engine.url, None)
        refused = site.materialize("rows", tags={**asked, ENDPOINT_TAG: engine.url})
    assert "4 of 4 batches are not committed" in site.reason()
    assert f"expected model {MODEL}, found another" in site.reason()
    assert [(run.run_id, run.outcome) for run in range_runs(site.instance, "d", "r")] == [(refused.run_id, "refused")]


@pytest.mark.slow
def test_an_interrupt_gives_the_lease_back_once_and_what_was_journaled_is_not_asked_again(
    site: DatasetProject, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
):
    """Dagster raises in the main thread, wherever that is: here in its wait for the engine."""
    released: list[bool] = []
    write = LedgerEntries.write
    done = {"rows": 0}

    def interrupting(self: LedgerEntries, **options: bool):
        write(self, **options)
        done["rows"] = self.run.progress().rows_done
        if 15 <= done["rows"] < 60 and not released:
            released.append(True)
            raise DagsterExecutionInterruptedError

    engine.set_faults({"kind": "hang", "match": {"contains": QUESTIONS[30]}})  # or all were done before anybody looks
    with monkeypatch.context() as patch:
        patch.setattr(LedgerEntries, "write", interrupting)
        assert not site.run_rows("00000", "00005", engine.url).success
    run_id = site.instance.get_runs(limit=1)[0].run_id
    assert [back for _, _, back in site.fleet_db.history(run_id)] == [True]
    assert site.fleet_db.runs() == []
    assert not [t for t in threading.enumerate() if t.name in ("event-loop", "heartbeat")]
    engine.set_faults()
    assert site.run_rows("00000", "00005", engine.url).success
    objects = [batch for found in site.store.objects_by_batch().values() for batch in found]
    by_run = Counter(outcome.origin.run_id for batch in objects for outcome in site.store.outcomes(batch))
    assert by_run[run_id] >= done["rows"] >= 15
    assert by_run.total() == 60


@pytest.mark.slow
@pytest.mark.parametrize("asked", [True, False])
def test_a_run_that_somebody_ends_says_so_without_a_traceback(
    site: DatasetProject, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch, asked: bool
):
    """An interrupt that nobody asked for, as when a machine goes down, keeps its traceback."""

    def interrupted(self: LedgerEntries, **options: bool):
        if asked:
            self.context.instance.report_run_canceling(self.context.run)
        raise DagsterExecutionInterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(LedgerEntries, "write", interrupted)
        assert not site.run_rows("00000", "00005", engine.url).success
    (run,) = site.instance.get_runs(limit=1)
    events = [entry.dagster_event for entry in site.instance.all_logs(run.run_id) if entry.dagster_event]
    failure = next(one for one in events if one.is_step_failure).step_failure_data.error
    assert failure is not None
    if not asked:
        assert run.status is dg.DagsterRunStatus.FAILURE and failure.stack
        return
    assert run.status is dg.DagsterRunStatus.CANCELED
    ended = next(one for one in events if one.event_type is dg.DagsterEventType.RUN_CANCELED).job_canceled_data.error
    for error in (failure, ended):
        assert error is not None
        assert error.to_string().startswith("Canceled on request: ") and "batch-assets run d" in error.message
        assert not error.stack and "Traceback" not in error.to_string()


@pytest.mark.slow
def test_two_materializations_of_one_range_ask_for_each_row_once(site: DatasetProject, engine: SimulatedEngine):
    """At the same time and with one engine: the second run waits for the engine, or for the first one's batches."""
    before = engine.get("/simulator/stats")["requests"]
    ended: list[bool] = []

    def materialize() -> None:
        with dg.DagsterInstance.ephemeral() as instance:  # a catalog in memory is not for two runs at once
            instance.add_dynamic_partitions("d", [f"{i:05d}" for i in range(6)])
            ended.append(site.run_rows("00000", "00005", engine.url, instance=instance).success)

    runs = [threading.Thread(target=materialize) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert ended == [True, True]
    assert engine.get("/simulator/stats")["requests"] - before <= 60 + 2  # a canary of each run


@pytest.mark.slow
def test_regenerate_writes_the_next_generation_of_every_batch(site: DatasetProject, engine: SimulatedEngine):
    assert site.run_rows("00000", "00001", engine.url).success
    result = site.run_rows("00000", "00001", engine.url, config={"regenerate": True})
    assert result.success
    assert [[b.generation for b in objects] for objects in site.store.objects_by_batch().values()] == [[0, 1], [0, 1]]
    newest = {key: version.generation for key, version in ledger.ledger_versions(site.instance, "d").items()}
    assert newest == {"00000": 1, "00001": 1}
    for objects in site.store.objects_by_batch().values():
        assert {o.origin.run_id for o in site.store.outcomes(objects[1])} == {result.run_id}


@pytest.mark.slow
def test_a_redrive_asks_for_dead_rows_only(site: DatasetProject, engine: SimulatedEngine):
    engine.set_faults({"kind": "too_long", "match": {"contains": "What is 7 plus 7?"}})
    first = site.run_rows("00000", "00001", engine.url)
    assert first.success
    engine.set_faults()
    second = site.run_rows("00000", "00001", engine.url, config={"redrive": True})
    assert second.success
    objects = site.store.objects_by_batch()
    assert [b.generation for b in objects["00000"]] == [0, 1]
    assert [b.generation for b in objects["00001"]] == [0]
    asked = [o.row_id for o in site.store.outcomes(objects["00000"][1]) if o.origin.run_id == second.run_id]
    assert asked == ["id-0007"]
    assert all(o.ok for o in site.store.outcomes(objects["00000"][1]))


@pytest.mark.slow
def test_a_batch_without_rows_is_reported_so_that_a_backfill_over_it_ends(
    site: DatasetProject, engine: SimulatedEngine
):
    site.source(QUESTIONS[:50])
    assert site.materialize("prompts").success
    assert site.run_rows("00004", "00005", engine.url).success
    (empty,) = [(key, metadata["rows"]) for key, tags, metadata in site.events() if metadata["rows"] == 0]
    assert empty == ("00005", 0)


@pytest.mark.slow
def test_a_run_that_was_declared_dead_stands_down_and_leases_no_engine_again(
    site: DatasetProject, monkeypatch: pytest.MonkeyPatch
):
    """The watchdog's word, while the worker was stopped: its successor has the range, so it must spend nothing."""
    write = LedgerEntries.write

    def declared_dead(self: LedgerEntries, **options: bool):
        write(self, **options)
        if self.run.progress().rows_done >= 5:
            site.fleet_db.end_run(self.context.run.run_id)

    monkeypatch.setattr(LedgerEntries, "write", declared_dead)
    with simulated_engine("--speed", "0.5", "--max-num-seqs", "4", model=MODEL) as slow:
        result = site.run_rows("00000", "00005", slow.url)
    assert not result.success
    assert "declared dead" in site.reason()
    assert len(site.fleet_db.history(result.run_id)) == 1


@pytest.mark.slow
def test_runs_that_lease_nothing_beat_too(
    site: DatasetProject, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
):
    assert site.run_rows("00000", "00005", engine.url).success
    seen: list[str] = []
    begin_run = type(site.fleet_db).begin_run

    def noted(self, run_id, dataset, first, last):
        begin_run(self, run_id, dataset, first, last)
        seen.extend(beat.run_id for beat in self.runs())

    monkeypatch.setattr(type(site.fleet_db), "begin_run", noted)
    runs = [site.materialize(name).run_id for name in ("prompts", "dataset", "dead_letters")]
    assert seen == runs
    assert site.fleet_db.runs() == []


@pytest.mark.slow
@pytest.mark.parametrize("dead", [False, True])
def test_a_publication_that_was_declared_dead_deletes_no_journal(
    site: DatasetProject, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch, dead: bool
):
    """Cut off from all while it published, it wakes up when its successor has done that, and more is under way."""
    assert site.run_rows("00000", "00005", engine.url).success
    path = site.store.journal.append(("00000", "00005"), "", "a-run-of-before", 1, {"00000": []}, "chat")
    publish = batch_assets.orchestration.assets.publish

    def cut_off(*words: Any, **more: Any) -> Any:
        table = publish(*words, **more)
        if dead:
            (beat,) = site.fleet_db.runs()
            site.fleet_db.declare_dead(beat.run_id)
        return table

    monkeypatch.setattr(batch_assets.orchestration.assets, "publish", cut_off)
    site.materialize("dataset")
    assert (path in site.store.journal.ordinary_segments()) is dead


@pytest.mark.parametrize(("only", "expected"), [("", ["1", "2", "3"]), ("3 1", ["1", "3"]), ("  ", ["1", "2", "3"])])
def test_a_run_is_for_the_batches_of_its_range_that_its_config_names(only: str, expected: list[str]):
    assert keys_of(["1", "2", "3"], only) == expected


def test_a_batch_outside_of_the_range_is_refused():
    with pytest.raises(dg.Failure, match="config `only`: expected batches of the run's range, 1 to 3, found 4"):
        keys_of(["1", "2", "3"], "1 4")


def test_a_run_keeps_its_connections_whichever_asset_it_makes(site: DatasetProject):
    kept_connections._keeping.discard(site.instance)
    assert site.materialize("prompts").success
    assert site.instance in kept_connections._keeping
