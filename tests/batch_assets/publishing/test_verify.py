"""Verification: agreement is silent, and every kind of damage is named with its batch and what to do."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.snapshots import commit, current_path, overwrite, questions, write_snapshot

from batch_assets.cli.dataset_commands.status_command import verified
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.dead_letters import dead_letters
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import PublishedTable
from batch_assets.publishing.verify import Difference, LedgerEntry, verify
from resources.objects.opening import Objects
from resources.store.dataset_store import FOOTER_KEY, BatchFooter, BatchObject, DatasetStore, SnapshotManifest

COPIES = {"copy-1": "id-000003", "copy-2": "id-000012"}


def ledger_of(store: DatasetStore, footers: dict[str, BatchFooter]) -> dict[str, LedgerEntry]:
    return {
        key: LedgerEntry(
            footer.data_version,
            store.objects.uri(store.batch_path(BatchObject(key, footer.data_version, footer.generation))),
            footer.rows,
            footer.ok,
            footer.dead,
            footer.generation,
        )
        for key, footer in footers.items()
    }


class Finished:
    """A dataset with everything in its place: 47 rows, 2 of them dead, 2 duplicates."""

    def __init__(self, objects: Objects, workdir: Path) -> None:
        self.store, self.workdir = DatasetStore(objects, "sums"), workdir
        self.manifest: SnapshotManifest = write_snapshot(self.store, questions(47), duplicates=COPIES, rejected=1)
        self.footers = commit(self.store, self.manifest, dead=["id-000012", "id-000040"])
        self.ledger = ledger_of(self.store, self.footers)
        self.publish()

    def publish(self) -> PublishedTable:
        dead_letters(self.store, self.manifest)
        self.table = publish(self.store, self.manifest, card=Card(), now=1.0, workdir=self.workdir, part_rows=20)
        return self.table

    def path(self, key: str) -> str:
        return current_path(self.store, self.manifest, key)

    def differences(self) -> list[tuple[str, str | None]]:
        return [(found.kind, found.batch) for found in self.check()]

    def check(self) -> tuple[Difference, ...]:
        return verify(self.store, self.ledger, threads=3).differences


@pytest.fixture
def finished(local_objects: Objects, tmp_path: Path) -> Finished:
    return Finished(local_objects, tmp_path)


@pytest.mark.slow
def test_a_finished_dataset_verifies_with_stable_totals(any_objects: Objects, tmp_path: Path) -> None:
    finished = Finished(any_objects, tmp_path)
    found = verify(finished.store, finished.ledger)
    assert found.differences == ()
    assert found.ok
    footers = finished.footers.values()
    assert dataclasses.asdict(found.totals) == {
        "dataset": "sums",
        "rows": 47,
        "ok": 45,
        "dead": 2,
        "batches": 5,
        "batches_done": 5,
        "prompt_tokens": sum(footer.prompt_tokens for footer in footers),
        "completion_tokens": sum(footer.completion_tokens for footer in footers),
        "table": finished.table.uri(any_objects),
        "source_rows": finished.manifest.source_rows,
        "rejected": 1,
        "simulated": True,
    }


def test_the_sentence_says_how_many_rows_of_the_source_are_left_out(finished: Finished) -> None:
    said = verified("sums", verify(finished.store, finished.ledger))
    assert "47 rows, 45 ok, 2 dead; 1 of 50 rows of the source is left out (on_bad_row: skip)" in said


def test_the_sentence_says_that_a_table_is_simulated(finished: Finished) -> None:
    found = verify(finished.store, finished.ledger)
    assert verified("sums", found).endswith("; simulated: its texts are made up by an engine simulator")
    real = dataclasses.replace(found, totals=dataclasses.replace(found.totals, simulated=False))
    assert "simulated" not in verified("sums", real)


def test_before_the_first_snapshot_there_is_one_difference(local_objects: Objects) -> None:
    found = verify(DatasetStore(local_objects, "sums"), {})
    assert [difference.kind for difference in found.differences] == ["no_snapshot"]
    assert found.totals.rows == 0


def test_unfinished_work_is_missing_batches_and_nothing_else(local_objects: Objects) -> None:
    store = DatasetStore(local_objects, "sums")
    manifest = write_snapshot(store, questions(47))
    footers = commit(store, manifest, keys=["00001"])
    found = verify(store, ledger_of(store, footers))
    assert [(difference.kind, difference.batch) for difference in found.differences] == [
        ("missing_batch", key) for key in ("00000", "00002", "00003", "00004")
    ]
    assert (found.totals.batches, found.totals.batches_done, found.totals.table) == (5, 1, None)


def test_a_table_of_the_former_snapshot_is_no_difference_while_a_refresh_runs(finished: Finished) -> None:
    manifest = write_snapshot(finished.store, questions(57))
    finished.ledger |= ledger_of(finished.store, commit(finished.store, manifest, keys=["00005"]))
    assert finished.differences() == [("missing_batch", "00004")]
    finished.ledger |= ledger_of(finished.store, commit(finished.store, manifest))
    assert finished.differences() == [("stale_table", None), ("stale_dead_letters", None)]


def test_a_catalog_entry_without_its_object_is_void(finished: Finished) -> None:
    finished.store.objects.delete([finished.path("00002")])
    assert finished.differences() == [("void_catalog_entry", "00002")]


def test_an_object_without_its_catalog_entry_is_named(finished: Finished) -> None:
    del finished.ledger["00003"]
    (found,) = finished.check()
    assert (found.kind, found.batch, found.expected) == ("missing_catalog_entry", "00003", finished.path("00003"))
    assert "rebuild-ledger" in found.todo


def test_a_catalog_entry_of_other_rows_is_named(finished: Finished) -> None:
    finished.ledger["00003"] = dataclasses.replace(finished.ledger["00003"], data_version="0123456789abcdef")
    assert finished.differences() == [("wrong_data_version", "00003")]


@pytest.mark.parametrize("field", ["rows", "ok", "dead"])
def test_catalog_counts_that_differ_from_the_object_are_named(finished: Finished, field: str) -> None:
    finished.ledger["00001"] = dataclasses.replace(finished.ledger["00001"], **{field: 7})
    assert finished.differences() == [("wrong_catalog_counts", "00001")]


def test_a_catalog_that_knows_only_data_versions_is_compared_by_them(finished: Finished) -> None:
    finished.ledger = {key: LedgerEntry(entry.data_version) for key, entry in finished.ledger.items()}
    assert finished.differences() == []


def test_a_catalog_entry_of_a_batch_that_left_the_snapshot_is_no_difference(finished: Finished) -> None:
    finished.ledger["00099"] = LedgerEntry("no-rows", rows=0)
    assert finished.differences() == []


def test_another_generation_makes_catalog_table_and_dead_letters_stale(finished: Finished) -> None:
    commit(finished.store, finished.manifest, keys=["00001"], generation=1)
    kinds = [("stale_catalog_entry", "00001"), ("stale_table", None), ("stale_dead_letters", None)]
    assert finished.differences() == kinds
    finished.publish()
    assert finished.differences() == kinds[:1]


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


def middle_of_outputs(data: bytes) -> int:
    """A byte in the pages of the column of outputs."""
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    (output,) = [column for column in columns if column.path_in_schema == "output"]
    return int(output.data_page_offset + output.total_compressed_size // 2)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "flipped in the data": lambda data: flip(data, middle_of_outputs(data)),
    "flipped in the footer": lambda data: flip(data, data.index(b"run-1", len(data) // 2) - 20),
    "flipped in the last bytes": lambda data: flip(data, len(data) - 1),
    "another file": lambda data: b"hello",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_object_is_named(finished: Finished, kind: str) -> None:
    path = finished.path("00001")
    overwrite(finished.store, path, DAMAGE[kind](finished.store.objects.get(path)))
    (found,) = finished.check()
    assert (found.kind, found.batch) == ("corrupt_object", "00001")
    assert path in found.found


def rewrite(
    finished: Finished, key: str, change: Callable[[pa.Table], pa.Table], footer: dict[str, object] | None = None
) -> None:
    """Replace an object by one that is whole Parquet but says something else."""
    path = finished.path(key)
    table = pq.read_table(io.BytesIO(finished.store.objects.get(path)))
    said = finished.footers[key].model_copy(update=footer or {})
    sink = io.BytesIO()
    pq.write_table(change(table).replace_schema_metadata({FOOTER_KEY: said.model_dump_json()}), sink)
    overwrite(finished.store, path, sink.getvalue())


def test_an_object_whose_rows_are_not_its_own_is_named(finished: Finished) -> None:
    rewrite(finished, "00001", lambda table: table.take(list(range(9, -1, -1))))
    (found,) = finished.check()
    assert (found.kind, found.batch) == ("corrupt_object", "00001")
    assert "not those of data version" in found.found


def test_an_object_that_lost_a_row_or_has_one_twice_is_named(finished: Finished) -> None:
    rewrite(finished, "00001", lambda table: table.slice(1), {"rows": 9, "ok": 8})
    rewrite(finished, "00003", lambda table: pa.concat_tables([table.slice(0, 9), table.slice(8, 1)]))
    assert finished.differences() == [("corrupt_object", "00001"), ("corrupt_object", "00003")]


def test_a_row_with_neither_output_nor_error_is_named(finished: Finished) -> None:
    def forget(table: pa.Table) -> pa.Table:
        outputs = table.column("output").to_pylist()
        place = table.column_names.index("output")
        return table.set_column(place, "output", pa.array([None, *outputs[1:]], pa.string()))

    rewrite(finished, "00003", forget)
    (found,) = finished.check()
    assert "neither" in found.found


def test_a_footer_that_counts_wrong_is_named(finished: Finished) -> None:
    rewrite(finished, "00003", lambda table: table, {"completion_tokens": 1})
    (found,) = finished.check()
    assert "completion_tokens 1" in found.found


def test_a_snapshot_that_lost_a_shard_or_a_count_is_named(finished: Finished) -> None:
    shard = finished.manifest.shards[1].path
    finished.store.objects.delete([finished.store.snapshot_path(finished.manifest.snapshot, shard)])
    finished.store.put_manifest(finished.manifest.model_copy(update={"rows": 48}))
    kinds = {kind for kind, _ in finished.differences()}
    assert kinds == {"corrupt_snapshot", "wrong_table_counts"}
    overwrite(finished.store, finished.store.snapshot_path(finished.manifest.snapshot, "batches.parquet"), b"torn")
    assert finished.differences() == [("corrupt_snapshot", None)]


def test_a_table_that_was_never_published_is_named(finished: Finished) -> None:
    finished.store.objects.delete(["sums/published/CURRENT", "sums/dead_letters/CURRENT"])
    assert finished.differences() == [("missing_table", None), ("stale_dead_letters", None)]


@pytest.mark.parametrize("kind", ["gone", "flipped", "truncated"])
def test_a_table_file_that_is_gone_or_damaged_is_named(finished: Finished, kind: str) -> None:
    path = f"{finished.table.path}/part-00001.parquet"
    data = finished.store.objects.get(path)
    if kind == "gone":
        finished.store.objects.delete([path])
    else:
        overwrite(finished.store, path, flip(data, 100) if kind == "flipped" else data[:-1])
    (found,) = finished.check()
    assert found.kind == "broken_table"
    assert path in found.expected


def test_a_table_manifest_that_is_gone_or_torn_is_named(finished: Finished) -> None:
    path = f"{finished.table.path}/manifest.json"
    overwrite(finished.store, path, b"{")
    assert finished.differences() == [("broken_table", None)]
    finished.store.objects.delete([path])
    assert finished.differences() == [("broken_table", None)]
    finished.publish()
    assert finished.differences() == []


def test_a_row_id_that_stands_twice_in_the_table_is_named(finished: Finished) -> None:
    first = finished.store.objects.get(f"{finished.table.path}/part-00000.parquet")
    overwrite(finished.store, f"{finished.table.path}/part-00001.parquet", first)
    table = finished.table
    files = [table.files[0], table.files[0].model_copy(update={"name": "part-00001.parquet"}), table.files[2]]
    manifest = table.model_copy(update={"files": files})
    overwrite(finished.store, f"{table.path}/manifest.json", manifest.model_dump_json().encode())
    found = {difference.kind: difference for difference in finished.check()}
    assert set(found) == {"duplicate_ids", "wrong_table_counts"}
    assert found["duplicate_ids"].found.startswith("20 ids more than once: id-000000, ")


def test_a_table_whose_counts_differ_from_the_objects_is_named(finished: Finished) -> None:
    manifest = finished.table.model_copy(update={"dead": 1, "ok": 48})
    overwrite(finished.store, f"{finished.table.path}/manifest.json", manifest.model_dump_json().encode())
    assert {kind for kind, _ in finished.differences()} == {"wrong_table_counts"}


def test_a_torn_list_of_dead_letters_is_named(finished: Finished) -> None:
    found = dead_letters(finished.store, finished.manifest)
    overwrite(finished.store, found.path, b"torn")
    assert finished.differences() == [("stale_dead_letters", None)]
