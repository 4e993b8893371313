"""Rows made of lists, groups and samples, held against a plain model of them while what is above them is edited."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_assets.snapshot.builder import build_snapshot, changed_rows
from batch_assets.snapshot.grouping import rows_of
from batch_assets.snapshot.source.errors import SourceError, Unseen
from batch_assets.spec.models import load_spec
from gpu_runner.rows import Row
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

ELEMENTS: list[Any] = ["a", "b", "c", {"z": 0, "q": "a"}, {"z": 1, "q": "b"}]
Source = list[dict[str, Any]]


class Edits:
    """A source of rows with an id, a number and a list (or a text), and what becomes of it."""

    def __init__(self, chance: random.Random, lists: bool) -> None:
        self.chance, self.lists, self.made = chance, lists, 0
        self.rows: Source = [self._row() for _ in range(chance.randrange(1, 6))]

    def _row(self) -> dict[str, Any]:
        self.made += 1
        q = [self.chance.choice(ELEMENTS) for _ in range(self.chance.randrange(5))]
        return {"id": f"p{self.made}", "k": self.chance.choice([1, 2, 3]), "q": q if self.lists else self._text()}

    def _text(self) -> str:
        return self.chance.choice("abc")

    def edit(self) -> None:
        """Add, drop, move or change a row, or an element of its list."""
        row = self.chance.choice(self.rows)
        match self.chance.choice(["add", "drop", "move", "number", "insert", "insert", "remove", "shuffle"]):
            case "add":
                self.rows.insert(self.chance.randrange(len(self.rows) + 1), self._row())
            case "drop" if len(self.rows) > 1:
                self.rows.remove(row)
            case "move":
                self.chance.shuffle(self.rows)
            case "number":
                row["k"] = self.chance.choice([1, 2, 3])
            case _ if not self.lists:
                row["q"] = self._text()
            case "insert":
                row["q"].insert(self.chance.randrange(len(row["q"]) + 1), self.chance.choice(ELEMENTS))
            case "remove" if row["q"]:
                row["q"].pop(self.chance.randrange(len(row["q"])))
            case "shuffle":
                self.chance.shuffle(row["q"])

    def write(self, folder: Path) -> None:
        (folder / "q.jsonl").write_text("\n".join(map(json.dumps, self.rows)))


def keys(chance: random.Random) -> dict[str, Any]:
    """A random dataset over such a source."""
    some = chance.random
    source: dict[str, Any] = {"path": "q.jsonl"}
    source |= {"explode": "q"} if some() < 0.6 else {}
    source |= {"where": "k <> 1"} if some() < 0.4 else {}
    source |= {"limit": chance.choice([1, 2, 4, 8])} if some() < 0.3 else {}
    if some() < 0.4:
        source["group_by"] = chance.choice([["id"], ["k"], ["id", "k"], *([["q"]] if "explode" in source else [])])
        source |= {"min_group": 2} if some() < 0.3 else {}
    found: dict[str, Any] = {"name": "d", "model": "m", "source": source, "batch_rows": chance.choice([1, 2, 3, 5])}
    found |= {"prompt": {"user": "{{ q | tojson }}|{{ k | tojson }}"}}
    found |= {"id": "id"} if some() < 0.7 and "group_by" not in source else {}
    found |= {"samples": chance.choice([2, 3])} if some() < 0.5 else {}
    found |= {"sampling": {"seed": 5}} if some() < 0.4 else {}
    return found | ({"dedupe": some() < 0.7} if some() < 0.4 else {})


def expected(rows: Source, dataset: dict[str, Any]) -> list[tuple[str, str]]:
    """(id, prompt) of each row that is to be asked, once a sample: what the documentation says, line by line."""
    source, found = dataset["source"], list[tuple[str, dict[str, Any]]]()
    for row in rows:
        seen: Counter[str] = Counter()
        for element in row["q"] if "explode" in source else ():
            digest = hashlib.blake2b(orjson.dumps(element, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()
            seen[digest] += 1
            number = f".{seen[digest]}" if seen[digest] > 1 else ""
            fields = element if isinstance(element, dict) else {"q": element}
            found.append((f"{row['id']}/{digest}{number}", row | fields))
        found += [] if "explode" in source else [(row["id"], row)]
    if "where" in source:
        found = [(row_id, row) for row_id, row in found if row["k"] != 1]
    if by := source.get("group_by"):
        groups: dict[tuple[Any, ...], Source] = {}
        for _, row in found:
            groups.setdefault(tuple(row[name] for name in by), []).append(row)
        found = [
            (
                str(key[0]) if len(key) == 1 else orjson.dumps(list(key)).decode(),
                {name: group[0][name] if name in by else [row[name] for row in group] for name in ("q", "k")},
            )
            for key, group in groups.items()
            if len(group) >= source.get("min_group", 1)
        ]
    found = found[: source.get("limit", len(found))]
    return [(row_id, f"{json.dumps(row['q'])}|{json.dumps(row['k'])}") for row_id, row in found]


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_each_row_is_asked_once_whatever_is_combined_and_edited(seed: int) -> None:
    chance = random.Random(seed)
    dataset = keys(chance)
    above = Edits(chance, "explode" in dataset["source"])
    with TemporaryDirectory() as name:
        folder, before = Path(name), Counter[tuple[str, str]]()
        store = DatasetStore(open_objects(f"{name}/store"), "d")
        for turn in range(3):
            above.write(folder)
            spec, wanted = load_spec(dataset, "f"), expected(above.rows, dataset)
            (folder / f"c{turn}").mkdir()
            try:
                told = changed_rows(spec, store, workdir=folder / f"c{turn}", base=folder)
                manifest = build_snapshot(spec, store, now=turn, workdir=folder / f"w{turn}", base=folder)
            except SourceError:
                assert not wanted
            else:
                asked = [row for _, part in store.rows(manifest, store.entries(manifest.snapshot)) for row in part]
                _check_rows(asked, _copies(store, manifest), wanted, dataset)
                now = Counter((row.row_id, row.row_key) for row in asked)
                assert told is None or told.unchanged == (now & before).total()
                before = now
            for _ in range(chance.randrange(1, 4)):
                above.edit()
            if chance.random() < 0.2:
                dataset["samples"] = chance.choice([1, 2, 4])


def _copies(store: DatasetStore, manifest: SnapshotManifest) -> Source:
    found: Source = []
    for shard in manifest.duplicate_shards:
        with store.objects.open(store.snapshot_path(manifest.snapshot, shard.path)) as file:
            found += pq.read_table(file).to_pylist()
    return found


def _check_rows(asked: Sequence[Row], copies: Source, wanted: list[tuple[str, str]], dataset: dict[str, Any]) -> None:
    """Each row is there once a sample: asked, or the duplicate of one that is. With a seed no request is sent twice."""
    samples, deduped = range(dataset.get("samples", 1)), dataset.get("dedupe", False)
    requests = Counter((str(orjson.loads(row.prompt)[-1]["content"]), row.sample) for row in asked)
    ids = [*(row.row_id for row in asked), *(copy["row_id"] for copy in copies)]
    assert len(set(ids)) == len(ids) == len(wanted) * len(samples)
    assert {copy["of_row_id"] for copy in copies} <= {row.row_id for row in asked}
    each = Counter((prompt, sample) for _, prompt in wanted for sample in samples)
    assert requests == (Counter(set(each)) if deduped else each)
    if "id" in dataset or "group_by" in dataset["source"]:
        assert set(ids) == {row_id + (f"~{one}" if one else "") for row_id, _ in wanted for one in samples}
    if "sampling" in dataset:
        sent = Counter((row.prompt, row.seeded(5).seed) for row in asked)
        assert max(sent.values()) == 1


def test_ids_stay_under_1000_edits_above(tmp_path: Path) -> None:
    above = Edits(random.Random(7), lists=True)
    exploded = {"name": "d", "model": "m", "prompt": {"user": "{{ q }}"}, "id": "id"}
    exploded |= {"source": {"path": "q.jsonl", "explode": "q"}}
    spec, of_content, edits = load_spec(exploded, "f"), dict[tuple[str, str, int], set[str]](), 0
    while edits < 1000:
        for _ in range(4):
            above.edit()
            edits += 1
        above.write(tmp_path)
        found: dict[tuple[str, str], set[str]] = {}
        whole = {row["id"]: row["q"] for row in above.rows}
        for block in rows_of(spec, ["q", "z", "id"], tmp_path, Unseen({"z"})):
            assert block.ids is not None
            for row_id, parent, q, z in zip(block.ids, *(block.columns[one] for one in ("id", "q", "z")), strict=True):
                found.setdefault((parent, json.dumps([q, z])), set()).add(row_id)
        assert sum(map(len, found.values())) == sum(map(len, whole.values()))
        for (parent, content), ids in found.items():
            assert of_content.setdefault((parent, content, len(ids)), ids) == ids
            fewer = of_content.get((parent, content, len(ids) - 1), set())
            assert fewer <= ids
    assert len(of_content) > 100
