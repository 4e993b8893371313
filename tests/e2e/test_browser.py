"""What a person does in the browser: generate a dataset, look at a batch, cancel, repair."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.timing import PATIENCE

from batch_assets.catalog.ledger import ledger_versions, missing, rows_key
from e2e.browser import Browser, browser, needs_chromium
from e2e.harness import Platform, eventually, platform
from e2e.test_losses import published

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_chromium]

SLOW, FAST = ["--speed", "0.2"], ["--speed", "20"]


def tales(batch_rows: int) -> dict[str, Any]:
    """1,000 rows from a grid."""
    animals, places = [f"animal {i}" for i in range(25)], [f"place {i}" for i in range(40)]
    return {
        "name": "tales",
        "description": "One tale per animal and place.",
        "source": {"grid": {"animal": animals, "place": places}},
        "prompt": {"user": "Tell a tale of {{ animal }} at {{ place }}."},
        "sampling": {"temperature": 0.7, "max_tokens": 128},
        "checks": {"max_cut_rate": 1},  # the simulator writes up to max_tokens
        "keep_columns": ["animal", "place"],
        "batch_rows": batch_rows,
    }


def materialized(site: Platform) -> set[str]:
    return set(site.instance.get_materialized_partitions(rows_key(site.name)))


def newest_backfill(site: Platform, known: set[str]) -> str:
    """Id of the backfill that the UI has just launched."""

    def found() -> str | None:
        return next((b.backfill_id for b in site.instance.get_backfills() if b.backfill_id not in known), None)

    backfill: str = eventually(found, 30, "a new backfill")
    return backfill


def choose(ui: Browser, which: str, expected: int) -> None:
    """Press a button of the dialog until it says as many partitions; the page learns of them a little later."""
    eventually(lambda: ui.choose(which) == expected, 30, f"{expected} partitions in the dialog")


def launch(site: Platform, ui: Browser, which: str, expected: int) -> str:
    """Materialize so many partitions of rows through the dialog; returns the backfill's id."""
    known = {backfill.backfill_id for backfill in site.instance.get_backfills()}
    ui.open_asset("rows")
    ui.press("Materialize")
    choose(ui, which, expected)
    ui.shot(f"dialog-{which.lower().replace(' ', '-')}")
    ui.launch()
    return newest_backfill(site, known)


def serve(site: Platform, arguments: list[str]) -> None:
    """Start the engine anew, at its old address."""
    site.simulator.stop()
    site.simulator.arguments = arguments
    site.simulator.start()


def hold(site: Platform) -> None:
    """From now on the engine is so slow that a run cannot end by itself while its page is opened on a busy machine."""
    rule = json.dumps([{"kind": "slow", "factor": 1000, "seconds": 3600}]).encode()
    urllib.request.urlopen(f"{site.simulator.url}/simulator/faults", rule, timeout=10 * PATIENCE).close()


def check_batch_page(site: Platform, ui: Browser, key: str) -> None:
    """The partition's page shows what the batch object's footer says."""
    ui.open_asset("rows", "partitions", partition=key)
    shown = eventually(lambda: (found := ui.metadata()).get("run") and found, 30, "the batch's metadata")
    batch = next(batch for batch in site.store.objects_by_batch(key, key)[key])
    footer = site.store.footer(batch)
    assert footer.rows == 250
    for name in ("rows", "ok", "dead", "prompt_tokens", "completion_tokens"):
        assert shown[name] == str(getattr(footer, name)), name
    assert float(shown["rows_per_second"]) > 0
    assert shown["model"] == "test-model (simulated)"
    assert shown["object"] == site.store.objects.uri(site.store.batch_path(batch))
    assert shown["run"] == footer.run_id


@pytest.mark.soak("dagster")
def test_a_person_makes_a_dataset_in_the_ui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        platform(tmp_path, monkeypatch, tales(250), simulator=FAST) as site,
        browser(site.stack.url, site.name, tmp_path) as ui,
    ):
        ui.open_lineage()
        boxes = {"source", "prompts", "rows", "dataset", "dead_letters"}
        chain = {("source", "prompts"), ("prompts", "rows"), ("rows", "dataset"), ("rows", "dead_letters")}
        eventually(lambda: set(ui.nodes()) == boxes and ui.edges() == chain, 30, "the lineage")

        # Before the source was read there are no partitions, so the group's "Materialize all" has nothing to launch.
        ui.press("Materialize all")
        choose(ui, "All", 0)
        assert ui.launch_dialog().get_by_role("button", name="Launch backfill").is_disabled()
        ui.shot("materialize-all-before-prompts")
        ui.open_asset("rows")
        eventually(lambda: "no partitions until" in ui.text(), 30, "the description of rows")

        ui.open_asset("prompts")
        ui.press("Materialize")
        eventually(lambda: site.store.current_snapshot(), 60, "a snapshot")
        eventually(lambda: ui.partition_counts().get("Missing") == 4, 30, "four missing partitions on the page")

        ui.open_asset("rows")
        ui.press("Materialize")
        ui.choose_partition("00002")
        ui.shot("dialog-one-partition")
        ui.launch()
        eventually(lambda: ui.partition_counts().get("Materialized") == 1, 90, "one green partition")
        assert materialized(site) == {"00002"}
        check_batch_page(site, ui, "00002")
        ui.shot("batch")

        # One click does the rest: the job reads the source, sensors generate what is missing and publish.
        ui.open(f"/locations/batch_assets/jobs/{site.name}_refresh")
        ui.press("Materialize")
        published(site, 120)
        eventually(lambda: lineage_is_green(ui), 60, "a green lineage")
        ui.shot("lineage")
        ui.open_asset("dataset", "checks")
        eventually(lambda: ui.text().count("Succeeded") == 11, 30, "eleven checks that succeeded")
        ui.shot("checks")
        assert len(site.published_rows()) == 1000

        # "Materialize all" on what is complete reports it again and asks no engine.
        asked = sum(site.simulator.received().values())
        assert asked == 1000
        ui.open_lineage()
        ui.press("Materialize all")
        choose(ui, "All", 4)
        ui.launch()
        state = site.finish_backfill(newest_backfill(site, set()))
        assert state["status"] == "COMPLETED_SUCCESS"
        assert sum(site.simulator.received().values()) == asked


