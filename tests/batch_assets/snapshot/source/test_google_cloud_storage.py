"""Google Cloud Storage as a source, as the store of a dataset, and as the place of its exports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_gcs import FakeGcs, fake_gcs
from support.snapshots import commit

from batch_assets.exports.declared_export import export_declared, is_exported
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.files import find_files, is_folder
from batch_assets.spec.exports import ExportSpec
from batch_assets.spec.models import load_spec
from batch_assets.table_access.opened_table import TableError, table
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore


@pytest.fixture
def gcs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with fake_gcs() as found:
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(found.credentials(tmp_path / "key.json")))
        lines = [json.dumps({"n": f"id-{i}", "q": f"What is {i}?"}) for i in range(30)]
        for part in range(3):
            data = "\n".join(lines[part * 10 : part * 10 + 10]).encode()
            found.objects["data", f"questions/part-{part}.jsonl"] = data
        yield found


def test_a_glob_in_a_bucket_is_read_in_order(gcs: FakeGcs, tmp_path: Path) -> None:
    found = find_files("gs://data/questions/*.jsonl", tmp_path)
    assert [file.name for file in found] == [f"gs://data/questions/part-{part}.jsonl" for part in range(3)]
    assert is_folder("gs://data/questions") and not is_folder("gs://data/answers")
    with pytest.raises(SourceError, match=r"gs://data/answers\.csv: no such file"):
        find_files("gs://data/answers.csv", tmp_path)
    with pytest.raises(SourceError, match=r"expected gs://bucket/key or gs://bucket/folder/"):
        find_files("gs://data", tmp_path)


def test_a_dataset_is_made_published_and_exported_there(gcs: FakeGcs, tmp_path: Path) -> None:
    exports = [{"name": "sft", "format": "messages", "to": "gs://out/sft", "part_rows": 10}]
    spec = load_spec(
        {
            "name": "sums",
            "source": {"path": "gs://data/questions/*.jsonl"},
            "prompt": {"user": "{{ q }}"},
            "model": "simulated/tiny",
            "id": "n",
            "batch_rows": 10,
            "exports": exports,
        },
        "defs.yaml",
    )
    store = DatasetStore(open_objects("gs://store/sets"), "sums")
    manifest = build_snapshot(spec, store, now=1.0, workdir=tmp_path)
    (tmp_path / "again").mkdir()
    again = build_snapshot(spec, store, now=2.0, workdir=tmp_path / "again")
    assert manifest.rows == 30 and again.snapshot == manifest.snapshot
    commit(store, manifest)
    published = publish(store, manifest, card=Card(), now=1.0, workdir=tmp_path)
    opened = table("sums", store="gs://store/sets")
    assert opened.version == published.version and len(opened.lazy().collect()) == 30
    with pytest.raises(TableError, match="use lazy"):
        opened.arrow()
    found = export_declared(store, spec.exports[0], base=tmp_path)
    assert found.record.rows == {"train": 30} and is_exported(store, spec.exports[0], tmp_path)
    names = {name for bucket, name in gcs.objects if bucket == "out"}
    assert {"sft/CURRENT", f"sft/{found.version}/train-00000.jsonl"} <= names
    assert ExportSpec.model_validate(exports[0]) == spec.exports[0]
