"""After a change in the file of a dataset, before the run: `status`, `verify` and `plan` say what it would ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.dataset_project import MODEL, DatasetProject, dataset_project
from support.plain_engine import plain_engine

from batch_assets.cli.dataset_commands import plan, status_command
from batch_assets.cli.dataset_commands.declared_changes import DeclaredChanges
from batch_assets.request_status.dataset_status import Observer
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.models import GeneratedDatasetSpec

SAID = "d: 20 rows are new, or changed in the file or its source since the snapshot: `batch-assets run d` would ask"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetProject]:
    """20 rows, generated."""
    with dataset_project(tmp_path) as site, plain_engine(MODEL) as engine:
        site.source([f"What is {i} plus {i}?" for i in range(20)])
        assert site.materialize("prompts").success
        assert site.run_rows("00000", "00001", engine.url).success

        @contextmanager
        def observing(_: object) -> Iterator[list[Observer]]:
            yield [observer(site)]

        for module in (plan, status_command):
            monkeypatch.setattr(module, "observing", observing)
        monkeypatch.setattr(plan, "the_fleet", lambda: site.fleet)
        monkeypatch.setattr(status_command, "dagster_home", lambda: tmp_path)
        yield site


def observer(site: DatasetProject) -> Observer:
    return Observer(site.instance, site.fleet_db, site.store)


def changed(site: DatasetProject) -> GeneratedDatasetSpec:
    """The dataset after its prompt was written anew."""
    spec, _ = site.specs["d"]
    return spec.model_copy(update={"prompt": spec.prompt.model_copy(update={"user": "Say: {{ question }}"})})


@pytest.mark.slow
def test_a_changed_prompt_changes_every_row_and_a_changed_line_one(site: DatasetProject) -> None:
    spec, folder = site.specs["d"]
    assert DeclaredChanges.look(spec, folder, observer(site)).lines("d") == []
    assert DeclaredChanges.look(changed(site), folder, observer(site)).lines("d")[0].startswith(SAID)
    site.source([f"What is {i} plus {i}?" for i in range(19)] + ["And now?", "A new one?"])
    assert DeclaredChanges.look(spec, folder, observer(site)) == DeclaredChanges(2)
    assert site.store.current_snapshot() == site.manifest().snapshot  # nothing was written
    (folder / "questions.jsonl").unlink()
    assert "cannot be compared" in DeclaredChanges.look(spec, folder, observer(site)).lines("d")[0]


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, "question"])
def test_rows_that_the_source_no_longer_has_are_said(site: DatasetProject, key: str | None) -> None:
    """The table has them until the next run, so that it is not as its file and its source say it."""
    spec, folder = site.specs["d"]
    if key is not None:
        spec = spec.model_copy(update={"id": key})
        build_snapshot(spec, site.store, now=2.0, workdir=folder / "work", base=folder)
    site.source([f"What is {i} plus {i}?" for i in range(17)])
    found = DeclaredChanges.look(spec, folder, observer(site))
    assert found == DeclaredChanges(0, 3)
    (said,) = found.lines("d")
    assert said == "d: 3 rows are in the table and no longer in its source: `batch-assets run d` would remove them"


@pytest.mark.slow
def test_status_verify_and_plan_say_so(site: DatasetProject, capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = site.specs["d"]
    status_command.show_status({"d": 0}, {"d": None}, (), declared=(changed(site), folder), watch=False, as_json=False)
    assert SAID in capsys.readouterr().out
    status_command.show_status({"d": 0}, {"d": None}, (), declared=(changed(site), folder), watch=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["rows_changed"] == 20
    status_command.show_verification(changed(site), folder)
    assert SAID in capsys.readouterr().out
    found = plan.proposal(changed(site), folder, {})
    assert found.work.rows == 20
    assert any("20 rows are new, or changed" in str(one) for one in found.work.assumptions)
    assert "nothing is left" in str(plan.proposal(*site.specs["d"], {}).work.assumptions)
