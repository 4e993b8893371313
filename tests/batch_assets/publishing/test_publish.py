"""Publishing: one line per source row, whole versions only, and a switch that readers never see half of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from support.snapshots import SourceRow, commit, current_path, outcome, overwrite, questions, write_snapshot

from batch_assets.asset_metadata.materialization import table_metadata
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import IncompleteSnapshot, SupersededTable, publish
from batch_assets.publishing.published_table import PublishedTable, broken_files, published_table
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.models import load_spec
from gpu_runner.fleet_database.accounting.bill_split import Split
from gpu_runner.rows import Row
from resources.objects.opening import CorruptObject, LocalObjects, Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

CARD = Card("Sums that a model was asked.", ["team:sums"], ["arithmetic"])


def do_publish(store: DatasetStore, manifest: SnapshotManifest, workdir: Path, **options: Any) -> PublishedTable:
    options = {"card": CARD, "now": 1_750_000_000.0, "part_rows": 20, **options}
    return publish(store, manifest, workdir=workdir, **options)


@pytest.fixture
def store(local_objects: Objects) -> DatasetStore:
    return DatasetStore(local_objects, "sums")


def read(store: DatasetStore, table: PublishedTable) -> pl.DataFrame:
    return pl.read_parquet(table.glob(store.objects))


@pytest.mark.slow
def test_the_table_has_one_line_per_source_row_in_snapshot_order(any_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(any_objects, "sums")
    manifest = write_snapshot(store, questions(47))
    commit(store, manifest, dead=["id-000012"])
    table = do_publish(store, manifest, tmp_path)
    frame = pl.scan_parquet(table.glob(any_objects), storage_options=any_objects.storage_options()).collect()
    assert frame["row_id"].to_list() == [f"id-{i:06d}" for i in range(47)]
    assert frame["topic"].to_list() == [f"topic {i % 3}" for i in range(47)]
    assert frame["level"].to_list() == [i % 5 for i in range(47)]
    assert frame["batch"].to_list() == [f"{i // 10:05d}" for i in range(47)]
    assert frame["output"].to_list()[:2] == ["answer 0 to id-000000", "answer 1 to id-000001"]
    dead = frame.row(12, named=True)
    assert (dead["output"], dead["error"], dead["tries"]) == (None, "prompt_too_long", 3)
    assert (table.rows, table.ok, table.dead, table.duplicates, table.parts) == (47, 46, 1, 0, 3)
    assert table.prompt_tokens == frame["prompt_tokens"].sum()
    assert table.usd == pytest.approx(0.046)
    assert [column.name for column in table.columns] == frame.columns
    assert store.current_published() == table.version
    assert list(tmp_path.glob("*.parquet")) == []


def test_duckdb_and_datasets_open_the_table(
    store: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_snapshot(store, questions(25), duplicates={"copy-1": "id-000003"})
    commit(store, manifest)
    table = do_publish(store, manifest, tmp_path)
    lines = "SELECT count(*), count(DISTINCT row_id) FROM read_parquet(?)"
    found = duckdb.sql(lines, params=[table.glob(store.objects)]).fetchall()
    assert found == [(26, 26)]

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    import datasets

    datasets.disable_progress_bars()
    cache = str(tmp_path / "cache")
    by_file = datasets.load_dataset("parquet", data_files=table.glob(store.objects), cache_dir=cache)
    by_folder = datasets.load_dataset(table.uri(store.objects), cache_dir=cache)
    assert by_file["train"].num_rows == by_folder["train"].num_rows == 26
    assert by_folder["train"][25]["duplicate_of"] == "id-000003"
    assert by_folder["train"].column_names == [column.name for column in table.columns]


def test_a_duplicate_has_the_outcome_of_the_row_it_repeats_and_costs_nothing(
    store: DatasetStore, tmp_path: Path
) -> None:
    copies = {f"copy-{i:03d}": f"id-{(i * 7) % 30:06d}" for i in range(40)} | {"copy-dead": "id-000012"}
    manifest = write_snapshot(store, questions(30), duplicates=copies)
    commit(store, manifest, dead=["id-000012"])
    table = do_publish(store, manifest, tmp_path)
    frame = read(store, table)
    alone = frame.filter(pl.col("duplicate_of").is_null())
    lines = frame.filter(pl.col("duplicate_of").is_not_null())
    assert lines["row_id"].to_list() == list(copies)
    assert lines["duplicate_of"].to_list() == list(copies.values())
    outcomes = {line["row_id"]: line for line in alone.to_dicts()}
    for line in lines.to_dicts():
        first = outcomes[line["duplicate_of"]]
        same = ("output", "error", "error_message", "finish_reason", "batch", "started_at", "topic", "model")
        assert {name: line[name] for name in same} == {name: first[name] for name in same}
        assert [line[name] for name in ("prompt_tokens", "completion_tokens", "tries", "seconds", "usd")] == [0] * 5
    assert (table.rows, table.duplicates, table.dead, table.dead_duplicates) == (71, 41, 4, 3)
    assert table.completion_tokens == alone["completion_tokens"].sum()
    assert table.usd == pytest.approx(0.029)
    assert sum(source.rows for source in table.sources) == 30


def test_a_duplicate_of_a_row_that_does_not_exist_is_refused(store: DatasetStore, tmp_path: Path) -> None:
    rows = questions(10)
    manifest = write_snapshot(store, [*rows, *questions(1, start=99)], duplicates={"copy": "id-000099"})
    other = write_snapshot(store, rows)
    commit(store, other)
    torn = other.model_copy(update={"duplicates": 1, "duplicate_shards": manifest.duplicate_shards})
    shard = manifest.duplicate_shards[0].path
    data = store.objects.get(store.snapshot_path(manifest.snapshot, shard))
    store.objects.put(store.snapshot_path(other.snapshot, shard), data)
    with pytest.raises(CorruptObject, match="in no batch"):
        do_publish(store, torn, tmp_path)
    assert store.current_published() is None


def test_an_incomplete_snapshot_is_refused_and_the_missing_batches_are_named(
    store: DatasetStore, tmp_path: Path
) -> None:
    manifest = write_snapshot(store, questions(300))
    commit(store, manifest, keys=["00000", "00007"])
    with pytest.raises(
        IncompleteSnapshot, match=r"28 of 30 batches have no object \(00001, 00002, .*00021, …\)"
    ) as caught:
        do_publish(store, manifest, tmp_path)
    assert len(caught.value.missing) == 28
    assert not list(store.objects.list("sums/published/"))


def test_an_unchanged_table_is_not_written_again(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(47))
    commit(store, manifest)
    first = do_publish(store, manifest, tmp_path, now=1.0)
    store.objects.delete(["sums/published/CURRENT"])
    again = do_publish(store, manifest, tmp_path, now=2.0)
    assert again == first
    assert store.current_published() == first.version


def test_a_version_that_lost_a_file_is_written_anew(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(47))
    commit(store, manifest)
    first = do_publish(store, manifest, tmp_path, now=1.0)
    store.objects.delete([f"{first.path}/part-00001.parquet"])
    assert broken_files(store, first) == ["part-00001.parquet"]
    again = do_publish(store, manifest, tmp_path, now=2.0)
    assert (again.version, again.created_at, broken_files(store, again)) == (first.version, 2.0, [])
    overwrite(store, f"{first.path}/manifest.json", b"{torn")
    assert do_publish(store, manifest, tmp_path, now=3.0).created_at == 3.0


def test_another_generation_of_a_batch_makes_another_version(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(20))
    commit(store, manifest, dead=["id-000003"])
    first = do_publish(store, manifest, tmp_path)
    commit(store, manifest, keys=["00000"], generation=1)
    second = do_publish(store, manifest, tmp_path)
    assert first.version != second.version == store.current_published()
    assert (first.dead, second.dead, second.generations) == (1, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", ["part-00001.parquet", "README.md", "manifest.json", "CURRENT"])
def test_an_aborted_publication_leaves_the_former_table(
    store: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: str
) -> None:
    manifest = write_snapshot(store, questions(47))
    commit(store, manifest)
    first = do_publish(store, manifest, tmp_path)
    commit(store, manifest, generation=1)

    class Killed(BaseException):
        pass

    real_put, real_upload = LocalObjects.put, LocalObjects.upload

    def put(self: LocalObjects, path: str, data: bytes) -> None:
        if path.endswith(stop_at):
            raise Killed
        real_put(self, path, data)

    def upload(self: LocalObjects, path: str, file: Path) -> None:
        if path.endswith(stop_at):
            raise Killed
        real_upload(self, path, file)

    with monkeypatch.context() as patch:
        patch.setattr(LocalObjects, "put", put)
        patch.setattr(LocalObjects, "upload", upload)
        with pytest.raises(Killed):
            do_publish(store, manifest, tmp_path)
    assert published_table(store) == first
    assert read(store, first)["row_id"].n_unique() == 47
    assert [file for file in tmp_path.iterdir() if file.is_file()] == []

    second = do_publish(store, manifest, tmp_path)
    assert published_table(store) == second != first
    assert broken_files(store, second) == []


def test_only_the_newest_versions_are_kept_and_aborted_ones_go(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(20))
    versions = []
    store.objects.put("sums/published/0123456789abcdef/part-00000.parquet", b"left by an aborted publication")
    for generation in range(4):
        commit(store, manifest, generation=generation)
        versions.append(do_publish(store, manifest, tmp_path, now=float(generation)).version)
    found = {info.path.split("/")[2] for info in store.objects.list("sums/published/")}
    assert found == {"CURRENT", *versions[2:]}


def test_an_older_publication_that_ends_late_does_not_take_readers_back(
    store: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_snapshot(store, questions(20))
    commit(store, manifest)
    slow = tmp_path / "slow"
    slow.mkdir()
    newer: list[PublishedTable] = []
    real = LocalObjects.upload

    def overtaken(self: LocalObjects, path: str, file: Path) -> None:
        real(self, path, file)
        if not newer:
            monkeypatch.setattr(LocalObjects, "upload", real)
            commit(store, manifest, generation=1)
            newer.append(do_publish(store, manifest, tmp_path))

    monkeypatch.setattr(LocalObjects, "upload", overtaken)
    with pytest.raises(SupersededTable, match=r"readers see version"):
        do_publish(store, manifest, slow)
    assert store.current_published() == newer[0].version


def test_a_source_that_goes_back_publishes_its_former_snapshot_again(store: DatasetStore, tmp_path: Path) -> None:
    first = write_snapshot(store, questions(20))
    commit(store, first)
    before = do_publish(store, first, tmp_path)
    second = write_snapshot(store, questions(30))
    commit(store, second)
    do_publish(store, second, tmp_path)
    store.set_current_snapshot(first.snapshot)
    assert do_publish(store, first, tmp_path).version == before.version == store.current_published()


def damage(data: bytes, kind: str) -> bytes:
    middle = len(data) // 4  # in the values of a page: its header has no checksum, which `verify` sees by the whole
    return {"truncated": data[:middle], "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]}[kind]


@pytest.mark.parametrize("kind", ["truncated", "flipped"])
def test_a_damaged_object_is_never_published(store: DatasetStore, tmp_path: Path, kind: str) -> None:
    manifest = write_snapshot(store, questions(47))
    commit(store, manifest)
    path = current_path(store, manifest, "00003")
    overwrite(store, path, damage(store.objects.get(path), kind))
    with pytest.raises(CorruptObject, match=path):
        do_publish(store, manifest, tmp_path)
    assert store.current_published() is None


def test_an_object_of_other_rows_is_never_published(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(47))
    commit(store, manifest)
    other = store.objects.get(current_path(store, manifest, "00002"))
    path = current_path(store, manifest, "00003")
    overwrite(store, path, other)
    with pytest.raises(CorruptObject, match="its footer names batch 00002"):
        do_publish(store, manifest, tmp_path)


def test_keep_columns_keep_their_types_and_never_shadow_an_outcome(store: DatasetStore, tmp_path: Path) -> None:
    types = {"tags": pa.list_(pa.large_string()), "output": pa.string(), "when": pa.timestamp("ms", "UTC")}
    rows = [SourceRow(f"r{i}", f"q{i}", {"tags": ["a", None], "output": f"gold {i}", "when": i}) for i in range(7)]
    manifest = write_snapshot(store, rows, keep_schema=types, duplicates={"again": "r2"})
    commit(store, manifest)
    table = do_publish(store, manifest, tmp_path)
    frame = read(store, table)
    assert frame["source_output"].to_list() == [*(f"gold {i}" for i in range(7)), "gold 2"]
    assert frame["output"][0] == "answer 0 to r0"
    assert frame["tags"].to_list() == [["a", None]] * 8
    assert frame.schema["when"] == pl.Datetime("ms", "UTC")


def test_a_dataset_without_keep_columns_or_of_vectors_is_published(store: DatasetStore, tmp_path: Path) -> None:
    rows = [SourceRow(f"r{i}", f"q{i}", {}) for i in range(15)]
    manifest = write_snapshot(store, rows, task="embedding", duplicates={"again": "r3"})
    commit(store, manifest, dead=["r4"])
    frame = read(store, do_publish(store, manifest, tmp_path))
    assert frame["output"].to_list()[2:5] == [[2.0, 1.0, 0.5], [3.0, 1.0, 0.5], None]
    assert frame["output"].to_list()[15] == [3.0, 1.0, 0.5]


def test_an_empty_snapshot_makes_an_empty_table(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, [])
    table = do_publish(store, manifest, tmp_path)
    assert (table.rows, table.parts, table.usd) == (0, 1, None)
    assert read(store, table).height == 0


def test_the_card_says_what_it_is_and_cuts_long_cells(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(12), duplicates={"copy": "id-000001"}, rejected=2)

    def answer(row: Row, number: int) -> str:
        return "| a `fence` ``` \n" + "x" * 5000

    commit(store, manifest, dead=["id-000005"], answer=answer)
    table = do_publish(store, manifest, tmp_path)
    card = store.objects.get(f"{table.path}/README.md").decode()
    assert table.simulated
    for said in ("**Simulated.**", "team:sums", "Sums that a model", "13: 12 with a completion, 1 without", "$0.0110"):
        assert said in card
    assert "2 (not in the table)" in card
    assert max(map(len, card.splitlines())) < 1500
    lines: Iterator[str] = iter(card.splitlines())
    assert next(lines) == "---"
    front = "\n".join(line for line in lines)
    assert 'path: "part-*.parquet"' in front


def test_the_card_has_the_bill_and_its_useful_part(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(5))
    commit(store, manifest)
    bill = Split(booting=0.5, useful=2.0, idle=0.25, wasted=0.125)
    table = publish(store, manifest, card=Card(bill=bill), now=0.0, workdir=tmp_path)
    said = "| bill of the dataset | $2.8750 for all instances rented so far: $2.0000 useful, $0.5000 boot, "
    assert said + "$0.2500 idle, $0.1250 wasted |" in store.objects.get(f"{table.path}/README.md").decode()
    metadata = table_metadata(store, table, bill)
    assert (metadata["usd_billed"], metadata["usd_useful"]) == (2.875, 2.0)


@pytest.mark.parametrize(
    ("standing", "said"),
    [(0, "$0.1250 wasted; $1.0000 of it simulated, paid by nobody |"), (1, "$2.0000 useful ($0.7500 of it simulated,")],
)
def test_the_card_says_how_much_of_the_bill_is_simulated(
    store: DatasetStore, tmp_path: Path, standing: int, said: str
) -> None:
    manifest = write_snapshot(store, questions(5))
    commit(store, manifest)
    bill = Split(booting=0.5, useful=2.0, idle=0.25, wasted=0.125)
    card = Card(bill=bill, standing=standing, simulated=Split(booting=0.25, useful=0.75))
    table = publish(store, manifest, card=card, now=0.0, workdir=tmp_path)
    assert said in store.objects.get(f"{table.path}/README.md").decode()


def test_a_bill_that_is_not_final_is_not_added_up_where_nobody_writes_it_again(
    store: DatasetStore, tmp_path: Path
) -> None:
    manifest = write_snapshot(store, questions(5))
    commit(store, manifest)
    bill = Split(booting=0.5, useful=2.0, idle=0.25, wasted=0.125)
    table = publish(store, manifest, card=Card(bill=bill, standing=1), now=0.0, workdir=tmp_path)
    card = store.objects.get(f"{table.path}/README.md").decode()
    assert "| $2.0000 useful; boots, idle and wasted time were not final, as 1 instance had not ended" in card
    assert "2.8750" not in card and "usd_billed" not in table_metadata(store, table, bill, final=False)


def test_a_price_that_is_unknown_stays_unknown(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(5))
    entry, rows = next(store.rows(manifest, store.entries(manifest.snapshot)))
    outcomes = [dataclasses.replace(outcome(row), usd=None) for row in rows]
    from resources.store.dataset_store import BatchFooter

    footer = BatchFooter.of(
        "sums", entry, outcomes, snapshot=manifest.snapshot, generation=0, epoch=1, run_id="r", root_run_id="r"
    )
    store.commit(footer, outcomes, "chat")
    table = do_publish(store, manifest, tmp_path)
    assert (table.usd, table.unpriced) == (None, 5)
    assert (
        "| cost of these rows | not known; 5 rows without a known price |"
        in store.objects.get(f"{table.path}/README.md").decode()
    )


def test_a_snapshot_that_prompts_made_goes_all_the_way(store: DatasetStore, tmp_path: Path) -> None:
    source = tmp_path / "questions.jsonl"
    lines = [{"number": i, "question": f"How much is {i % 40}?", "marks": ["a", str(i)]} for i in range(100)]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "{torn\n")
    declared = {
        "name": "sums",
        "source": {"path": str(source)},
        "prompt": {"user": "{{ question }}"},
        "model": "simulated/tiny",
        "id": "number",
        "keep_columns": ["number", "marks"],
        "batch_rows": 10,
        "dedupe": True,
        "on_bad_row": "skip",
    }
    for name in ("prompts", "table"):
        (tmp_path / name).mkdir()
    manifest = build_snapshot(load_spec(declared, "defs.yaml"), store, now=1.0, workdir=tmp_path / "prompts")
    commit(store, manifest, dead=["5"])
    table = do_publish(store, manifest, tmp_path / "table")
    frame = read(store, table).sort("number")
    assert frame["number"].to_list() == list(range(100))
    assert frame["marks"].to_list() == [line["marks"] for line in lines]
    assert frame["duplicate_of"].to_list() == [None] * 40 + [str(i % 40) for i in range(40, 100)]
    assert frame["output"].to_list()[40:80] == frame["output"].to_list()[:40]
    assert frame.filter(pl.col("error").is_not_null())["row_id"].to_list() == ["5", "45", "85"]
