"""Datasets that are declared in Python: the checks of a defs.yaml, frames as files, a code location, a preview."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated_engine import simulated_engine
from support.snapshots import commit

from batch_assets import (
    dataset_spec,
    generated_dataset,
    generated_datasets,
    preview,
    published_tables,
    table_input,
)
from batch_assets.from_python.frame_files import KEPT, write_frame
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.files import find_files
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

CITIES = pl.DataFrame({"city": ["Rome", "Oslo", "Lima"], "country": ["Italy", "Norway", "Peru"]})
PROMPT = "Describe {{ city }}."


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("BATCH_ASSETS_")]:
        monkeypatch.delenv(name)
    for name, folder in {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store"}.items():
        (tmp_path / folder).mkdir()
        monkeypatch.setenv(name, str(tmp_path / folder))
    return tmp_path / "home"


def cities(source: Any = CITIES, **keys: Any) -> GeneratedDatasetSpec:
    return dataset_spec(**{"name": "cities", "prompt": PROMPT, "model": "tiny", **keys}, source=source)


def test_the_same_spec_as_that_of_a_file(tmp_path: Path) -> None:
    keys = {"sampling": {"temperature": 0}, "keep_columns": ["country"], "samples": 1}
    file = tmp_path / "cities.csv"
    attributes = {"name": "cities", "source": {"path": str(file)}, "prompt": {"user": PROMPT}, "model": "tiny", **keys}
    assert cities(file, **keys) == cities(str(file), **keys) == load_spec(attributes, "defs.yaml")
    grid = {"grid": {"city": ["Rome", "Oslo"]}}
    assert cities(grid) == load_spec(attributes | {"source": grid, "keep_columns": [], "sampling": {}}, "defs.yaml")
    text = cities(task="completion", prompt="Once upon a time in {{ city }}")
    assert text.prompt.text is not None and text.prompt.user is None


def test_relative_paths_start_at_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cities("a/*.parquet").source.path == str(tmp_path / "a/*.parquet")
    assert cities("s3://bucket/a.parquet").source.path == "s3://bucket/a.parquet"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"name": "Two Cities"}, "name: expected 1 to 63 characters"),
        ({"temperature": 1}, "temperature"),
        ({"prompt": "Describe {city}."}, "expected a column in double braces"),
        ({"source": 7}, "source: expected"),
        ({"source": CITIES.clear()}, "source: expected a frame with rows, found none, and 2 columns"),
        ({"source": pl.DataFrame({"city": [object()]})}, "source: expected columns that Parquet has"),
        ({"name": "../../etc/passwd"}, "name: expected 1 to 63 characters"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(keys: dict[str, Any], said: str, home: Path) -> None:
    with pytest.raises(SpecError) as error:
        cities(**keys)
    assert said in str(error.value)
    assert [*(home / "frames").glob("*")] == []


def test_a_frame_is_one_file_by_its_content(home: Path) -> None:
    first = cities().source.path
    assert first == cities(CITIES.lazy()).source.path == cities(pl.concat([CITIES[:1], CITIES[1:]])).source.path
    assert pl.read_parquet(str(first)).equals(CITIES)
    assert cities(CITIES[:2]).source.path != first
    for number in range(KEPT + 3):
        newest = cities(CITIES.with_columns(n=number)).source.path
    dataset_spec("cities_too", CITIES, PROMPT, "tiny")
    left = sorted(file.name for file in (home / "frames").iterdir())
    assert len(left) == KEPT + 1 and Path(str(newest)).name in left and not [name for name in left if name[0] == "."]


def test_a_frame_that_is_declared_again_is_no_file_that_changed_for_who_reads_it(home: Path) -> None:
    path = str(cities().source.path)
    (file,) = find_files(path, home)
    before = file.stamp()
    assert cities().source.path == path
    assert file.stamp() == before
    for number in range(KEPT - 1):
        cities(CITIES.with_columns(n=number))
    cities()  # is the newest again
    cities(CITIES[:2])
    assert file.stamp() == before


def test_the_preview_of_a_dataset_reads_the_published_table_of_another(home: Path) -> None:
    notes = dataset_spec("notes", {"dataset": "cities"}, "Shorter: {{ output }}", "tiny")
    with pytest.raises(SourceError, match="expected a published table of cities, found none"):
        preview(notes, rows=1)
    store = DatasetStore(open_objects(str(home.parent / "store")), "cities")
    manifest = build_snapshot(cities(), store, now=1.0, workdir=home.parent / "work")
    commit(store, manifest, answer=lambda row, number: f"answer {number}")
    publish(store, manifest, card=Card(), now=1.0, workdir=home.parent)
    shown = preview(notes, rows=1)
    assert shown["prompt"][0][0]["content"] == "Shorter: answer 0"


def test_datasets_that_read_each_other_in_a_circle_are_refused(home: Path) -> None:
    sources = {"a": {"dataset": "b"}, "b": {"asset": "c/rows"}, "c": {"dataset": "a"}}
    specs = [dataset_spec(name, source, PROMPT, "tiny") for name, source in sources.items()]
    with pytest.raises(SpecError, match="found a → b → c → a"):
        generated_datasets(*specs)


@pytest.mark.slow
@given(st.lists(st.text() | st.none(), min_size=1, max_size=20), st.integers(1, 20))
def test_how_a_frame_came_about_does_not_change_its_file(values: list[str | None], cut: int) -> None:
    frame = pl.DataFrame({"city": pl.Series(values, dtype=pl.String)})
    pieces = pl.concat([frame[:cut], frame[cut:]], rechunk=False)
    assert write_frame("any", frame) == write_frame("any", pieces)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as found:
        yield found


def read(instance: dg.DagsterInstance, frame: pl.DataFrame) -> DatasetStore:
    """Read the source, as the job of a refresh does."""
    defs = generated_dataset(name="cities", source=frame, prompt=PROMPT, model="tiny", keep_columns=["country"])
    done = defs.resolve_job_def("cities_refresh").execute_in_process(instance=instance, raise_on_error=False)
    failed = [event.step_failure_data.error for event in done.all_events if event.is_step_failure]
    # Nothing is there that serves the model: the source is read all the same.
    assert done.success or "tiny" in str(failed), failed
    return DatasetStore(open_objects(os.environ["BATCH_ASSETS_STORE"]), "cities")


@pytest.mark.slow
def test_a_refresh_sees_what_changed_in_a_frame(instance: dg.DagsterInstance) -> None:
    store = read(instance, CITIES)
    first = store.manifest(store.current_snapshot() or "")
    assert (first.rows, first.added, first.keep_columns) == (3, 3, ["country"])
    read(instance, CITIES)
    assert store.current_snapshot() == first.snapshot
    read(instance, pl.concat([CITIES[1:], pl.DataFrame({"city": ["Kyiv"], "country": ["Ukraine"]})]))
    second = store.manifest(store.current_snapshot() or "")
    assert (second.added, second.removed, second.unchanged) == (1, 1, 2)


def test_a_code_location_has_all_that_its_datasets_need() -> None:
    other = dataset_spec("rivers", {"grid": {"river": ["Nile"]}}, "Where is the {{ river }}?", "tiny")

    @dg.asset(ins={"rivers": table_input("rivers"), "others": table_input("others")})
    def mine(rivers: pl.LazyFrame, others: pl.LazyFrame) -> None: ...

    defs = dg.Definitions.merge(
        generated_datasets(cities(), other), published_tables("others"), dg.Definitions(assets=[mine])
    )
    dg.Definitions.validate_loadable(defs)
    names = {sensor.name for sensor in defs.sensors or ()}
    assert {"launcher", "publisher", "capacity", "reaper", "watchdog", "reconcile"} <= names
    assert not {"cost_report", "billing_report"} & names  # of the platform's own location
    assert defs.resolve_job_def("rivers_refresh")
    with pytest.raises(SpecError, match="'rivers' twice"):
        generated_datasets(other, other)


def test_a_code_location_says_nothing_of_dagsters_own_betas(home: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        generated_datasets(cities())
    assert [one for one in said if issubclass(one.category, dg.BetaWarning | dg.PreviewWarning)] == []


def test_a_preview_shows_prompts_and_rows_that_cannot_be_used() -> None:
    frame = pl.DataFrame({"city": ["Rome", None, "Lima"]})
    found = preview(cities(frame), rows=3)
    assert found.columns == ["prompt", "refused", "file", "line"]
    assert found["prompt"][0].to_list() == [{"role": "user", "content": "Describe Rome."}]
    assert found["prompt"][1] is None and "city" in found["refused"][1]
    assert preview(cities(task="completion"), rows=1)["prompt"].to_list() == ["Describe Rome."]


def test_with_an_engine_a_preview_has_answers_also_in_an_event_loop(home: Path) -> None:
    with simulated_engine("--speed", "50", model="tiny") as engine:

        async def cell() -> pl.DataFrame:
            return preview(cities(), rows=2, endpoint=engine.url)

        found = asyncio.run(cell())
    assert found["problem"].to_list() == [None, None] and found["finish_reason"].null_count() == 0
    assert found.columns[:2] == ["prompt", "output"]  # what a notebook shows of a wide frame
    assert all(found["output"].to_list()) and min(found["completion_tokens"]) > 0
    assert not [*Path(os.environ["BATCH_ASSETS_STORE"]).iterdir()]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"rows": 0}, "rows: expected 1 to 100"), ({"endpoint": "ftp://x"}, "endpoint: expected a URL")],
)
def test_a_preview_that_cannot_be_made_says_why(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        preview(cities(), **options)
