"""Equal rows of a dataset with a seed: each is asked with another one, the same in every run."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.dataset_project import MODEL, DatasetProject, dataset_project
from support.plain_engine import plain_engine

from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.models import load_spec
from gpu_runner.client.protocol import Repair, Requests
from gpu_runner.rows import Generation, Row
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

KEY = "0" * 64


def asked_seeds(folder: Path, seed: int | None) -> list[int | None]:
    folder.mkdir()
    more = {} if seed is None else {"seed": seed}
    source = {"grid": {"word": ["moon"], "number": [1, 2, 3]}}
    with (
        plain_engine(MODEL) as engine,
        dataset_project(
            folder,
            source=source,
            prompt={"user": "A line on the {{ word }}."},
            id=None,
            sampling={"temperature": 1, "max_tokens": 16, **more},
        ) as site,
    ):
        assert site.materialize("prompts").success
        assert site.run_rows("00000", "00000", engine.url).success
        return [one.get("seed") for one in engine.requests]


@pytest.mark.slow
def test_each_of_equal_rows_has_a_seed_of_its_own_that_stays(tmp_path: Path) -> None:
    first = asked_seeds(tmp_path / "first", 7)
    assert len(first) == 3 and 7 in first and len(set(first)) == 3
    assert sorted(map(int, first)) == sorted(map(int, asked_seeds(tmp_path / "second", 7)))  # type: ignore[arg-type]
    assert asked_seeds(tmp_path / "none", None) == [None] * 3


@pytest.mark.parametrize(("row_id", "own"), [(f"{KEY}#0", False), (f"{KEY}#1", True), ("id#1", False), ("1", False)])
def test_only_further_occurrences_are_asked_with_another_seed(row_id: str, own: bool) -> None:
    row = Row("00000", row_id, KEY, b'"p"')
    assert (row.seeded(7).seed is not None) == own
    assert row.seeded(None) == row
    if own:
        assert row.seeded(7).seed != row.seeded(8).seed
        assert 0 <= (row.seeded((1 << 63) - 1).seed or 0) < 1 << 31


def test_rows_with_ids_that_ask_the_same_have_a_seed_each_by_their_ids() -> None:
    first, second, third = (Row("00000", row_id, KEY, b'"p"', repeats=row_id != "a") for row_id in "abc")
    assert first.seeded(7) == first and second.seeded(None) == second
    seeds = [second.seeded(7).seed, third.seeded(7).seed, second.seeded(8).seed]
    assert None not in seeds and 7 not in seeds and len(set(seeds)) == 3
    assert replace(second, batch="00009", prompt=b'"q"').seeded(7).seed == seeds[0]


def write(site: DatasetProject, *ids: str) -> None:
    lines = [json.dumps({"id": row_id, "question": "A line on the moon."}) for row_id in ids]
    (site.folder / "questions.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_equal_rows_with_ids_keep_their_seeds_and_answers_over_refreshes(tmp_path: Path) -> None:
    sampling = {"temperature": 1, "max_tokens": 16, "seed": 7}
    with plain_engine(MODEL) as engine, dataset_project(tmp_path, sampling=sampling) as site:
        write(site, "a", "b", "c")
        assert site.materialize("prompts").success
        assert site.run_rows("00000", "00000", engine.url).success
        seeds = [one["seed"] for one in engine.requests]
        assert len(seeds) == 3 and seeds.count(7) == 1 and len(set(seeds)) == 3
        engine.requests.clear()
        write(site, "new", "c", "b", "a")  # of these only the new one is asked, with a seed of its own
        assert site.materialize("prompts").success
        assert site.run_rows("00000", "00000", engine.url).success
        (asked,) = (one["seed"] for one in engine.requests)
        assert asked not in seeds


def rows_of(site_store: DatasetStore, manifest: SnapshotManifest) -> dict[str, bool]:
    batches = site_store.rows(manifest, site_store.entries(manifest.snapshot))
    return {row.row_id: row.repeats for _, rows in batches for row in rows}


def snapshot(store: DatasetStore, folder: Path, ids: str, **more: Any) -> dict[str, bool]:
    """Which rows of a new snapshot repeat another one. Capital letters are ids of other prompts."""
    source = folder / "q.jsonl"
    source.write_text("".join(json.dumps({"id": i, "q": "same" if i.islower() else i}) + "\n" for i in ids))
    attributes = {
        "name": "d",
        "source": {"path": str(source)},
        "prompt": {"user": "{{ q }}"},
        "model": "m",
        "id": "id",
        "batch_rows": 2,
        "sampling": {"temperature": 1, "seed": 7},
        **more,
    }
    work = Path(tempfile.mkdtemp(dir=folder))
    return rows_of(store, build_snapshot(load_spec(attributes, folder / "defs.yaml"), store, now=0.0, workdir=work))


@pytest.mark.slow
def test_the_row_that_was_there_first_stays_the_one_with_the_dataset_s_seed(
    local_objects: Objects, tmp_path: Path
) -> None:
    store = DatasetStore(local_objects, "d")
    assert snapshot(store, tmp_path, "aBbc") == {"a": False, "B": False, "b": True, "c": True}
    assert snapshot(store, tmp_path, "dcbBa") == {"a": False, "B": False, "b": True, "c": True, "d": True}
    assert snapshot(store, tmp_path, "dcbB") == {"B": False, "b": False, "c": True, "d": True}
    assert snapshot(store, tmp_path, "Bcd", dedupe=True) == {"B": False, "c": False}


def test_without_a_seed_or_with_ids_of_the_platform_nothing_is_marked(local_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(local_objects, "d")
    assert set(snapshot(store, tmp_path, "abc", sampling={"temperature": 1}).values()) == {False}
    assert set(snapshot(store, tmp_path, "ab", id=None).values()) == {False}


def test_a_repair_keeps_the_seed_of_its_row() -> None:
    repair = Repair("{", "no JSON", 1)
    chat = Requests(Generation("chat", "m", {"seed": 7}))
    assert orjson.loads(chat.body(b"[]", repair, b'{"seed":99}'))["seed"] == 99
    assert orjson.loads(chat.body(b"[]"))["seed"] == 7
    text = Requests(Generation("completion", "m", {"seed": 7}))
    assert orjson.loads(text.body(b'"p"', repair, b'{"seed":99}'))["seed"] == 100
