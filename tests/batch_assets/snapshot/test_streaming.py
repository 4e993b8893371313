"""Snapshots of what is committed so far of another dataset: the last one is that of the whole table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import orjson
import pytest
from support.snapshots import commit

from batch_assets.catalog import ledger
from batch_assets.orchestration.source_place import at_its_place, part_of_source
from batch_assets.orchestration.trial import wanted_entries
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import PublishedTable
from batch_assets.snapshot.builder import build_snapshot, delete_streamed
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.tags import STREAMING_TAG
from gpu_runner.rows import Row
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

BELOW: dict[str, dict[str, Any]] = {
    "plain": {"prompt": {"user": "{{ output }}"}},
    "sampled": {"prompt": {"user": "{{ output }}"}, "samples": 3},
    "exploded": {"source": {"explode": "output.list"}, "prompt": {"user": "{{ list }}"}},
    "seeded": {"prompt": {"user": "{{ output }}"}, "sampling": {"seed": 7}},
    "chosen": {
        "source": {"where": "number % 3 > 0", "limit": 30},
        "prompt": {"user": "{{ output }}"},
        "keep_columns": ["number"],
    },
}


def spec(name: str, **more: Any) -> GeneratedDatasetSpec:
    return load_spec({"model": "m", "batch_rows": 4, "name": name, **more}, "defs.yaml")


@dataclass
class UpstreamDataset:
    """A dataset `up` of 50 rows in 13 batches; everything below it is made of it in `store_of`."""

    folder: Path
    instance: dg.DagsterInstance
    objects: Objects
    builds: int = 0
    above: GeneratedDatasetSpec = field(
        default_factory=lambda: spec(
            "up",
            source={"grid": {"number": list(range(50))}},
            id="number",
            prompt={"user": "{{ number % 40 }}"},
            keep_columns=["number"],
        )
    )

    def work(self) -> Path:
        self.builds += 1
        return self.folder / f"work-{self.builds}"

    def begin(self) -> SnapshotManifest:
        return build_snapshot(self.above, self.up, now=0.0, workdir=self.work())

    @property
    def up(self) -> DatasetStore:
        return DatasetStore(self.objects, "up")

    def commit(self, keys: Sequence[str] | None, dead: Sequence[str] = (), generation: int = 0) -> None:
        """Commit batches of `up`, as a run does: lists of one to three elements, some of them equal."""
        manifest = self.up.manifest(self.up.current_snapshot() or "")

        def answer(row: Row, _: int) -> str:
            number = int(orjson.loads(row.prompt)[-1]["content"])
            return json.dumps({"list": [f"{number} {one}" for one in range(number % 3 + 1)]})

        for footer in commit(self.up, manifest, keys=keys, dead=dead, answer=answer, generation=generation).values():
            self.instance.report_runless_asset_event(ledger.batch_event(self.up, footer, manifest.snapshot))

    def publish(self) -> PublishedTable:
        manifest = self.up.manifest(self.up.current_snapshot() or "")
        return publish(self.up, manifest, card=Card(), now=1.0, workdir=self.folder)

    def part(self, below: GeneratedDatasetSpec, store: DatasetStore | None = None) -> SnapshotManifest:
        place = self.work()
        place.mkdir()
        found = part_of_source(below, self.above, self.instance, self.objects, place)
        assert found.simulated, "the batches of the tests are"
        data = store or DatasetStore(self.objects, below.name)
        return build_snapshot(found.spec, data, now=float(self.builds), workdir=self.work(), so_far=found.so_far)

    def whole(self, below: GeneratedDatasetSpec, store: DatasetStore | None = None) -> SnapshotManifest:
        placed = at_its_place(below, self.instance, self.objects)
        data = store or DatasetStore(self.objects, below.name)
        return build_snapshot(placed, data, now=float(self.builds), workdir=self.work())


@pytest.fixture
def site(tmp_path: Path, local_objects: Objects) -> Iterator[UpstreamDataset]:
    with dg.DagsterInstance.ephemeral() as instance:
        found = UpstreamDataset(tmp_path, instance, local_objects)
        found.begin()
        yield found


def below(kind: str) -> GeneratedDatasetSpec:
    made: Mapping[str, Any] = BELOW[kind]
    return spec(kind, **{**made, "source": {"dataset": "up", "streaming": True, **made.get("source", {})}})


def asked(store: DatasetStore) -> dict[str, str]:
    """Row id to row key."""
    snapshot = store.current_snapshot() or ""
    found = store.rows(store.manifest(snapshot), store.entries(snapshot))
    return {row.row_id: row.row_key for _, rows in found for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(BELOW))
def test_the_last_snapshot_is_that_of_the_table_whenever_rows_were_read_before(
    site: UpstreamDataset, kind: str
) -> None:
    keys = [entry.key for entry in site.up.entries(site.up.current_snapshot() or "")]
    store, known = DatasetStore(site.objects, kind), dict[str, str]()
    versions: dict[str, str] = {}
    for batch in (keys[:2], keys[5:9], keys[2:4], keys[4:5], keys[9:12]):  # with a gap that is closed later
        site.commit(batch, dead=["5"])
        manifest = site.part(below(kind))
        found = asked(store)
        assert known.items() <= found.items(), "rows that were read stay as they were"
        entries = store.entries(manifest.snapshot)
        full = {one.key: one.data_version for one in wanted_entries(entries, {STREAMING_TAG: "true"})}
        assert versions.items() <= full.items(), "a batch that may be asked stays as it is"
        known, versions = found, full
    site.commit(keys[12:])
    site.publish()
    last = site.whole(below(kind))
    alone = DatasetStore(open_objects(str(site.folder / "alone")), kind)
    assert last.snapshot == site.whole(below(kind), alone).snapshot == store.current_snapshot()
    assert (last.streaming, last.upstream_version) == (None, site.up.current_published())
    assert store.entries(last.snapshot) == alone.entries(last.snapshot)
    assert known.items() <= asked(store).items() and asked(store) == asked(alone)
    delete_streamed(store)
    assert store.snapshots() == [last.snapshot]


@pytest.mark.slow
def test_a_snapshot_of_rows_so_far_says_so_and_never_comes_after_one_of_the_table(site: UpstreamDataset) -> None:
    keys = [entry.key for entry in site.up.entries(site.up.current_snapshot() or "")]
    plain = below("plain")
    with pytest.raises(SourceError, match=r"source\.streaming: expected committed batches of up, found none"):
        site.part(plain)
    site.commit(keys[:3])
    first = site.part(plain)
    assert str(first.streaming) == "12 of 50 rows so far"
    assert first.source == "dataset up, 12 of 50 rows so far"
    assert site.part(plain) == first, "nothing new: the same snapshot"
    site.commit(keys[3:])
    # All rows are there, but not as a table: another snapshot than that of the table.
    assert site.part(plain).snapshot != first.snapshot
    site.publish()
    last = site.whole(plain)
    assert last.streaming is None
    with pytest.raises(SourceError, match="expected no snapshot of the whole table before"):
        site.part(plain)
    assert DatasetStore(site.objects, "plain").current_snapshot() == last.snapshot


def test_an_answer_that_was_made_again_changes_its_row_alone(site: UpstreamDataset) -> None:
    keys = [entry.key for entry in site.up.entries(site.up.current_snapshot() or "")]
    site.commit(keys[:6], dead=["7"])
    site.part(below("plain"))
    store = DatasetStore(site.objects, "plain")
    before = asked(store)
    assert "7" not in before
    site.commit(keys[1:2], generation=1)  # it has an answer now
    site.part(below("plain"))
    now = asked(store)
    assert before.items() <= now.items() and set(now) - set(before) == {"7"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"path": "x.csv", "streaming": True}, "streaming beside a dataset only"),
        ({"dataset": "up", "streaming": True, "group_by": ["number"]}, "no streaming beside group_by"),
    ],
)
def test_what_cannot_stream_is_refused_when_the_file_is_read(source: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        spec("d", source=source, prompt={"user": "x"})
