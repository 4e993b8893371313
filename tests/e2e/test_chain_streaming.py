"""Steps of a chain that overlap (`source.streaming`), by the command that a user types, with a kill in the middle."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
import yaml

from batch_assets.publishing.published_table import published_table
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.models import load_spec
from e2e.command_line import NAME, ROWS, SPEC, CommandProject
from e2e.command_line import site as new_site
from e2e.harness import eventually
from gpu_runner.fleet_database.database import FleetDatabase
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

pytestmark = [pytest.mark.slow, pytest.mark.soak("dagster"), pytest.mark.timeout(900)]
STEPS = [NAME, "questions", "answers"]
SAMPLING = {"max_tokens": 32}
SHARED = {"sampling": SAMPLING, "model": SPEC["model"], "batch_rows": SPEC["batch_rows"], "batches_per_run": 5}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CommandProject]:
    with new_site(tmp_path) as found:
        chained = [SPEC | {"sampling": SAMPLING}]
        for before, name in itertools.pairwise(STEPS):
            source = {"dataset": before, "streaming": True}
            chained.append({**SHARED, "name": name, "source": source, "prompt": {"user": f"{name} {{{{ output }}}}"}})
        documents = [{"type": "batch_assets.GeneratedDataset", "attributes": one} for one in chained]
        (found.folder / "defs" / NAME / "defs.yaml").write_text(yaml.safe_dump_all(documents))
        engines(found, speed=0.01)  # slow enough for a step to begin before the one above ends
        yield found


def engines(site: CommandProject, speed: float) -> None:
    """One for each step, as a run holds its own."""
    made = [{"name": name, "kind": "simulated", "max_num_seqs": 64, "speed": speed} for name in STEPS]
    (site.folder / "fleet.yaml").write_text(yaml.safe_dump({"engines": made}))


def store(site: CommandProject, name: str) -> DatasetStore:
    return DatasetStore(open_objects(str(site.folder / "store")), name)


def test_a_step_begins_before_the_one_above_ends_and_kills_lose_nothing(site: CommandProject, tmp_path: Path):
    command = site.start("run", "answers", "--upstream", "--json")
    below = store(site, "questions")
    eventually(lambda: bool(below.objects_by_batch()), 400, "committed batches of the second step")
    assert store(site, NAME).current_published() is None, "the first step is not done"
    status = json.loads(site.ask("status", "questions", "--json")[1])
    assert status["streaming"]["read"] < status["streaming"]["of"] == ROWS and status["table"] is None
    # A worker dies, and then the command with all of its Dagster.
    with contextlib.closing(FleetDatabase(f"sqlite:///{site.home}/fleet.db")) as fleet_db:
        for pid in [beat.pid for beat in fleet_db.runs() if beat.dataset == "questions" and beat.first_key][:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    before = set(below.objects_by_batch())
    command.interrupt(signal.SIGKILL)
    command.process.wait(30)
    eventually(lambda: not command.left(), 60, "the end of what the command had started")

    engines(site, speed=20.0)
    command = site.start("run", "answers", "--upstream", "--json")
    status_of, output = command.end(500)
    found = json.loads(output)
    assert (status_of, found["complete"]) == (0, True), command.said()
    objects = {name: store(site, name).objects_by_batch() for name in STEPS}
    assert before <= set(objects["questions"])
    for name in STEPS:
        table = published_table(store(site, name))
        assert table is not None and table.dead == 0
        rows = pl.read_parquet(table.glob(store(site, name).objects))
        assert rows["row_id"].n_unique() == rows.height == ROWS, name
        # No batch was made twice: none had other rows later than when it was asked.
        assert {key: len(made) for key, made in objects[name].items()} == dict.fromkeys(objects[name], 1), name
    # Read at once, the table gives the same snapshot, in the same batches.
    for before_it, name in itertools.pairwise(STEPS):
        above = published_table(store(site, before_it))
        assert above is not None
        source = {"dataset": before_it, "streaming": True}
        spec = load_spec(
            {**SHARED, "name": name, "source": source, "prompt": {"user": f"{name} {{{{ output }}}}"}}, "d.yaml"
        )
        place = f"{above.uri(store(site, before_it).objects)}/part-*.parquet"
        spec = spec.model_copy(update={"source": spec.source.model_copy(update={"path": place})})
        alone = DatasetStore(open_objects(str(tmp_path / "alone")), name)
        made = build_snapshot(spec, alone, now=0.0, workdir=tmp_path / f"work-{name}")
        assert made.snapshot == store(site, name).current_snapshot()
        assert store(site, name).snapshots() == [made.snapshot]
    assert command.left() == []
