"""`samples: n`: n rows for each prompt, each asked once, whatever n becomes later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.snapshots import commit
from support.specs import spec as spec_of

from batch_assets.capacity_planning.workload_estimate import work_of_source
from batch_assets.component import spec_version
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import table_batches
from batch_assets.publishing.quality import Thresholds, quality
from batch_assets.publishing.verify import verify
from batch_assets.snapshot.builder import build_snapshot, changed_rows
from batch_assets.snapshot.reuse import find_reusable
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.errors import SpecError
from gpu_runner.rows import Row, sample_digest
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest


class Samples:
    """A source of questions and the store of a dataset, built with several `samples`."""

    def __init__(self, folder: Path, objects: Objects, name: str = "d") -> None:
        self.folder, self.builds = folder, 0
        self.store = DatasetStore(objects, name)

    def build(self, rows: Sequence[dict[str, Any]], **attributes: Any) -> SnapshotManifest:
        (self.folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.builds += 1
        work = self.folder / f"{self.store.dataset}-{self.builds}"
        spec = spec_of(**{"name": self.store.dataset, "batch_rows": 3, **attributes})
        return build_snapshot(spec, self.store, now=float(self.builds), workdir=work, base=self.folder)

    def rows(self, manifest: SnapshotManifest) -> list[Row]:
        return [row for _, rows in self.store.rows(manifest, self.store.entries(manifest.snapshot)) for row in rows]

    def open_batches(self, manifest: SnapshotManifest) -> int:
        entries = self.store.entries(manifest.snapshot)
        return len(entries) - len(self.store.current_objects(entries))

    def table(self, manifest: SnapshotManifest) -> pa.Table:
        table = publish(self.store, manifest, card=Card(), now=1.0, workdir=self.folder)
        return pa.Table.from_batches(table_batches(self.store, table, [column.name for column in table.columns]))


@pytest.fixture
def made(tmp_path: Path, local_objects: Objects) -> Samples:
    return Samples(tmp_path, local_objects)


QUESTIONS = [{"k": f"k{i}", "q": f"question {i}"} for i in range(4)]
WITH_ID = {"id": "k", "keep_columns": ["k"]}


@pytest.mark.parametrize("attributes", [{}, WITH_ID])
def test_samples_of_one_prompt_are_rows_of_their_own_that_stand_next_to_each_other(
    made: Samples, attributes: dict[str, Any]
) -> None:
    manifest = made.build(QUESTIONS, samples=3, **attributes)
    rows = made.rows(manifest)
    assert (manifest.rows, manifest.source_rows, manifest.expected_rows) == (12, 4, 12)
    assert [row.sample for row in rows] == [0, 1, 2] * 4
    assert [rows[i].prompt == rows[i + 1].prompt for i in range(11)] == ([True, True, False] * 4)[:11]
    assert len({row.row_id for row in rows}) == len({row.row_key for row in rows}) == 12
    if attributes:
        assert [row.row_id for row in rows[:3]] == ["k0", "k0~1", "k0~2"]


def test_without_the_key_everything_is_as_before_and_sample_0_is_that_row(made: Samples) -> None:
    plain = made.build(QUESTIONS)
    assert plain.samples == 1 and plain.keep_columns == []
    before = {row.row_id: row.row_key for row in made.rows(plain)}
    assert made.build(QUESTIONS, samples=1).snapshot == plain.snapshot
    assert spec_version(spec_of()) == spec_version(spec_of(samples=1)) != spec_version(spec_of(samples=2))
    sampled = {row.row_id: row.row_key for row in made.rows(made.build(QUESTIONS, samples=2)) if row.sample == 0}
    assert sampled == before
    assert sample_digest(b"k" * 32, 0) == b"k" * 32


@pytest.mark.slow
@pytest.mark.parametrize("attributes", [{}, WITH_ID])
def test_more_samples_ask_for_the_new_ones_only_and_fewer_remove_rows(
    made: Samples, attributes: dict[str, Any]
) -> None:
    first = made.build(QUESTIONS[:3], samples=2, **attributes)
    commit(made.store, first)
    declared = spec_of(name="d", batch_rows=3, samples=3, **attributes)
    counts = changed_rows(declared, made.store, workdir=made.folder, base=made.folder)
    assert counts is not None and counts.to_ask == 3
    more = made.build(QUESTIONS[:3], samples=3, **attributes)
    assert (more.rows, more.unchanged, more.added, more.removed) == (9, 6, 3, 0)
    assert made.open_batches(more) == 1  # those that were there keep their batches
    commit(made.store, more, keys=["00002"])
    fewer = made.build(QUESTIONS[:3], samples=1, **attributes)
    assert (fewer.rows, fewer.unchanged, fewer.removed) == (3, 3, 6)
    again = made.build(QUESTIONS[:3], samples=3, **attributes)
    assert {row.row_id for row in made.rows(again)} == {row.row_id for row in made.rows(more)}


@pytest.mark.parametrize("attributes", [{}, WITH_ID])
def test_the_table_has_the_number_of_each_sample_and_everything_agrees(
    made: Samples, attributes: dict[str, Any]
) -> None:
    manifest = made.build(QUESTIONS, samples=2, **attributes)
    dead = made.rows(manifest)[1].row_id
    commit(made.store, manifest, dead=[dead])
    table = made.table(manifest)
    assert table.column("sample_index").to_pylist() == [0, 1] * 4
    assert table.column("sample_index").type == pa.int32()
    if attributes:
        assert table.column("k").to_pylist() == [f"k{i}" for i in range(4) for _ in range(2)]
    found = verify(made.store, {})
    assert {one.kind for one in found.differences} <= {"missing_catalog_entry", "stale_dead_letters"}, found.differences
    published = publish(made.store, manifest, card=Card(), now=1.0, workdir=made.folder)
    figures = {one.name: one for one in quality(made.store, published, manifest, Thresholds())}
    assert figures["one_outcome_per_row"].passed and figures["ids_unique"].passed
    assert figures["dead_letter_rate"].value == pytest.approx(1 / 8)
    card = made.store.objects.get(f"{published.path}/README.md").decode()
    assert "2 lines, one per sample" in card and "| `sample_index` | int32 | which answer" in card


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    questions=st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
    samples=st.integers(1, 5),
    dedupe=st.booleans(),
    with_id=st.booleans(),
)
def test_every_sample_is_one_row_with_a_seed_of_its_own(
    tmp_path_factory: pytest.TempPathFactory,
    questions: list[str],
    samples: int,
    dedupe: bool,
    with_id: bool,
) -> None:
    folder = tmp_path_factory.mktemp("samples")
    made = Samples(folder, open_objects(str(folder / "store")))
    rows = [{"k": f"k{i}", "q": question} for i, question in enumerate(questions)]
    attributes = {"samples": samples, "dedupe": dedupe, "sampling": {"seed": 7}} | (WITH_ID if with_id else {})
    manifest = made.build(rows, **attributes)
    asked = len(set(questions)) if dedupe else len(questions)
    assert (manifest.rows, manifest.duplicates) == (asked * samples, (len(questions) - asked) * samples)
    found = [row.seeded(7) for row in made.rows(manifest)]
    requests = [(row.prompt, row.seed) for row in found]
    assert len(set(requests)) == len(requests)  # no answer is paid twice
    assert [row.seeded(7) for row in made.rows(manifest)] == found
    commit(made.store, manifest)
    table = made.table(manifest)
    assert table.num_rows == len(questions) * samples
    assert sorted(table.column("sample_index").to_pylist() if samples > 1 else []) == (
        sorted(list(range(samples)) * len(questions)) if samples > 1 else []
    )
    assert len(set(table.column("row_id").to_pylist())) == table.num_rows


def test_the_first_sample_keeps_the_datasets_seed_and_none_gets_one_where_there_is_none() -> None:
    row = Row("00000", "key#0", "key", b'"q"')
    assert row.seeded(7).seed is None
    second = replace(row, sample=1)
    assert second.seeded(None).seed is None
    assert second.seeded(7).seed not in (None, second.seeded(8).seed, replace(row, sample=2).seeded(7).seed)


def test_samples_are_reused_from_another_dataset_with_their_seeds(made: Samples, local_objects: Objects) -> None:
    sampling = {"seed": 3}
    other = Samples(made.folder, local_objects, "other")
    commit(other.store, other.build(QUESTIONS, samples=2, sampling=sampling))
    manifest = made.build(QUESTIONS, samples=3, sampling=sampling, reuse=True)
    found = find_reusable(made.store, manifest, True, workdir=made.folder / "reuse")
    assert (found.rows, dict(found.datasets)) == (8, {"other": 8})


def test_where_and_limit_count_rows_of_the_source(made: Samples) -> None:
    manifest = made.build(QUESTIONS, samples=4, source={"path": "q.jsonl", "where": "k <> 'k0'", "limit": 2})
    assert (manifest.source_rows, manifest.rows) == (2, 8)
    assert work_of_source(spec_of(samples=4), made.folder).rows == 16


def test_an_id_that_stands_twice_is_one_reject_and_one_that_names_a_sample_is_refused(made: Samples) -> None:
    twice = [*QUESTIONS, QUESTIONS[1]]
    manifest = made.build(twice, samples=3, on_bad_row="skip", **WITH_ID)
    assert (manifest.source_rows, manifest.rejected, manifest.rows) == (5, 1, 12)
    named = [{"k": "a", "q": "1"}, {"k": "a~1", "q": "2"}]
    with pytest.raises(SourceError, match="line 2: id: expected an end other than ~ and a number"):
        made.build(named, samples=2, **WITH_ID)
    assert made.build(named, **WITH_ID).rows == 2


@pytest.mark.parametrize(
    ("attributes", "found"),
    [
        ({"samples": 0}, "samples"),
        ({"samples": 65}, "samples"),
        ({"samples": "3"}, "samples"),
        ({"samples": True}, "samples"),
        ({"samples": 2, "sampling": {"temperature": 0}}, "1 with a temperature of 0"),
        ({"samples": 2, "sampling": {"temperature": 0, "seed": 1}}, "1 with a temperature of 0"),
        ({"samples": 2, "task": "embedding"}, "1 for task embedding"),
        ({"samples": 2, "keep_columns": ["Sample_Index"]}, "no such column beside samples"),
        ({"samples": 2, "reuse": True}, "sampling whose answers are the same each time"),
    ],
)
def test_samples_that_make_no_sense_are_refused(attributes: dict[str, Any], found: str) -> None:
    with pytest.raises(SpecError, match=found):
        spec_of(**attributes)
    assert spec_of(keep_columns=["sample_index"]).samples == 1


def test_a_token_limit_that_may_grow_asks_for_no_row_again(made: Samples) -> None:
    output, before = {"max_tokens_may_grow": True}, {"max_tokens": 8}
    first = made.build(QUESTIONS, output=output, sampling=before)
    commit(made.store, first)
    grown = made.build(QUESTIONS, output=output, sampling={"max_tokens": 64})
    assert (grown.unchanged, grown.changed, grown.added) == (4, 0, 0) and grown.snapshot != first.snapshot
    assert grown.settings().most_tokens == 64 and made.open_batches(grown) == 0
    plain = made.build(QUESTIONS, sampling={"max_tokens": 64})
    assert (plain.unchanged, plain.added) == (0, 4)
