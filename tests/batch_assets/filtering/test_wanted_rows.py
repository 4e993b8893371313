"""`want:`: how much of a source is read in each round, by what the store holds; which rows are exported at last."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from support.snapshots import commit
from typer.testing import CliRunner

from batch_assets.cli.main import app
from batch_assets.component import spec_version
from batch_assets.filtering.passed_table import SURPLUS, PassedStore, filtered, is_current
from batch_assets.filtering.wanted_rows import Standing, rounds_follow, rows_to_come, standing, wanted_rows
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import published_table
from batch_assets.snapshot.builder import build_snapshot, changed_rows
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.discovery import declarations
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

GOOD = {"good": {"where": "good", "remove": True}}
BATCH = 10


def declared(**more: Any) -> GeneratedDatasetSpec:
    own = {"name": "sums", "source": {"path": "rows.jsonl"}, "prompt": {"user": "{{ q }}"}, "model": "m"}
    own |= {"keep_columns": ["q", "topic", "good"], "batch_rows": BATCH, "filter": GOOD, "want": {"rows": 50}}
    return load_spec(own | more, "defs.yaml")


class Rounds:
    """A source, a store, and the rounds of one in the other, without Dagster."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.store = DatasetStore(open_objects(str(folder / "store")), "sums")
        self.asked: dict[str, int] = {}

    def write(self, rows: int, good: Callable[[int], bool], topics: Callable[[int], Any] = lambda _: "a") -> None:
        lines = ({"q": f"q {n}", "topic": topics(n), "good": good(n)} for n in range(rows))
        (self.folder / "rows.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def workdir(self) -> Path:
        self.number += 1
        folder = self.folder / f"work-{self.number}"
        folder.mkdir()
        return folder

    def read(self, spec: GeneratedDatasetSpec) -> SnapshotManifest:
        wanted = wanted_rows(spec, self.store, {})
        return build_snapshot(spec, self.store, now=1.0, workdir=self.workdir(), base=self.folder, wanted=wanted)

    def make(self, spec: GeneratedDatasetSpec) -> Standing:
        """The rows of the snapshot, its table, and the rows that pass."""
        manifest = self.store.manifest(self.store.current_snapshot() or "")
        missing = {entry.key for entry in self.store.entries(manifest.snapshot)} - set(
            self.store.current_objects(self.store.entries(manifest.snapshot))
        )
        commit(self.store, manifest, keys=missing)
        publish(self.store, manifest, card=Card(), now=1.0, workdir=self.workdir())
        assert spec.filter is not None
        filtered(self.store, spec.filter, base=self.folder, now=2.0, workdir=self.workdir(), want=spec.want)
        found = standing(spec, self.store, {})
        assert found is not None
        return found

    def until_done(self, spec: GeneratedDatasetSpec) -> tuple[list[int], Standing]:
        """Rows after each round, and the end."""
        made = []
        while True:
            made.append(self.read(spec).rows)
            if len(made) > 1:
                assert rounds_follow(spec.name, self.store.objects, {spec.name: spec}), "not all of them are made"
            found = self.make(spec)
            assert rounds_follow(spec.name, self.store.objects, {spec.name: spec}) == found.grows
            if not found.grows:
                return made, found

    def passed(self) -> pl.DataFrame:
        table = published_table(PassedStore(self.store))
        assert table is not None
        return pl.read_parquet(table.glob(self.store.objects))


@pytest.fixture
def rounds(tmp_path: Path) -> Rounds:
    return Rounds(tmp_path)


@pytest.mark.slow
def test_rounds_end_with_exactly_the_rows_that_are_wanted_and_hardly_more_are_made(rounds: Rounds) -> None:
    rounds.write(2000, lambda n: n * 7919 % 1009 % 4 == 0)
    spec = declared()
    made, found = rounds.until_done(spec)
    least = [n for n in range(2000) if n * 7919 % 1009 % 4 == 0][49] + 1
    assert made[0] == 50 and len(made) <= 5
    assert least <= made[-1] <= 1.03 * least + BATCH
    assert found.said() == "" and found.accepted >= 50
    passed = rounds.passed()
    assert len(passed) == 50 and passed["good"].all()
    assert passed["q"].to_list() == [f"q {n}" for n in range(2000) if n * 7919 % 1009 % 4 == 0][:50]
    table = published_table(rounds.store)
    assert table is not None and table.rows == made[-1]


@pytest.mark.slow
def test_a_round_that_is_read_twice_or_was_interrupted_is_the_same_and_no_finished_batch_changes(
    rounds: Rounds,
) -> None:
    rounds.write(2000, lambda n: n % 3 == 0)
    spec = declared()
    first = rounds.read(spec)
    assert rounds.read(spec) == first
    assert standing(spec, rounds.store, {}) == Standing(50, 0, 0, None)
    before = rounds.store.current_objects(rounds.store.entries(first.snapshot))
    rounds.make(spec)
    second = rounds.read(spec)
    assert second.rows > first.rows and second.unchanged == first.rows
    assert rounds.read(spec) == second  # it is not made yet
    versions = {one.key: one.data_version for one in rounds.store.entries(second.snapshot)}
    assert all(versions[key] == one.data_version for key, one in before.items())
    counts = changed_rows(spec, rounds.store, workdir=rounds.workdir(), base=rounds.folder)
    assert counts is not None and counts.added == 0  # what is not asked for yet is no change


@pytest.mark.slow
def test_rows_are_wanted_of_each_value_of_a_column(rounds: Rounds) -> None:
    """One of topic 1 in two is good, one of topic 7 in eleven, and there are too few of null."""
    topic: Mapping[int, int] = {0: 1, 1: 1, 2: 7, 3: 7, 4: 7}
    rounds.write(4000, lambda n: n % (2 if n % 5 < 2 else 11) == 0, lambda n: None if n == 78 else topic[n % 5])
    spec = declared(want={"rows": 40, "per": "topic"})
    made, found = rounds.until_done(spec)
    counts = dict(rounds.passed()["topic"].cast(pl.String).value_counts().iter_rows())
    assert counts == {"1": 40, "7": 40}
    assert found.said().startswith("40 accepted rows are missing: ") and "the source has no more" in found.said()
    assert len(made) <= 6 and made[-1] < 1000  # of 4,000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["objects", "moments"])
def test_a_stratum_has_one_name_in_the_source_and_in_the_table(rounds: Rounds, kind: str) -> None:
    topics: list[Any] = [{"a": 1}, {"b": 2.5, "a": 2.0}]
    spec = declared(want={"rows": 20, "per": "topic"})
    rounds.write(2000, lambda n: n % 3 == 0, lambda n: topics[n % 2])
    if kind == "moments":
        spec = declared(want={"rows": 20, "per": "topic"}, source={"path": "rows.parquet"})
        lines = pl.read_ndjson(rounds.folder / "rows.jsonl").with_row_index("n")
        moments = pl.datetime(2026, 1, 1, pl.col("n") % 2, time_unit="ns")
        lines.with_columns(topic=moments).write_parquet(rounds.folder / "rows.parquet")
    made, found = rounds.until_done(spec)
    assert found.said() == "" and len(rounds.passed()) == 40 and made[-1] < 200


@pytest.mark.slow
def test_where_the_source_ends_too_few_rows_are_said_and_new_ones_are_asked_later(rounds: Rounds) -> None:
    rounds.write(90, lambda n: n % 3 == 0)
    spec = declared()
    made, found = rounds.until_done(spec)
    assert made[-1] == 90
    assert found.said() == (
        "20 accepted rows are missing: 30 of 90 rows passed, and the source has no more: "
        "add rows to it, loosen `filter`, or lower `want.rows`"
    )
    assert rows_to_come(spec, rounds.store, {}).middle == 0
    rounds.write(400, lambda n: n % 3 == 0)
    made, found = rounds.until_done(spec)
    assert found.said() == "" and len(rounds.passed()) == 50


def test_where_nothing_at_all_passes_no_more_is_asked(rounds: Rounds) -> None:
    rounds.write(2000, lambda _: False)
    made, found = rounds.until_done(declared())
    assert made == [50]
    assert "so no more are made: `filter` or the prompt is to be changed" in found.said()


@pytest.mark.slow
def test_more_rows_are_wanted_or_fewer_and_rows_from_before_want_are_kept(rounds: Rounds) -> None:
    rounds.write(300, lambda n: n % 2 == 0)
    whole = declared(want=None)
    rounds.read(whole)
    commit(rounds.store, rounds.store.manifest(rounds.store.current_snapshot() or ""))
    rounds.write(2000, lambda n: n % 2 == 0)
    made, _ = rounds.until_done(declared())
    assert made == [300] and len(rounds.passed()) == 50
    more = declared(want={"rows": 200})
    assert not is_current(rounds.store, more.filter or {}, rounds.folder, want=more.want)
    made, _ = rounds.until_done(more)
    assert made[0] == 300 and made[-1] <= 420 and len(rounds.passed()) == 200
    fewer = declared(want={"rows": 20})
    rounds.until_done(fewer)
    assert rounds.passed()["q"].to_list() == [f"q {n}" for n in range(0, 40, 2)]


def test_a_table_that_is_made_anew_of_the_same_rows_counts_when_it_is_filtered(rounds: Rounds) -> None:
    """Dead letters that were asked again: the count of the table before would start a round too many."""
    rounds.write(2000, lambda _: True)
    spec = declared()
    manifest = rounds.read(spec)
    entries = rounds.store.entries(manifest.snapshot)
    ids = [row.row_id for _, rows in rounds.store.rows(manifest, entries) for row in rows]
    commit(rounds.store, manifest, dead=ids[:20])
    before = rounds.make(spec)
    assert before.grows and before.accepted == 30
    commit(rounds.store, manifest, generation=1)
    publish(rounds.store, manifest, card=Card(), now=3.0, workdir=rounds.workdir())
    assert standing(spec, rounds.store, {}) == Standing(50, 0, 0, None)
    assert rounds.read(spec) == manifest
    found = rounds.make(spec)
    assert found.accepted == 50 and not found.grows


@pytest.mark.slow
def test_samples_count_as_rows(rounds: Rounds) -> None:
    rounds.write(2000, lambda n: n % 2 == 0)
    made, _ = rounds.until_done(declared(samples=4))
    assert made[0] == 56 or made[0] % BATCH < 4
    assert len(rounds.passed()) == 50 and 100 <= made[-1] <= 120


@pytest.mark.slow
def test_what_is_to_come_is_known_in_each_round(rounds: Rounds) -> None:
    rounds.write(2000, lambda n: n % 4 == 0)
    spec = declared(want={"rows": 50, "expected_rate": 0.2})
    first = rounds.read(spec)
    assert first.wanted is not None and first.wanted.to_come[1] == pytest.approx(200)
    assert rows_to_come(spec, rounds.store, {}).middle == pytest.approx(200)
    rounds.make(spec)
    assert 120 < rows_to_come(spec, rounds.store, {}).middle < 200
    rounds.until_done(spec)
    assert rows_to_come(spec, rounds.store, {}).middle == 0


def test_too_many_values_of_a_column_are_refused(rounds: Rounds) -> None:
    rounds.write(1500, lambda _: True, lambda n: n)
    with pytest.raises(SourceError, match="at most 1,000 values, found more than 1,000 values of 'topic'"):
        rounds.read(declared(want={"rows": 1, "per": "topic"}))


def test_a_file_without_want_keeps_its_version() -> None:
    assert spec_version(declared(want=None)) == spec_version(declared())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"want": {"rows": 0}}, "want.rows"),
        ({"want": {"rows": 5, "accepted_by": "Nobody!"}}, "want.accepted_by"),
        ({"want": {"rows": 5, "accepted_by": "sums"}}, "want.accepted_by: expected passed, or the name of a dataset"),
        ({"want": {"rows": 5}, "filter": None}, "want.accepted_by: expected a filter beside it"),
        ({"filter": {"mark": {"where": "good"}}}, "filter: expected a rule with `remove: true`"),
        ({"filter": {SURPLUS: {"where": "good", "remove": True}}}, "filter: expected another name"),
        ({"source": {"path": "rows.jsonl", "limit": 5}}, "source.limit: expected no limit beside want, found 5"),
        ({"source": {"dataset": "other", "streaming": True}}, "source.streaming: expected no streaming beside want"),
        ({"want": {"rows": 5, "per": "topics"}}, "want.per: expected one of keep_columns, found 'topics'"),
        ({"want": {"rows": 5, "expected_rate": 0}}, "want.expected_rate"),
    ],
)
def test_what_cannot_be_wanted_is_one_clear_error(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        declared(**keys)
    assert said in str(error.value) and "1 problem" in str(error.value)


@pytest.mark.slow
def test_the_command_neither_pushes_nor_appends_an_export_between_rounds(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_ASSETS_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("BATCH_ASSETS_DEFS", str(tmp_path / "defs"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens: a push would fail
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 20)
    exports = [
        {"name": "hub", "format": "messages", "push": {"repo": "my-org/sums"}},
        {"name": "delta", "format": "delta", "mode": "append", "to": str(tmp_path / "delta")},
    ]
    spec = declared(exports=exports)
    (tmp_path / "defs" / "sums").mkdir(parents=True)
    document = {"type": "batch_assets.GeneratedDataset", "attributes": spec.model_dump(mode="json", exclude_unset=True)}
    (tmp_path / "defs" / "sums" / "defs.yaml").write_text(yaml.safe_dump(document))
    rounds.write(2000, lambda n: n % 4 == 0)
    rounds.read(spec)
    assert rounds.make(spec).grows

    def exported(name: str, *more: str) -> str:
        found = CliRunner().invoke(app, ["export", "sums", "--declared", name, *more])
        assert found.exit_code == 0, found.output
        return found.stdout

    said = exported("hub")
    assert said.startswith("sums: hub: nothing is pushed while more rows are made (want); `batch-assets run sums` does")
    assert "rows exported" in said and list((tmp_path / "store" / "sums" / "exports" / "hub").glob("*/train*"))
    assert "sums: delta: nothing is appended while" in exported("delta")
    assert json.loads(exported("delta", "--json"))["waits"] == "want" and not (tmp_path / "delta").exists()
    rounds.until_done(spec)
    assert "nothing is" not in exported("delta") and (tmp_path / "delta" / "_delta_log").is_dir()


def chained(folder: Path, **scores: Any) -> list[str]:
    """What is wrong with two datasets, of which the second one is to accept the rows of the first."""
    first = {"name": "sums", "source": {"path": "rows.jsonl"}, "prompt": {"user": "{{ q }}"}, "model": "m"}
    first |= {"keep_columns": ["topic"], "want": {"rows": 5, "accepted_by": "scores", "per": "topic"}}
    second = {"name": "scores", "source": {"dataset": "sums"}, "prompt": {"user": "{{ output }}"}, "model": "m"}
    second |= {"keep_columns": ["topic"], "filter": {"long": {"where": "completion_tokens > 9", "remove": True}}}
    documents = [{"type": "batch_assets.GeneratedDataset", "attributes": one} for one in (first, second | scores)]
    (folder / "sums").mkdir(parents=True, exist_ok=True)
    (folder / "sums" / "defs.yaml").write_text(yaml.safe_dump_all(documents))
    return [str(one.error) for one in declarations(folder).broken]


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({"name": "scorers"}, "expected passed, or the name of a declared dataset, found 'scores'"),
        ({"source": {"path": "x.csv"}}, "expected a dataset that reads sums or what is made of it"),
        (
            {"filter": {"long": {"where": "completion_tokens > 9"}}},
            "expected a dataset with `judge.accept`, or a filter",
        ),
        ({"keep_columns": []}, "expected a dataset that keeps 'topic' (keep_columns)"),
        ({"want": {"rows": 3}}, "expected a dataset without `want`"),
    ],
)
def test_a_dataset_that_cannot_accept_the_rows_is_one_clear_error(
    tmp_path: Path, scores: dict[str, Any], said: str
) -> None:
    assert chained(tmp_path) == []
    (found,) = chained(tmp_path, **scores)
    assert f"sums: want.accepted_by: {said}" in found and "1 problem" in found
