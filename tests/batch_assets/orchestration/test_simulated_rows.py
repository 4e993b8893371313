"""Simulated rows and those of a model never stand in one table, and nobody gets simulated ones unasked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from support.dataset_project import MODEL, DatasetProject, dataset_project
from support.plain_engine import PlainEngine, plain_engine
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.snapshots import commit, questions, write_snapshot

from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.catalog import ledger
from batch_assets.catalog.catalog_reader import Catalog
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish as publish_table
from batch_assets.publishing.published_table import published_table
from batch_assets.publishing.verify import ledger_of_reports, verify
from batch_assets.tags import ENDPOINT_TAG, REFRESH_TAG, SIMULATE_TAG
from resources.endpoints import allow
from resources.store.dataset_store import DatasetStore

QUESTIONS = [f"What is {i} plus {i}?" for i in range(20)]
LAST = "00001"


@pytest.fixture(scope="module")
def simulator() -> Iterator[SimulatedEngine]:
    with simulated_engine("--speed", "100", "--max-num-seqs", "16", model=MODEL) as engine:
        yield engine


@pytest.fixture
def real() -> Iterator[PlainEngine]:
    with plain_engine(MODEL) as engine:
        yield engine


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DatasetProject]:
    with dataset_project(tmp_path) as site:
        site.source(QUESTIONS)
        yield site


def refresh(site: DatasetProject, url: str | None = None, **tags: str) -> dg.ExecuteInProcessResult:
    """What the refresh job does."""
    if url:
        allow(site.folder, url, None)
        tags[ENDPOINT_TAG] = url
    return site.materialize("prompts", tags={REFRESH_TAG: "d", **tags})


def missing(site: DatasetProject) -> list[str]:
    entries = site.store.entries(site.manifest().snapshot)
    return [entry.key for entry in ledger.missing(entries, ledger.ledger_versions(site.instance, "d"))]


def all_rows(site: DatasetProject, url: str) -> bool:
    return refresh(site, url).success and site.run_rows("00000", LAST, url).success


def publish(site: DatasetProject) -> bool:
    """Publish; whether the table says that it is simulated."""
    assert site.materialize("dataset").success
    table = published_table(site.store)
    assert table is not None
    return table.simulated


@pytest.mark.slow
def test_simulated_batches_are_made_anew_for_a_real_engine(
    site: DatasetProject, simulator: SimulatedEngine, real: PlainEngine
) -> None:
    assert all_rows(site, simulator.url)
    assert publish(site) and not missing(site)
    assert refresh(site, simulator.url).success and not missing(site)  # the same kind: nothing to do
    (site.folder / "fleet.yaml").unlink()
    assert refresh(site).success and not missing(site)  # no engine: the table stays
    assert refresh(site, real.url).success
    assert missing(site) == ["00000", LAST]
    anew = [key for key, version in ledger.ledger_versions(site.instance, "d").items() if version.anew]
    spec, folder = site.specs["d"]
    assert WorkloadEstimator(spec, site.store, folder).look(anew).rows == 20
    found = verify(site.store, ledger_of_reports(Catalog(site.instance, "d").reports()))
    assert [one.kind for one in found.differences if one.batch] == ["missing_batch"] * 2
    assert site.run_rows("00000", LAST, real.url).success
    assert len(real.requests) == 20 and not missing(site) and not publish(site)
    assert verify(site.store, ledger_of_reports(Catalog(site.instance, "d").reports())).differences == ()


@pytest.mark.slow
def test_simulated_rows_come_neither_over_nor_beside_those_of_a_model(
    site: DatasetProject, simulator: SimulatedEngine, real: PlainEngine
) -> None:
    assert refresh(site, real.url).success and site.run_rows("00000", "00000", real.url).success
    assert not refresh(site, simulator.url).success
    assert "expected an engine that is not simulated" in site.reason() and "another name" in site.reason()
    assert not site.run_rows(LAST, LAST, simulator.url).success  # by hand, without a refresh
    assert "rows of a real model" in site.reason()
    assert not site.run_rows("00000", "00000", simulator.url, config={"regenerate": True}).success
    assert "rows of a real model" in site.reason()
    assert [batch.name.rpartition("-")[2] for batch in site.store.current_objects(
        site.store.entries(site.manifest().snapshot)).values()] == ["g0.parquet"]  # fmt: skip
    assert site.run_rows(LAST, LAST, real.url).success
    assert refresh(site, simulator.url).success  # nothing is missing: nobody is asked


@pytest.mark.slow
def test_no_model_is_asked_about_the_texts_of_a_simulator(
    tmp_path: Path, simulator: SimulatedEngine, real: PlainEngine
) -> None:
    with dataset_project(tmp_path, source={"dataset": "topics"}, id=None, prompt={"user": "{{ output }}"}) as site:
        topics = DatasetStore(site.store.objects, "topics")
        manifest = write_snapshot(topics, questions(3))
        commit(topics, manifest)
        publish_table(topics, manifest, card=Card(), now=0.0, workdir=tmp_path)
        assert refresh(site, simulator.url).success
        assert not refresh(site, real.url).success
        assert "expected a table of topics that a model wrote" in site.reason() and not real.requests


@pytest.mark.slow
def test_a_real_engine_writes_no_rows_beside_simulated_ones(
    site: DatasetProject, simulator: SimulatedEngine, real: PlainEngine
) -> None:
    assert refresh(site, simulator.url).success and site.run_rows("00000", "00000", simulator.url).success
    assert not site.run_rows(LAST, LAST, real.url).success
    assert "other batches of the dataset are simulated" in site.reason() and "d_refresh" in site.reason()


@pytest.mark.slow
def test_without_an_engine_the_refresh_says_what_can_be_had(site: DatasetProject) -> None:
    (site.folder / "fleet.yaml").unlink()
    assert not refresh(site).success
    for words in ("no engine for", "docs/operations.md#llamacpp", "--endpoint", "docs/fleet.md", "--simulate"):
        assert words in site.reason()
    assert not site.run_rows("00000", LAST, None).success
    assert "no engine for" in site.reason()
    assert site.fleet_db.fleet(ended=True) == []  # nothing was rented
    assert refresh(site, **{SIMULATE_TAG: "true"}).success


@pytest.mark.slow
def test_without_an_engine_rows_of_a_model_are_no_reason_to_speak_of_a_simulator(
    site: DatasetProject, real: PlainEngine
) -> None:
    assert refresh(site, real.url).success and site.run_rows("00000", "00000", real.url).success
    (site.folder / "fleet.yaml").unlink()
    assert not refresh(site).success
    assert "no engine for" in site.reason() and "expected an engine that is not simulated" not in site.reason()
    assert not refresh(site, **{SIMULATE_TAG: "true"}).success
    assert "expected an engine that is not simulated" in site.reason()


def test_a_word_that_is_neither_true_nor_false_is_refused(site: DatasetProject) -> None:
    assert not refresh(site, **{SIMULATE_TAG: "yes"}).success
    assert "tag batch/simulate: expected true or false, found 'yes'" in site.reason()
