"""A trial (`run --rows N`): the first batches only, in whole batches; they count when the rest is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from support.sensor_dataset import KEYS, S, SensorDataset

from batch_assets.catalog import ledger
from batch_assets.catalog.progress import Figures
from batch_assets.cli.dataset_commands.run import Request
from batch_assets.orchestration.active_request import WorkWatcher
from batch_assets.orchestration.trial import trial_rows, wanted_entries
from batch_assets.spec.request_options import InvalidTag
from batch_assets.tags import ROWS_TAG
from resources.store.dataset_store import BatchEntry

ENTRIES = [BatchEntry(f"{i:05d}", rows, "v", 0, i) for i, rows in enumerate((250, 250, 250, 10))]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    import contextlib

    with contextlib.ExitStack() as stack:
        yield SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack)


@pytest.mark.parametrize(
    ("rows", "batches"), [("1", 1), ("250", 1), ("251", 2), ("750", 3), ("751", 4), ("760", 4), ("99999", 4)]
)
def test_whole_batches_from_the_beginning_are_taken(rows: str, batches: int) -> None:
    assert list(wanted_entries(ENTRIES, {ROWS_TAG: rows})) == ENTRIES[:batches]


def test_without_the_tag_every_batch_is_wanted() -> None:
    assert wanted_entries(ENTRIES, {"other": "1"}) is ENTRIES
    assert trial_rows({}) is None


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", "٣", "9" * 13])
def test_a_tag_that_is_no_number_of_rows_is_refused(text: str) -> None:
    with pytest.raises(InvalidTag, match=r"tag batch/rows: expected a whole number of rows from 1, found"):
        trial_rows({ROWS_TAG: text})


def test_the_command_tags_its_request() -> None:
    assert Request("d", rows=250, request_options={"batch/objective": "fastest"}).tags() == {
        "batch/objective": "fastest",
        ROWS_TAG: "250",
    }
    assert Request("d").tags() == {}


def test_the_launcher_starts_the_first_batches_only_and_their_runs_know_it(site: SensorDataset) -> None:
    site.snapshot()
    site.request(**{ROWS_TAG: "25"})
    assert site.ranges() == [(KEYS[0], KEYS[2])]
    assert site.launches()[0].tags[ROWS_TAG] == "25"
    site.commit(*KEYS[:3])
    assert "nothing is missing" in site.reason()


def test_the_next_request_goes_on_after_the_trial(site: SensorDataset) -> None:
    site.snapshot()
    site.request(**{ROWS_TAG: "25"})
    site.commit(*KEYS[:3])
    site.request()
    assert [first for first, _ in site.ranges()] == [KEYS[3], KEYS[7], KEYS[11]]


def test_nothing_is_published_after_a_trial(site: SensorDataset) -> None:
    site.snapshot()
    site.request(**{ROWS_TAG: "25"})
    site.commit(*KEYS[:3])
    assert "9 of 12 batches are missing" in site.reason("publisher")


def test_a_trial_is_planned_for_its_own_rows_and_over_when_they_are_there(site: SensorDataset) -> None:
    site.snapshot()
    request = site.request(**{ROWS_TAG: "25"})
    spec, folder = site.specs["d"]
    watcher = WorkWatcher(spec, site.store, folder)
    found = watcher.look(site.instance, [], None)
    assert found is not None and found.work is not None
    assert (found.request, found.batches, found.work.rows) == (request, 3, 30)
    site.commit(*KEYS[:3])
    assert watcher.look(site.instance, [], None) is None
    site.request()
    found = watcher.look(site.instance, [], None)
    assert found is not None and (found.batches, found.work and found.work.rows) == (9, 90)


def test_a_trial_leaves_no_missing_batches_to_its_request(site: SensorDataset) -> None:
    site.snapshot()
    request = site.request(**{ROWS_TAG: "25"})
    target = site.fleet_db.begin_request("d", request)
    spec, folder = site.specs["d"]
    watcher = WorkWatcher(spec, site.store, folder)
    watcher.look(site.instance, [], target)
    assert watcher.missing == 3
    site.commit(*KEYS[:3])
    watcher.look(site.instance, [], target)
    assert watcher.missing == 0


def test_the_summary_says_what_is_left() -> None:
    from types import SimpleNamespace

    from batch_assets.cli.dataset_commands.run_summary import trial_done

    trial = Figures(250, 1, 1, 250, 249, 1, 5000, 9000)
    status = SimpleNamespace(dataset="d", batches=20, rows=5000)
    runner = SimpleNamespace(generated=250, taken_over=0, seconds=12.0)
    said = trial_done(status, runner, trial)  # type: ignore[arg-type]
    assert said[0] == "d: trial of 250 rows, the first batch of 20: 250 rows generated in 12 s"
    assert "249 ok, 1 dead" in said[1]
    assert "the other 4,750 rows" in said[3]


def test_runs_of_a_trial_are_over_its_own_batches(site: SensorDataset) -> None:
    site.snapshot()
    request = site.request(**{ROWS_TAG: "25"})
    site.batches(S.STARTED, KEYS[0], KEYS[2], request)
    assert ledger.rows_key("d") == dg.AssetKey(["d", "rows"])
    assert "1 runs under way" in site.reason()
