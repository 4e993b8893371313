"""Check figures: what they count, when they fail, and that they stay in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from support.snapshots import commit, overwrite, questions, write_snapshot

from batch_assets.publishing import published_table
from batch_assets.publishing import quality as quality_module
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import Hashes, PublishedTable, repeated_ids
from batch_assets.publishing.quality import CHECKS, CheckFigure, Counted, Thresholds, quality
from gpu_runner.rows import Row
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
STRICT = Thresholds(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


def build(
    objects: Objects,
    workdir: Path,
    *,
    rows: int = 40,
    answer: Callable[[Row, int], Any] | None = None,
    dead: list[str] | None = None,
    duplicates: dict[str, str] | None = None,
    **options: Any,
) -> tuple[DatasetStore, PublishedTable, SnapshotManifest]:
    store = DatasetStore(objects, "sums")
    manifest = write_snapshot(store, questions(rows), duplicates=duplicates, **options)
    commit(store, manifest, dead=dead or [], answer=answer)
    return store, publish(store, manifest, card=Card(), now=1.0, workdir=workdir, part_rows=15), manifest


def by_name(figures: list[CheckFigure]) -> dict[str, CheckFigure]:
    return {figure.name: figure for figure in figures}


@pytest.mark.slow
def test_a_sound_table_passes_every_check(any_objects: Objects, tmp_path: Path) -> None:
    copies = {f"copy-{i}": "id-000001" for i in range(30)}
    store, table, manifest = build(any_objects, tmp_path, duplicates=copies, rejected=3)
    figures = quality(store, table, manifest, STRICT)
    assert [figure.name for figure in figures] == [name for name in CHECKS if name != "schema_valid_rate"]
    assert all(figure.passed for figure in figures)
    assert by_name(figures)["one_outcome_per_row"].value == 70


def test_rates_are_over_the_rows_that_were_asked(local_objects: Objects, tmp_path: Path) -> None:
    def answer(row: Row, number: int) -> str:
        return " \n" if number < 4 else "same" if number < 10 else f"answer {number}"

    built = build(
        local_objects,
        tmp_path,
        answer=answer,
        dead=["id-000020", "id-000030"],
        duplicates={"c1": "id-000000", "c2": "id-000020"},
    )
    found = by_name(quality(*built, STRICT))
    assert found["dead_letter_rate"].value == pytest.approx(2 / 40)
    assert found["empty_output_rate"].value == pytest.approx(4 / 38)
    assert found["repeated_output_rate"].value == pytest.approx(6 / 38)
    assert not any(found[name].passed for name in ("dead_letter_rate", "empty_output_rate", "repeated_output_rate"))
    lenient = quality(*built, Thresholds(0.05, 1.0, 0.2, 0.2))
    assert all(figure.passed for figure in lenient)
    assert all(figure.passed for figure in quality(*built, Thresholds()))


def counted(
    outputs: list[str | None], finish: list[str | None], max_tokens: int | None = None, thinks: bool = True
) -> Counted:
    found = Counted(len(outputs), None, max_tokens, thinks=thinks)
    found.add(
        pa.RecordBatch.from_pydict(
            {
                "row_id": [f"id-{i}" for i in range(len(outputs))],
                "output": pa.array(outputs, pa.string()),
                "error": pa.array([None if text is not None else "timeout" for text in outputs], pa.string()),
                "finish_reason": pa.array(finish, pa.string()),
                "duplicate_of": pa.nulls(len(outputs), pa.string()),
            }
        )
    )
    return found


def test_answers_that_were_cut_are_counted_and_say_what_to_change() -> None:
    found = counted([f"text {i}" for i in range(12)] + [None], ["length"] * 11 + ["stop", None], max_tokens=20)
    figure = by_name(found.figures(13, 0, Thresholds(max_cut_rate=0.01)))["cut_output_rate"]
    assert (figure.passed, figure.value, figure.severity) == (False, pytest.approx(11 / 12), "warn")
    assert figure.description.startswith(
        "11 outputs cut at the token limit, of 12: raise sampling.max_tokens (20). A model that thinks"
    )
    assert by_name(found.figures(13, 0, Thresholds()))["cut_output_rate"].passed  # switched off
    whole = counted(["text"], ["stop"]).figures(1, 0, Thresholds(max_cut_rate=0.0))
    assert by_name(whole)["cut_output_rate"].description == "0 outputs cut at the token limit, of 1"
    told_not_to_think = counted(["text"], ["length"], 20, thinks=False).figures(1, 0, Thresholds(max_cut_rate=0.0))
    said = by_name(told_not_to_think)["cut_output_rate"].description
    assert said == "1 outputs cut at the token limit, of 1: raise sampling.max_tokens (20)"


def test_thinking_that_a_server_leaves_in_the_text_is_said() -> None:
    texts = ["<think>hm", "hm</think>\n4", "<think></think>4", "I think 4", "<thinker>4"]
    found = counted([*texts], ["stop"] * 5)
    figure = by_name(found.figures(5, 0, Thresholds(max_thinking_rate=0.01)))["thinking_output_rate"]
    assert (figure.passed, figure.value) == (False, pytest.approx(3 / 5))
    assert "--reasoning-parser" in figure.description and "enable_thinking: false" in figure.description


def test_outputs_are_held_against_the_schema(local_objects: Objects, tmp_path: Path) -> None:
    def answer(row: Row, number: int) -> str:
        return {1: "not json", 2: '{"sum": "two"}', 3: "null"}.get(number, orjson.dumps({"sum": number}).decode())

    built = build(local_objects, tmp_path, answer=answer, json_schema=SCHEMA)
    found = by_name(quality(*built, Thresholds(min_schema_valid_rate=0.95)))["schema_valid_rate"]
    assert (found.passed, found.value, found.threshold) == (False, 37 / 40, 0.95)
    assert found.description == "37 of 40 outputs fit the schema"
    assert [figure.name for figure in quality(*built, STRICT)] == list(CHECKS)


def test_a_large_table_is_held_against_the_schema_in_a_stated_sample(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_module, "SCHEMA_SAMPLE", 10)
    monkeypatch.setattr(published_table, "_BATCH_ROWS", 7)
    seen: list[str] = []
    real = quality_module._validator

    def noting(schema: Any) -> Callable[[str], bool]:
        fits = real(schema)
        return lambda text: (seen.append(text), fits(text))[1]

    monkeypatch.setattr(quality_module, "_validator", noting)
    built = build(local_objects, tmp_path, answer=lambda row, number: f'{{"sum": {number}}}', json_schema=SCHEMA)
    found = by_name(quality(*built, STRICT))["schema_valid_rate"]
    assert seen == [f'{{"sum": {number}}}' for number in range(0, 40, 4)]
    assert found.description == "10 of 10 outputs fit the schema (every 4th of 40 looked at)"


def test_vectors_that_are_zero_or_not_finite_count_as_empty(local_objects: Objects, tmp_path: Path) -> None:
    def answer(row: Row, number: int) -> tuple[float, ...]:
        return {0: (0.0, 0.0), 1: (float("nan"), 1.0), 2: (), 3: (float("inf"), 0.0)}.get(number, (number, -number))

    built = build(local_objects, tmp_path, answer=answer, task="embedding", dead=["id-000009"])
    found = by_name(quality(*built, STRICT))
    assert found["empty_output_rate"].value == pytest.approx(4 / 39)
    assert found["repeated_output_rate"].value == 0


def test_a_table_with_too_few_lines_or_an_id_twice_fails(local_objects: Objects, tmp_path: Path) -> None:
    store, table, manifest = build(local_objects, tmp_path)
    first = store.objects.get(f"{table.path}/part-00000.parquet")
    overwrite(store, f"{table.path}/part-00002.parquet", first)
    found = by_name(quality(store, table, manifest, STRICT))
    assert not found["one_outcome_per_row"].passed
    assert (found["ids_unique"].passed, found["ids_unique"].value) == (False, 15)


def test_an_empty_table_has_figures(local_objects: Objects, tmp_path: Path) -> None:
    built = build(local_objects, tmp_path, rows=0, json_schema=SCHEMA)
    assert all(figure.passed for figure in quality(*built, STRICT))


def test_no_figure_quotes_an_output(local_objects: Objects, tmp_path: Path) -> None:
    built = build(local_objects, tmp_path, answer=lambda row, number: "secret answer", json_schema=SCHEMA)
    assert "secret" not in repr(quality(*built, STRICT))


def test_a_line_with_neither_output_nor_error_fails(local_objects: Objects) -> None:
    counted = Counted(2, None)
    line = pa.record_batch(
        {
            "row_id": pa.array(["a", "b"]),
            "output": pa.array(["x", None], pa.string()),
            "error": pa.nulls(2, pa.string()),
            "finish_reason": pa.nulls(2, pa.string()),
            "duplicate_of": pa.nulls(2, pa.string()),
        }
    )
    counted.add(line)
    found = counted.figures(2, 0, STRICT)[0]
    assert not found.passed
    assert "1 with an output and an error, or with neither" in found.description


def test_repeated_values_are_found_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_table, "_RUN_ROWS", 3)
    rng = np.random.default_rng(7)
    for _ in range(50):
        values = rng.integers(0, 12, rng.integers(1, 40)).astype(str)
        hashes = Hashes(3)
        for part in np.array_split(values, 3):
            hashes.add(pa.array(part.tolist(), pa.string()))
        _, counts = np.unique(values, return_counts=True)
        assert hashes.most_frequent() == counts.max()
        assert len(hashes.repeated()) == (counts > 1).sum()
        assert len(hashes) == len(values)


def test_ids_that_only_hash_alike_are_not_called_repeated(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, table, _ = build(local_objects, tmp_path)
    monkeypatch.setattr(published_table, "value_hashes", lambda column: np.zeros(len(column), np.uint64))
    hashes = Hashes(40)
    hashes.add(pa.array([f"id-{i}" for i in range(40)]))
    assert hashes.repeated() == {0}
    assert repeated_ids(store, table, hashes) == {}
