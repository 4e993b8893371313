"""The column `prompt` of a published table: what each row asked, in a type that readers expect, in bounded memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import duckdb
import orjson
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.snapshots import SourceRow, commit, questions, write_snapshot

from batch_assets.publishing.batch_reader import CommittedRows, pieces
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.dead_letters import dead_letters
from batch_assets.publishing.duplicates import Duplicates
from batch_assets.publishing.prompt_column import decoded_prompts, prompt_bytes
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import PublishedTable, table_versions
from batch_assets.publishing.table_files import table_schema
from batch_assets.publishing.verify import LedgerEntry, verify
from resources.objects.object_read_ahead import read_ahead
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

STRANGE = ["plain", 'a "quote" \\ and \n a line', "Ünïcödé 漢字 🦋", "\u0000\u001f\u2028", "{}", "null", " "]


@pytest.fixture
def store(local_objects: Objects) -> DatasetStore:
    return DatasetStore(local_objects, "sums")


def do_publish(store: DatasetStore, manifest: SnapshotManifest, workdir: Path, **options: Any) -> PublishedTable:
    return publish(store, manifest, card=Card(), now=1.0, workdir=workdir, **options)


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.mark.slow
def test_each_line_has_the_messages_it_asked_also_a_duplicate(any_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(any_objects, "sums")
    rows = questions(47)
    manifest = write_snapshot(store, rows, duplicates={"copy-1": "id-000003", "copy-2": "id-000040"})
    commit(store, manifest, dead=["id-000012"])
    table = do_publish(store, manifest, tmp_path, part_rows=20)
    frame = pl.scan_parquet(table.glob(any_objects), storage_options=any_objects.storage_options()).collect()
    expected = [asked(row.question) for row in rows]
    assert frame["prompt"].to_list() == [*expected, expected[3], expected[40]]
    assert frame.columns.index("prompt") == frame.columns.index("output") - 1
    assert {column.name: column.type for column in table.columns}["prompt"] == (
        "list<item: struct<role: string, content: string>>"
    )


@pytest.mark.parametrize("task", ["completion", "embedding"])
def test_a_completion_and_a_vector_have_the_text(store: DatasetStore, tmp_path: Path, task: Any) -> None:
    rows = [SourceRow(f"r{i}", text, {}) for i, text in enumerate(STRANGE)]
    manifest = write_snapshot(store, rows, task=task, duplicates={"again": "r2"})
    commit(store, manifest)
    frame = pl.read_parquet(do_publish(store, manifest, tmp_path).glob(store.objects))
    assert frame["prompt"].to_list() == [*STRANGE, STRANGE[2]]


def test_every_text_is_decoded_as_it_was_stored() -> None:
    prompts: list[Any] = [[{"content": text, "role": "system"}, {"content": "x", "role": "user"}] for text in STRANGE]
    stored = pa.chunked_array([[orjson.dumps(prompt) for prompt in prompts]], pa.binary())
    decoded = decoded_prompts(stored, "chat")
    assert decoded.to_pylist() == prompts
    assert prompt_bytes(decoded).tolist() == [len(text.encode()) + 1 for text in STRANGE]
    assert prompt_bytes(decoded.slice(2, 3)).tolist() == [len(text.encode()) + 1 for text in STRANGE[2:5]]


def test_readers_of_the_table_find_messages(
    store: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_snapshot(store, questions(5))
    commit(store, manifest)
    table = do_publish(store, manifest, tmp_path)
    found = duckdb.sql("SELECT prompt[-1].content, output FROM read_parquet(?)", params=[table.glob(store.objects)])
    assert found.fetchall()[2][0] == "What is 2 plus 2?"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    import datasets

    datasets.disable_progress_bars()
    loaded = datasets.load_dataset(table.uri(store.objects), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded[2]["prompt"] == asked("What is 2 plus 2?")


def test_without_the_prompt_a_table_is_as_it_was_before_there_was_one(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(25), duplicates={"copy": "id-000003"})
    commit(store, manifest)
    entries = store.entries(manifest.snapshot)
    with_prompt, without, *_ = table_versions(manifest.snapshot, store.current_objects(entries))
    plain = do_publish(store, manifest, tmp_path, include_prompt=False)
    assert plain.version == without
    assert "prompt" not in {column.name for column in plain.columns}
    assert "prompt" not in pl.read_parquet_schema(plain.glob(store.objects))
    full = do_publish(store, manifest, tmp_path)
    assert full.version == with_prompt == store.current_published()
    assert do_publish(store, manifest, tmp_path, include_prompt=False).version == without == store.current_published()


@pytest.mark.parametrize("include_prompt", [True, False])
def test_both_kinds_of_tables_agree_with_their_store(store: DatasetStore, tmp_path: Path, include_prompt: bool) -> None:
    manifest = write_snapshot(store, questions(25))
    footers = commit(store, manifest, dead=["id-000007"])
    ledger = {key: LedgerEntry(footer.data_version) for key, footer in footers.items()}
    table = do_publish(store, manifest, tmp_path, include_prompt=include_prompt)
    dead_letters(store, manifest, workdir=tmp_path)
    assert verify(store, ledger).differences == ()
    commit(store, manifest, keys=["00001"], generation=1)
    stale = [found for found in verify(store, ledger).differences if found.kind == "stale_table"]
    assert [found.found for found in stale] == [f"version {table.version}"]


@pytest.mark.slow
def test_long_prompts_make_small_row_groups(store: DatasetStore, tmp_path: Path) -> None:
    rows = [SourceRow(f"r{i}", f"{i:07d}" * 20_000, {}) for i in range(250)]
    manifest = write_snapshot(store, rows, batch_rows=250, duplicates={f"c{i}": "r7" for i in range(200)})
    commit(store, manifest)
    table = do_publish(store, manifest, tmp_path)
    with pq.ParquetFile(store.objects.open(f"{table.path}/part-00000.parquet")) as part:
        sizes = [part.metadata.row_group(i).total_byte_size for i in range(part.metadata.num_row_groups)]
    assert part.metadata.num_rows == 450
    assert max(sizes) < 32 << 20
    frame = pl.read_parquet(table.glob(store.objects), columns=["prompt"])
    assert [line[0]["content"][:7] for line in frame["prompt"].to_list()[250:]] == ["0000007"] * 200


@pytest.mark.slow
def test_duplicates_of_long_prompts_come_in_small_tables(store: DatasetStore, tmp_path: Path) -> None:
    rows = [SourceRow("long", "x" * (1 << 20), {}), *(SourceRow(f"r{i}", "short", {}) for i in range(300))]
    copies = {f"c{i}": "long" if i % 3 == 0 else f"r{i}" for i in range(300)}
    manifest = write_snapshot(store, rows, duplicates=copies)
    commit(store, manifest)
    entries = store.entries(manifest.snapshot)
    committed = CommittedRows(store, manifest, store.current_objects(entries), prompt=True)
    with Duplicates(store, manifest, table_schema(store, manifest, prompt=True), tmp_path) as duplicates:
        for piece in pieces(entries):
            duplicates.note(committed.read(piece))
        tables = list(duplicates.rows())
    assert [row_id for table in tables for row_id in table.column("row_id").to_pylist()] == list(copies)
    assert max(int(prompt_bytes(table.column("prompt")).sum()) for table in tables) <= 8 << 20


def test_neighbouring_batches_are_read_together_up_to_a_size(store: DatasetStore) -> None:
    rows = [SourceRow(f"r{i}", f"{i:05d}" * 20_000, {}) for i in range(60)]
    manifest = write_snapshot(store, rows, batch_rows=5, batches_per_shard=12)
    commit(store, manifest)
    entries = store.entries(manifest.snapshot)
    current = store.current_objects(entries)
    assert [len(piece) for piece in pieces(entries, CommittedRows(store, manifest, current).bytes_of)] == [12]
    with_prompts = CommittedRows(store, manifest, current, prompt=True)
    assert 400_000 < with_prompts.bytes_of(entries[0]) < 600_000
    large = [len(piece) for piece in pieces(entries, lambda entry: 10 * with_prompts.bytes_of(entry))]
    assert large == [3, 3, 3, 3]


def test_no_more_bytes_are_read_ahead_than_fit() -> None:
    guard, alive, most = threading.Lock(), 0, 0

    def read(size: int) -> int:
        nonlocal alive, most
        with guard:
            alive += size
            most = max(most, alive)
        return size

    for size in read_ahead(read, [30 << 20] * 20, 8, lambda job: job):
        with guard:
            alive -= size
    assert most <= 3 * (30 << 20)  # two read ahead, and the one in use
    assert list(read_ahead(lambda job: job, [100 << 20, 1, 2], 4, lambda job: job)) == [100 << 20, 1, 2]
