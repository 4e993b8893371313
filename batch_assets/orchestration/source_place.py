"""Where the rows of a dataset lie now: files, the table of another asset, or the published table of another dataset."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from batch_assets.catalog import ledger
from batch_assets.catalog.asset_places import escaped, of_asset
from batch_assets.filtering.passed_table import PassedStore
from batch_assets.filtering.passed_table import read_report as read_passed
from batch_assets.judging.judged_table import judged_store
from batch_assets.judging.judged_table import read_report as read_judged
from batch_assets.publishing.committed_part import write_committed
from batch_assets.publishing.derived_table import DerivedStore
from batch_assets.publishing.published_table import broken_files, published_table
from batch_assets.snapshot.cache import SnapshotCache
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.files import find_files
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.source import JUDGED, PASSED, SourceSpec
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import BatchEntry, BatchObject, DatasetStore
from resources.store.snapshot_manifest import RowsSoFar

TABLE_ROWS = 8192  # of a table that are read at once
COPIED_ROWS = 1_000_000  # of a table, for a plan


def at_its_place(spec: GeneratedDatasetSpec, instance: dg.DagsterInstance, objects: Objects) -> GeneratedDatasetSpec:
    """The spec with the files that it reads as `source.path`; of a dataset, those of its newest published version.

    `objects`: the store of the datasets. Raises SourceError where nothing was published, or the table is damaged.
    """
    if spec.source.dataset is None:
        return of_asset(spec, instance)
    name = spec.source.dataset
    store = store_of(spec.source, objects)
    parts = {PASSED: f"rows of {name} that pass its filter", JUDGED: f"rows that {name} judged"}
    what = parts.get(spec.source.part or "", f"published table of {name}")
    try:
        table = published_table(store)
        if table is not None and (gone := broken_files(store, table)):
            raise SourceError(
                f"source.dataset: expected the whole table of {name}, found {gone[0]} gone or of another size; "
                f"`batch-assets verify {name}` says what helps"
            )
    except CorruptObject as error:
        raise SourceError(f"source.dataset: the table of {name} cannot be read: {error}") from error
    if table is None:
        raise SourceError(
            f"source.dataset: expected {'' if spec.source.part else 'a '}{what}, found none; "
            f"`batch-assets run {name}` makes {'them' if spec.source.part else 'it'}"
        )
    path = f"{escaped(table.uri(objects))}/part-*.parquet"
    return spec.model_copy(update={"source": spec.source.model_copy(update={"path": path})})


def store_of(source: SourceSpec, objects: Objects) -> DatasetStore:
    """Where the table lies that a source of another dataset reads."""
    store = DatasetStore(objects, source.dataset or "")
    return store if source.part is None else DerivedStore(store, source.part)


def older_part(source: SourceSpec, objects: Objects) -> str:
    """That the rows which a dataset reads of another one, those that pass or that it judged, are of an older table than
    its newest, and what to do; "" where they were not. Raises CorruptObject."""
    if source.dataset is None or source.part is None:
        return ""
    store = DatasetStore(objects, source.dataset)
    newest, part, judged = published_table(store), read_passed(PassedStore(store)), read_judged(store)
    made_of = judged.table if judged is not None else None
    if source.passed:
        made_of = part.table if part is not None else None
        rows = published_table(judged_store(store))
        if judged is not None and rows is not None and rows.version == made_of:
            made_of = judged.table
    if newest is None or made_of is None or made_of == newest.version:
        return ""
    what = "rows that pass" if source.passed else "judged rows"
    return (
        f"the {what} of {store.dataset} are of an older table ({made_of}) than its newest ({newest.version}): "
        f"`batch-assets run {store.dataset}` brings them up to date"
    )


@dataclass(frozen=True, slots=True)
class CommittedPart:
    """The first batches of a dataset, up to the first one that is not committed, and the snapshot that they are of."""

    snapshot: str
    entries: list[BatchEntry]
    current: dict[str, BatchObject]
    so_far: RowsSoFar

    @classmethod
    def of(cls, instance: dg.DagsterInstance, store: DatasetStore, cache: SnapshotCache) -> CommittedPart | None:
        """As it is now; None while there is no such batch. In the order of the snapshot, so that the ids and places of
        what is made of it do not depend on when it is read."""
        snapshot, entries = cache.entries(store)
        versions = ledger.ledger_versions(instance, store.dataset)
        first = list(itertools.takewhile(lambda one: ledger.is_current(versions.get(one.key), one), entries))
        if snapshot is None or not first:
            return None
        current = {
            one.key: BatchObject(one.key, one.data_version, versions[one.key].used_for(one.data_version))
            for one in first
        }
        so_far = RowsSoFar(read=sum(one.rows for one in first), of=sum(one.rows for one in entries))
        return cls(snapshot, first, current, so_far)


@dataclass(frozen=True, slots=True)
class PartOfSource:
    """What a dataset reads of another one that is not complete. `simulated`: a simulator wrote some of it."""

    spec: GeneratedDatasetSpec
    so_far: RowsSoFar
    simulated: bool


def part_of_source(
    spec: GeneratedDatasetSpec,
    upstream: GeneratedDatasetSpec,
    instance: dg.DagsterInstance,
    objects: Objects,
    folder: Path,
) -> PartOfSource:
    """The spec with the rows that are committed so far of the dataset that it reads, `upstream`, as `source.path`: a
    file in `folder`. Raises SourceError."""
    store = DatasetStore(objects, upstream.name)
    try:
        part = CommittedPart.of(instance, store, SnapshotCache())
        if part is None:
            raise SourceError(f"source.streaming: expected committed batches of {upstream.name}, found none")
        simulated = write_committed(
            store,
            store.manifest(part.snapshot),
            part.entries,
            part.current,
            folder / "part-00000.parquet",
            prompt=upstream.include_prompt,
            output_columns=upstream.output.columns,
        )
    except (CorruptObject, FileNotFoundError) as error:
        raise SourceError(f"source.streaming: batches of {upstream.name} cannot be read: {error}") from error
    source = spec.source.model_copy(update={"path": f"{escaped(str(folder))}/part-*.parquet"})
    return PartOfSource(spec.model_copy(update={"source": source}), part.so_far, simulated)


def without_rows(
    spec: GeneratedDatasetSpec, ids: Sequence[str], folder: Path, base: Path
) -> GeneratedDatasetSpec | None:
    """The spec of a dataset that reads the table of another one, with its path, as if rows with these ids were not in
    that table. `folder`: for a copy of the table without them; None where that has more than COPIED_ROWS rows. Raises
    SourceError.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    writer, target, rows, gone = None, folder / "part-00000.parquet", 0, pa.array(ids, pa.string())
    for file in find_files(spec.source.path or "", base):
        with file.open() as raw, pq.ParquetFile(raw) as table:
            rows += table.metadata.num_rows
            if rows > COPIED_ROWS:
                break
            writer = writer or pq.ParquetWriter(target, table.schema_arrow)
            for batch in table.iter_batches(TABLE_ROWS):
                row_ids = batch.column("row_id").cast(pa.string())
                writer.write_batch(batch.filter(pc.invert(pc.is_in(row_ids, value_set=gone))))
    if writer is not None:
        writer.close()
    if rows > COPIED_ROWS:
        return None
    source = spec.source.model_copy(update={"path": f"{escaped(str(folder))}/part-*.parquet"})
    return spec.model_copy(update={"source": source})


def refuse_simulated(name: str, simulated: bool, simulation: Callable[[], bool]) -> None:
    """Raise SourceError where a model would be asked about texts that a simulator wrote: what was read of dataset
    `name` is `simulated`, and the rows to come, by `simulation`, are not."""
    if simulated and not simulation():
        raise SourceError(
            f"source.dataset: expected a table of {name} that a model wrote, found one of an engine simulator; "
            f"`batch-assets run {name}` with a real engine makes it anew"
        )
