"""Dead letters: every row without a completion, once, with its reason; nothing else is read whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from support.snapshots import SourceRow, commit, current_path, overwrite, questions, write_snapshot

from batch_assets.publishing.dead_letters import DeadLetters, dead_batches, dead_letter_examples, dead_letters
from resources.objects.opening import CorruptObject, LocalObjects, Objects
from resources.store.dataset_store import BatchObject, DatasetStore

LOST = ["id-000003", "id-000012", "id-000018", "id-000046"]


@pytest.fixture
def store(local_objects: Objects) -> DatasetStore:
    return DatasetStore(local_objects, "sums")


def read(store: DatasetStore, found: DeadLetters) -> pl.DataFrame:
    options = store.objects.storage_options()
    return pl.scan_parquet(store.objects.uri(found.path), storage_options=options).collect()


@pytest.mark.slow
def test_every_row_without_a_completion_is_listed_with_its_reason(any_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(any_objects, "sums")
    manifest = write_snapshot(store, questions(47), duplicates={"copy": "id-000003"})
    commit(store, manifest, dead=LOST)
    found = dead_letters(store, manifest, workdir=tmp_path)
    assert (found.rows, found.batches) == (4, ("00000", "00001", "00004"))
    assert (found.by_error, found.by_instance_type) == ({"prompt_too_long": 4}, {"1x H100": 4})
    frame = read(store, found)
    assert frame["row_id"].to_list() == LOST
    assert frame["batch"].to_list() == ["00000", "00001", "00001", "00004"]
    assert frame["topic"].to_list() == ["topic 0", "topic 0", "topic 0", "topic 1"]
    assert frame.columns == [
        "row_id",
        "batch",
        "topic",
        "level",
        "error",
        "error_message",
        "tries",
        "model",
        "engine",
        "provider",
        "instance_type",
        "run_id",
        "started_at",
    ]
    assert frame["tries"].to_list() == [3] * 4
    assert list(tmp_path.glob("*.parquet")) == []
    assert dead_batches(store) == ["00000", "00001", "00004"]
    assert dead_batches(store, "prompt_too_long") == ["00000", "00001", "00004"] and dead_batches(store, "other") == []


def test_each_error_has_an_example_with_the_server_s_words_and_no_text_of_a_prompt(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(20))
    assert dead_letter_examples(store, manifest) == []
    bad = {
        "id-000003": ("rejected_402", "no credit for 'What is 3 plus 3?'"),
        "id-000004": ("rejected_402", "no credit"),
        "id-000012": ("schema_invalid", "'the answer' is no number"),
    }
    for footer in commit(store, manifest).values():
        batch = BatchObject(footer.key, footer.data_version, 0)
        outcomes = [
            replace(one, output=None, finish_reason=None, error=bad[one.row_id][0], error_message=bad[one.row_id][1])
            if one.row_id in bad
            else one
            for one in store.outcomes(batch)
        ]
        dead = sum(one.error is not None for one in outcomes)
        again = footer.model_copy(update={"generation": 1, "dead": dead, "ok": footer.ok - dead})
        store.commit(again, outcomes, "chat")
    dead_letters(store, manifest)
    found = [(one.error, one.rows, one.row_id, one.says) for one in dead_letter_examples(store, manifest)]
    assert found == [
        ("rejected_402", 2, "id-000003", "no credit for '[…]'"),
        ("schema_invalid", 1, "id-000012", ""),
    ]


def test_a_dataset_without_dead_letters_has_an_empty_list(store: DatasetStore) -> None:
    assert dead_batches(store) == []
    manifest = write_snapshot(store, questions(47))
    commit(store, manifest)
    found = dead_letters(store, manifest)
    assert (found.rows, found.batches, found.by_error, dead_batches(store)) == (0, (), {}, [])
    assert read(store, found).columns[:3] == ["row_id", "batch", "topic"]


def test_an_unfinished_snapshot_lists_what_is_there(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(47))
    assert dead_letters(store, manifest).rows == 0
    commit(store, manifest, keys=["00001"], dead=LOST)
    assert dead_letters(store, manifest).batches == ("00001",)


def test_only_objects_with_dead_letters_are_read_whole(store: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_snapshot(store, questions(300))
    commit(store, manifest, dead=["id-000123"])
    whole: list[str] = []
    real = DatasetStore.batch_table

    def noting(self: DatasetStore, batch: BatchObject) -> object:
        whole.append(batch.key)
        return real(self, batch)

    monkeypatch.setattr(DatasetStore, "batch_table", noting)
    dead_letters(store, manifest)
    assert whole == ["00012"]
    dead_letters(store, manifest)
    assert whole == ["00012"]


def test_a_redrive_that_completes_rows_takes_them_off_the_list(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(47))
    commit(store, manifest, dead=LOST)
    first = dead_letters(store, manifest)
    commit(store, manifest, keys=["00001"], dead=["id-000018"], generation=1)
    second = dead_letters(store, manifest)
    assert read(store, second)["row_id"].to_list() == ["id-000003", "id-000018", "id-000046"]
    commit(store, manifest, generation=2)
    third = dead_letters(store, manifest)
    assert (third.rows, dead_batches(store)) == (0, [])
    left = {info.path for info in store.objects.list("sums/dead_letters/")}
    files = {path.replace(".parquet", ending) for path in (second.path, third.path) for ending in (".parquet", ".json")}
    assert left == {"sums/dead_letters/CURRENT", *files}
    assert first.path not in left


def test_an_aborted_list_leaves_the_former_one(store: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_snapshot(store, questions(47))
    commit(store, manifest, dead=LOST)
    first = dead_letters(store, manifest)
    commit(store, manifest, keys=["00000"], generation=1)

    def killed(self: LocalObjects, path: str, file: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalObjects, "upload", killed)
        with pytest.raises(KeyboardInterrupt):
            dead_letters(store, manifest)
    assert dead_batches(store) == list(first.batches)
    assert dead_letters(store, manifest).batches == ("00001", "00004")


def test_a_damaged_object_is_named(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(47))
    commit(store, manifest, dead=LOST)
    path = current_path(store, manifest, "00002")
    overwrite(store, path, b"torn")
    with pytest.raises(CorruptObject, match=path):
        dead_letters(store, manifest)


def test_a_torn_list_says_what_to_do(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(47))
    commit(store, manifest, dead=LOST)
    overwrite(store, dead_letters(store, manifest).path, b"torn")
    with pytest.raises(CorruptObject, match="materialize sums/dead_letters: it is written anew"):
        dead_batches(store)


def test_vectors_and_rows_without_keep_columns_have_dead_letters_too(store: DatasetStore) -> None:
    rows = [SourceRow(f"r{i}", f"q{i}", {}) for i in range(25)]
    manifest = write_snapshot(store, rows, task="embedding")
    commit(store, manifest, dead=["r7", "r24"])
    frame = read(store, dead_letters(store, manifest))
    assert frame["row_id"].to_list() == ["r7", "r24"]
    assert "output" not in frame.columns