def lineage_is_green(ui: Browser) -> bool:
    ui.open_lineage()
    return "100% filled" in ui.nodes().get("rows", "") and failed_checks(ui) == 0


def failed_checks(ui: Browser) -> int:
    """Of the table, as its box in the lineage counts them; -1 when it does not say."""
    counted = re.search(r"(\d+) / (\d+) Passed", "".join(ui.nodes().values()))
    return int(counted[2]) - int(counted[1]) if counted else -1


def test_a_failed_a_canceled_and_a_missing_batch_are_repaired_in_the_ui(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        platform(tmp_path, monkeypatch, tales(50), simulator=[*FAST, "--model", "other"]) as site,
        browser(site.stack.url, site.name, tmp_path) as ui,
    ):
        site.take_snapshot()
        ui.open_asset("rows")
        ui.press("Materialize")
        ui.choose_partition("00007")
        ui.launch()
        eventually(lambda: ui.partition_counts().get("Failed") == 1, 90, "one failed partition")
        run = site.rows_runs(dg.DagsterRunStatus.FAILURE)[0]
        ui.open(f"/runs/{run.run_id}")
        eventually(lambda: "expected model test-model, found other" in ui.text(), 30, "the reason of the failure")
        ui.shot("failed-run")

        serve(site, SLOW)
        launch(site, ui, "Failed and missing", 20)
        eventually(lambda: len(materialized(site)) >= 2, 120, "two batches of a running run")
        running = site.rows_runs(dg.DagsterRunStatus.STARTED)
        assert len(running) == 1
        hold(site)
        ui.terminate_run(running[0].run_id)
        assert site.finish(running[0].run_id, 60) == dg.DagsterRunStatus.CANCELED
        ui.shot("canceled-run")
        with contextlib.closing(site.fleet_db()) as fleet_db:
            assert all(released for _, _, released in fleet_db.history(running[0].run_id))
        # The cancellation may come between the commit of a batch and its entry in the catalog: the next run reports it.
        written, kept = set(site.store.objects_by_batch("00000", "00019")), materialized(site)
        assert kept <= written
        eventually(lambda: ui.partition_counts().get("Materialized") == len(kept), 30, "what was kept on the page")

        serve(site, FAST)
        backfill = launch(site, ui, "Failed and missing", 20 - len(kept))
        assert site.finish_backfill(backfill)["status"] == "COMPLETED_SUCCESS"
        repaired = {"Materialized": 20, "Missing": 0, "Failed": 0}
        eventually(lambda: ui.partition_counts().items() >= repaired.items(), 30, "twenty green partitions")
        ui.shot("repaired")
        for key, (batch,) in site.store.objects_by_batch("00000", "00019").items():
            assert (site.store.footer(batch).run_id == running[0].run_id) == (key in written)
        published(site, 60)
        assert len(site.published_rows()) == 1000


def refresh(site: Platform, ui: Browser) -> None:
    """Start the refresh job on its page."""
    known = {run.run_id for run in site.instance.get_runs(dg.RunsFilter(job_name=f"{site.name}_refresh"))}
    ui.open(f"/locations/batch_assets/jobs/{site.name}_refresh")
    ui.press("Materialize")
    ui.shot("refresh")

    def started() -> bool:
        runs = site.instance.get_runs(dg.RunsFilter(job_name=f"{site.name}_refresh"))
        return any(run.run_id not in known for run in runs)

    eventually(started, 60, "a run of the refresh job")


