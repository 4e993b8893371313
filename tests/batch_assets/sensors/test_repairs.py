"""Scattered losses in a large dataset are made again in few runs: the sensors' own functions, from tick to tick.

Instance, events, store and fleet's database are real. The runs that the launcher asks for are carried out here: they
wait, then commit and report their batches as a worker does.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import dagster as dg
import pytest
from support.sensor_dataset import ROWS, SPEC, S, SensorDataset, report_in_bulk
from support.snapshots import questions, write_snapshot

from batch_assets.catalog import ledger
from batch_assets.catalog.backfills import range_of
from batch_assets.orchestration import reconcile
from batch_assets.sensors import reconcile_sensor as reconcile_sensor
from batch_assets.sensors.launcher_sensor import SPARE_RUNS
from resources.store.dataset_store import BatchObject, BatchStore

BATCHES, PER_RUN, SLICE = 1_600, 20, 200
KEYS = [f"{i:05d}" for i in range(BATCHES)]
LOST = KEYS[7::20]  # 80 of them, ten in each of eight slices
FOREVER = 1e9


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SensorDataset]:
    """A complete dataset that is to use its four engines at once; a tick of `reconcile` has time for one slice."""
    monkeypatch.delenv("BATCH_ASSETS_ENDPOINT", raising=False)
    monkeypatch.setattr(reconcile, "SLICE_BATCHES", SLICE)
    monkeypatch.setattr(reconcile_sensor, "TICK_SECONDS", 0.0)
    engines = [{"name": f"e{n}", "kind": "endpoint", "url": f"http://127.0.0.1:{9000 + n}"} for n in range(4)]
    (tmp_path / "fleet.yaml").write_text(json.dumps({"engines": engines}))
    spec = {**SPEC, "batches_per_run": PER_RUN, "objective": "fastest"}
    with contextlib.ExitStack() as stack:
        site = SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack, spec)
        write_snapshot(site.store, questions(BATCHES), batch_rows=1, batches_per_shard=400)
        site.instance.add_dynamic_partitions("d", KEYS)
        site.fleet_db.set_instances("d", 4)
        site.request()
        report_in_bulk(site, KEYS)
        write_objects(site)
        yield site


def write_objects(site: SensorDataset) -> None:
    """An object for each batch that was reported: copies of the first one, which nobody reads."""
    entries = site.store.entries(site.store.current_snapshot() or "")
    paths = [path_of(site, BatchObject(entry.key, entry.data_version, 0)) for entry in entries]
    for path in paths[1:]:
        path.parent.mkdir(exist_ok=True)
        os.link(paths[0], path)


def path_of(site: SensorDataset, batch: BatchObject) -> Path:
    return Path(site.store.objects.uri(site.store.batch_path(batch)))


def lose(site: SensorDataset, keys: list[str]) -> None:
    """Objects of batches are deleted past the platform."""
    versions = ledger.ledger_versions(site.instance, "d")
    for key in keys:
        path_of(site, BatchObject(key, versions[key].data_version, versions[key].generation)).unlink()


def sensors(site: SensorDataset) -> dict[str, dg.SensorDefinition]:
    """The sensors of a new process."""
    store = BatchStore(root=str(site.folder / "store"))
    return {**site.sensors(), "reconcile": reconcile_sensor.reconcile_sensor(lambda: site.specs, store)}


def launched(site: SensorDataset, kept: Mapping[str, dg.SensorDefinition]) -> list[str]:
    """A tick of the launcher; the runs that it asks for wait in the queue."""
    about = {"job_name": "__ASSET_JOB", "asset_selection": frozenset([ROWS])}
    asked = site.tick("launcher", kept).run_requests or ()
    return [site.run(S.NOT_STARTED, one.tags, run_config=one.run_config, **about) for one in asked]


def carry_out(site: SensorDataset, run_id: str) -> list[str]:
    """What a worker does with the batches of its run."""
    run = site.instance.get_run_by_id(run_id)
    keys = range_of(run) if run is not None else None
    assert keys is not None
    made = [key for key in KEYS if key in keys]
    site.commit(*made, generation=1)
    site.end(run_id)
    return made


def healed(site: SensorDataset, kept: Mapping[str, dg.SensorDefinition], rounds: int = 40) -> list[list[str]]:
    """Ticks of both sensors, and what each run made. In each round four of the waiting runs are carried out."""
    waiting: list[str] = []
    made: list[list[str]] = []
    for _ in range(rounds):
        site.tick("reconcile", kept)
        waiting += launched(site, kept)
        made += [carry_out(site, run_id) for run_id in waiting[:4]]
        waiting = waiting[4:]
    return made


def test_scattered_losses_of_many_slices_are_made_again_in_as_few_runs_as_hold_them(site: SensorDataset):
    kept = sensors(site)
    for _ in range(BATCHES // SLICE):
        site.tick("reconcile", kept)
    lose(site, LOST)
    made = healed(site, kept)
    assert sorted(key for keys in made for key in keys) == LOST
    assert len(made) == len(LOST) // PER_RUN


def test_rows_that_were_lost_before_the_request_are_wanted_now_and_every_engine_gets_its_share(site: SensorDataset):
    kept = sensors(site)
    for _ in range(BATCHES // SLICE):
        site.tick("reconcile", kept)
    lose(site, LOST)
    site.tick("reconcile", kept)
    site.instance.report_runless_asset_event(dg.AssetMaterialization(ledger.prompts_key("d")))
    site.request()
    asked = site.tick("launcher", kept).run_requests or ()
    assert len(asked) == 4 + SPARE_RUNS
    first = str(asked[0].run_config["ops"]["d__rows"]["config"]["only"])
    assert first.split() == LOST[: len(LOST) // 8]


def test_with_a_deadline_ahead_what_was_lost_is_shared_out_to_all_engines(site: SensorDataset):
    kept = sensors(site)
    for _ in range(BATCHES // SLICE):
        site.tick("reconcile", kept)
    lose(site, LOST)
    site.tick("reconcile", kept)
    site.fleet_db.begin_request("d", "the request", deadline_at=site.fleet_db.now() + 3600)
    site.fleet_db.set_instances("d", 4)
    asked = site.tick("launcher", kept).run_requests or ()
    assert len(asked) == 4 + SPARE_RUNS
    first = str(asked[0].run_config["ops"]["d__rows"]["config"]["only"])
    assert first.split() == LOST[: len(LOST) // 8]


@pytest.mark.parametrize(("seconds", "found"), [(FOREVER, 2), (0.0, 1)])
def test_a_tick_that_finds_a_loss_looks_at_all_slices_before_it_is_written_down_while_there_is_time(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch, seconds: float, found: int
):
    kept = sensors(site)
    while site.cursors.get("reconcile") != "d:6":
        site.tick("reconcile", kept)
    monkeypatch.setattr(reconcile_sensor, "LOSS_SECONDS", seconds)
    lose(site, [KEYS[SLICE], KEYS[6 * SLICE]])
    assert f"d: {found} batches are void" in (site.tick("reconcile", kept).skip_message or "")
    assert site.cursors["reconcile"] == ("d:0" if found == 2 else "d:7")


def test_a_batch_that_was_made_again_before_its_loss_is_written_down_is_not_void(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    kept = sensors(site)
    for _ in range(BATCHES // SLICE):
        site.tick("reconcile", kept)
    lose(site, LOST[:2])
    look = reconcile.Reconciler.look

    def looked(reconciler: reconcile.Reconciler, number: int = 0) -> reconcile.Findings:
        if number == 1:
            site.commit(LOST[0], generation=1)
        return look(reconciler, number)

    monkeypatch.setattr(reconcile.Reconciler, "look", looked)
    assert "d: 1 batches are void" in (site.tick("reconcile", kept).skip_message or "")
    assert not ledger.ledger_versions(site.instance, "d")[LOST[0]].void
