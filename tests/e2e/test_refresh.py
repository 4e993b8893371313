"""A refresh pays only for rows that changed; a re-drive only for dead letters; regenerate for everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from e2e.harness import Platform, eventually, platform, shared_data
from e2e.test_losses import ROWS, answered
from resources.store.dataset_store import DatasetStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def write_source(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def questions() -> list[dict[str, Any]]:
    lines = (shared_data() / "gsm8k" / "train.jsonl").read_text().splitlines()[:ROWS]
    return [{"question": json.loads(line)["question"], "answer": json.loads(line)["answer"]} for line in lines]


def spec(name: str, file: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "source": {"path": str(file)},
        "prompt": {"user": "{{ question }}"},
        "sampling": {"temperature": 0.7, "max_tokens": 256},
        "keep_columns": ["answer"],
        **more,
    }


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform for all tests of this file, each with a dataset of its own."""
    folder, lines = tmp_path_factory.mktemp("refresh"), questions()
    for number, line in enumerate(lines):
        line["number"] = number
    sources = {name: folder / f"{name}.jsonl" for name in ("with_ids", "without_ids", "refused", "regenerated")}
    for name in ("with_ids", "without_ids"):
        write_source(sources[name], lines)
    write_source(sources["regenerated"], lines[:500])
    few = [line | {"question": line["question"] + " <<refused>>" * (i % 100 == 0)} for i, line in enumerate(lines)]
    write_source(sources["refused"], few[:1000])
    more: dict[str, dict[str, Any]] = {"with_ids": {"id": "number"}, "refused": {"checks": {"max_dead_rate": 0.1}}}
    specs = [spec(name, source, **more.get(name, {})) for name, source in sources.items()]
    for one in specs[1:]:
        document = {"type": "batch_assets.GeneratedDataset", "attributes": {"model": "test-model", **one}}
        (folder / "defs" / one["name"]).mkdir(parents=True)
        (folder / "defs" / one["name"] / "defs.yaml").write_text(yaml.safe_dump(document))
    fault = [{"kind": "too_long", "match": {"contains": "<<refused>>"}}]
    engine = ["--speed", "30", "--faults", json.dumps(fault)]
    with pytest.MonkeyPatch.context() as patch, platform(folder, patch, specs[0], simulator=engine) as site:
        yield site


def dataset(stack: Platform, name: str) -> Platform:
    """One of the datasets of the platform."""
    return replace(stack, name=name, store=DatasetStore(stack.store.objects, name))


def asked(site: Platform) -> int:
    """Requests that the engine has had, of all datasets."""
    return sum(site.simulator.received().values())


def refresh(site: Platform, *, job: str = "refresh", seconds: float = 180) -> str:
    """Run the job and wait until another version of the table is published; returns it."""
    before = site.store.current_published()
    assert site.finish(site.launch_job(f"{site.name}_{job}")) == dg.DagsterRunStatus.SUCCESS

    def newer() -> str | None:
        version = site.store.current_published()
        return version if version != before else None

    version: str = eventually(newer, seconds, "a newer table")
    eventually(lambda: all(run.is_finished for run in site.instance.get_runs()), 60, "all runs to end")
    return version