def interrupted_refresh(site: Platform, ui: Browser) -> int:
    """A table; another template; a refresh in the UI, whose run is terminated there. Returns how many batches are
    left as they were."""
    refresh(site, ui)
    published(site, 120)
    file = site.home.parent / "defs" / site.name / "defs.yaml"
    file.write_text(file.read_text().replace("Tell a tale", "Tell a short tale"))
    site.gql('mutation { reloadRepositoryLocation(repositoryLocationName: "batch_assets") { __typename } }')
    serve(site, SLOW)
    known, before = {run.run_id for run in site.rows_runs()}, site.store.current_snapshot()
    refresh(site, ui)
    eventually(lambda: site.store.current_snapshot() != before, 60, "the snapshot of the new template")

    def working() -> str | None:
        started = [run.run_id for run in site.rows_runs(dg.DagsterRunStatus.STARTED) if run.run_id not in known]
        return started[0] if started and 2 <= current(site) < 20 else None

    run_id = eventually(working, 120, "two batches of the new template")
    hold(site)
    ui.terminate_run(run_id)
    assert site.finish(run_id, 60) == dg.DagsterRunStatus.CANCELED
    return 20 - current(site)


def current(site: Platform) -> int:
    """Batches that the catalog has as the newest snapshot asks for them."""
    entries = site.store.entries(site.store.current_snapshot() or "")
    return len(entries) - len(missing(entries, ledger_versions(site.instance, site.name)))


@pytest.mark.soak("dagster")
@pytest.mark.parametrize("remedy", ["all batches", "the job"])
def test_what_an_interrupted_refresh_has_left_shows_and_is_repaired_in_the_ui(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remedy: str
) -> None:
    with (
        platform(tmp_path, monkeypatch, tales(50), simulator=FAST) as site,
        browser(site.stack.url, site.name, tmp_path) as ui,
    ):
        stale = interrupted_refresh(site, ui)
        assert 0 < stale < 20
        # Dagster's bar knows no earlier snapshot.
        counts = {"Materialized": 20, "Missing": 0, "Failed": 0}
        eventually(lambda: ui.partition_counts().items() >= counts.items(), 30, "a bar without a gap")
        ui.shot("stale-bar")

        def said() -> bool:
            ui.open_asset("dataset", "checks")
            return f"{stale} of 20 batches are of an earlier snapshot" in ui.text()

        eventually(said, 60, "a check that counts what is stale")
        assert f"{site.name}_refresh" in ui.text()
        ui.shot("stale-check")
        ui.open_lineage()
        eventually(lambda: failed_checks(ui) == 1, 30, "a lineage that is not green")
        ui.shot("stale-lineage")

        # The remedies of docs/ui.md: all batches, of which those that are there cost nothing, or the job.
        serve(site, FAST)
        asked = sum(site.simulator.received().values())
        if remedy == "all batches":
            assert site.finish_backfill(launch(site, ui, "All", 20))["status"] == "COMPLETED_SUCCESS"
            assert sum(site.simulator.received().values()) - asked <= 50 * stale
        else:
            refresh(site, ui)
        eventually(lambda: lineage_is_green(ui), 120, "a green lineage")
        assert current(site) == 20
        assert len(site.published_rows()) == 1000


@pytest.mark.soak("dagster")
def test_the_page_of_a_run_has_its_progress_and_a_cancel_has_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        platform(tmp_path, monkeypatch, tales(250), simulator=["--speed", "0.03"]) as site,
        browser(site.stack.url, site.name, tmp_path) as ui,
    ):
        site.take_snapshot()
        site.launch_backfill()
        tags = {"dagster/asset_partition_range_start": site.keys()[0]}

        def generating() -> str | None:
            runs = site.instance.get_runs(dg.RunsFilter(tags=tags, statuses=[dg.DagsterRunStatus.STARTED]))
            return runs[0].run_id if runs else None

        run_id = eventually(generating, 90, "a run of rows")
        ui.open(f"/runs/{run_id}")
        eventually(lambda: re.search(r"of 1,000 rows, [\d.]+ rows/s, about", ui.text()), 60, "rows, rate and time left")
        ui.shot("run-progress")
        ui.terminate_run(run_id)
        assert site.finish(run_id) == dg.DagsterRunStatus.CANCELED
        ui.open(f"/runs/{run_id}")
        text = eventually(lambda: "RUN_CANCELED" in ui.text() and ui.text(), 30, "the end of the run")
        assert "Canceled on request: " in text
        assert "Stack Trace" not in text and "Interrupted" not in text
        ui.shot("run-canceled")


@pytest.mark.soak("dagster")
def test_rows_of_the_table_stand_on_its_page_above_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        platform(
            tmp_path, monkeypatch, {**tales(250), "prompt": {"user": "A tale of {{ animal }}."}}, simulator=FAST
        ) as site,
        browser(site.stack.url, site.name, tmp_path) as ui,
    ):
        assert site.finish(site.launch_job(f"{site.name}_refresh")) == dg.DagsterRunStatus.SUCCESS
        published(site, 120)
        ui.open_asset("dataset")
        text = eventually(lambda: "A tale of animal 0." in ui.text() and ui.text(), 30, "rows of the table")
        assert text.index("A tale of animal 0.") < text.index("\ncolumns")
        ui.shot("dataset-rows")