@pytest.mark.parametrize("with_ids", [True, pytest.param(False, marks=pytest.mark.soak("rows"))])
def test_insert_change_delete_asks_for_exactly_two_rows(stack: Platform, with_ids: bool) -> None:
    site, before = dataset(stack, "with_ids" if with_ids else "without_ids"), asked(stack)
    source = site.home.parent / f"{site.name}.jsonl"
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    refresh(site)
    assert asked(site) == before + ROWS
    first = {line["row_id"]: line for line in site.published_rows()}

    lines[ROWS - 1000]["question"] += " Explain each step."
    del lines[2000]
    lines.insert(0, {"number": 100_000, "question": "How many legs have 7 cats?", "answer": "28"})
    write_source(source, lines)
    refresh(site)
    assert asked(site) == before + ROWS + 2
    second = {line["row_id"]: line for line in site.published_rows()}
    assert len(second) == ROWS
    same = [row for row in second if row in first and second[row]["output"] == first[row]["output"]]
    assert len(same) == ROWS - 2
    assert all(second[row]["batch"] == first[row]["batch"] for row in same)
    assert all(second[row]["run_id"] == first[row]["run_id"] for row in same)
    assert set(stale_statuses(site).values()) == {"FRESH"}

    # Unchanged: nothing is asked, nothing is written.
    version = site.store.current_published()
    assert site.finish(site.launch_job(f"{site.name}_refresh")) == dg.DagsterRunStatus.SUCCESS
    runs = len(site.instance.get_runs())
    ticks_later(site)
    assert len(site.instance.get_runs()) == runs
    assert site.store.current_published() == version
    assert asked(site) == before + ROWS + 2


def stale_statuses(site: Platform) -> dict[str, str]:
    """Dagster's own mark of every asset of the dataset: the five version tags of hand-logged events keep it right."""
    nodes = site.gql("{ assetNodes { assetKey { path } staleStatus } }")["assetNodes"]
    found = {"/".join(node["assetKey"]["path"]): node["staleStatus"] for node in nodes}
    return {key: status for key, status in found.items() if key.startswith(f"{site.name}/")}


def ticks_later(site: Platform, count: int = 2) -> None:
    """Wait until the launcher has looked `count` more times."""

    def ticks() -> int:
        for state in site.instance.all_instigator_state():
            if state.instigator_name == "launcher":
                return len(site.instance.get_ticks(state.instigator_origin_id, state.selector_id))
        return 0

    before = ticks()
    eventually(lambda: ticks() >= before + count, 60, "ticks of the launcher")


@pytest.mark.soak("rows")
def test_a_redrive_asks_for_dead_letters_only(stack: Platform) -> None:
    site, answers = dataset(stack, "refused"), answered(stack).total()
    refresh(site)
    first = {line["row_id"]: line for line in site.published_rows()}
    assert sum(line["error"] is not None for line in first.values()) == 10
    site.simulator.kill()
    site.simulator.arguments = ["--speed", "30"]
    site.simulator.start()
    before = asked(site)
    refresh(site, job="redrive")
    second = {line["row_id"]: line for line in site.published_rows()}
    assert asked(site) == before + 10
    assert len(second) == 1000
    assert all(line["error"] is None for line in second.values())
    assert all(second[row]["output"] == line["output"] for row, line in first.items() if line["error"] is None)
    assert answered(site).total() == answers + 1000
    ticks_later(site, 3)
    assert asked(site) == before + 10


@pytest.mark.soak("rows")
def test_regenerate_buys_new_rows_and_overwrites_nothing(stack: Platform) -> None:
    site, answers = dataset(stack, "regenerated"), answered(stack).total()
    refresh(site)
    before = {info.path for info in site.store.objects.list(f"{site.name}/batches/")}
    version = site.store.current_published()
    selector = {"repositoryLocationName": "batch_assets", "repositoryName": "__repository__"}
    params = {
        "selector": {**selector, "jobName": "__ASSET_JOB", "assetSelection": [{"path": [site.name, "rows"]}]},
        "mode": "default",
        "runConfigData": {"ops": {f"{site.name}__rows": {"config": {"regenerate": True}}}},
        "executionMetadata": {"tags": [{"key": "dagster/partition", "value": "00001"}]},
    }
    found = site.gql(
        "mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename "
        "... on LaunchRunSuccess { run { runId } } } }",
        p=params,
    )["launchRun"]
    assert site.finish(found["run"]["runId"]) == dg.DagsterRunStatus.SUCCESS
    eventually(lambda: site.store.current_published() != version, 60, "a newer table")
    after = {info.path for info in site.store.objects.list(f"{site.name}/batches/")}
    assert before < after
    assert [path for path in after - before if path.endswith("-g1.parquet") and "/00001/" in path]
    assert answered(site).total() == answers + 750
