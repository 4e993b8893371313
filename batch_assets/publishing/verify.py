"""Does everything agree? Snapshot, batch objects, catalog, published table and dead letters, compared row by row.

Nothing is repaired here. Every difference says what was expected, what was found, and what to do about it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batch_assets.catalog.catalog_reader import BatchReport
from batch_assets.catalog.ledger import LedgerVersion
from batch_assets.publishing.dead_letters import (
    check_dead_letters,
    current_dead_letters,
    dead_letter_rows,
    dead_letters_version,
    list_manifest,
)
from batch_assets.publishing.differences import Difference, error_text
from batch_assets.publishing.published_table import (
    Hashes,
    PublishedTable,
    published_table,
    repeated_ids,
    table_batches,
    table_versions,
)
from batch_assets.snapshot.integrity import damaged_files, unlike_checksums
from resources.objects.object_read_ahead import read_ahead, threads_for
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import (
    BatchEntry,
    BatchFooter,
    BatchObject,
    DatasetStore,
    SnapshotManifest,
    check_object,
)
from resources.store.object_integrity import is_damage, sha256_of

PUBLISH = "materialize the dataset asset"
_NAMED = 5


def verify_table(
    store: DatasetStore, manifest: SnapshotManifest, expected: tuple[str, ...], totals: Totals | None
) -> Iterator[Difference]:
    """What differs in the table that readers see.

    `expected` are the versions of the tables that the current objects make, of which readers see one (empty while
    batches are missing: an older table is then as it should be), `totals` their counts (None when some could not be
    read).
    """
    wanted = f"version {' or '.join(expected)}"
    try:
        seen = store.current_published()
    except CorruptObject as error:
        yield Difference("corrupt_pointer", None, wanted if expected else "version of a table", str(error), PUBLISH)
        return
    if seen is None:
        if expected:
            yield Difference("missing_table", None, wanted, "none", PUBLISH)
        return
    if expected and seen not in expected:
        yield Difference("stale_table", None, wanted, f"version {seen}", PUBLISH)
    try:
        table = published_table(store, seen)
    except CorruptObject as error:
        yield Difference("broken_table", None, f"manifest of version {seen}", error_text(error), store.mended_by_run)
        return
    if table is None:
        yield Difference("broken_table", None, f"manifest of version {seen}", "none", PUBLISH)
        return
    broken = list(_file_differences(store, table))
    yield from broken
    if not broken:
        yield from _line_differences(store, table)
    if totals is not None and seen in expected:
        yield from _count_differences(store, table, manifest, totals)


def readers_version(store: DatasetStore) -> str | None:
    """Version that readers see; None where CURRENT is gone or damaged."""
    with contextlib.suppress(CorruptObject):
        return store.current_published()
    return None


def is_simulated(store: DatasetStore, version: str | None) -> bool | None:
    """Whether a published table has rows of an engine simulator; None without a table whose manifest can be read."""
    with contextlib.suppress(CorruptObject):
        table = published_table(store, version) if version else None
        return None if table is None else table.simulated
    return None


def _file_differences(store: DatasetStore, table: PublishedTable) -> Iterator[Difference]:
    for file in table.stored():
        path = f"{table.path}/{file.name}"
        try:
            digest = sha256_of(store.objects, path)
        except FileNotFoundError:
            yield Difference("broken_table", None, path, "none", PUBLISH)
            continue
        if digest != file.sha256:
            yield Difference("broken_table", None, f"{path} sha256 {file.sha256}", digest, store.mended_by_run)


def _line_differences(store: DatasetStore, table: PublishedTable) -> Iterator[Difference]:
    """The lines against the manifest that lies beside them."""
    found = dict.fromkeys(("rows", "dead", "duplicates", "prompt_tokens", "completion_tokens"), 0)
    hashes = Hashes(table.rows)
    columns = ["row_id", "error", "duplicate_of", "prompt_tokens", "completion_tokens"]
    try:
        for batch in table_batches(store, table, columns):
            hashes.add(batch.column("row_id"))
            found["rows"] += batch.num_rows
            found["dead"] += batch.num_rows - batch.column("error").null_count
            found["duplicates"] += batch.num_rows - batch.column("duplicate_of").null_count
            for name in ("prompt_tokens", "completion_tokens"):
                found[name] += pc.sum(batch.column(name)).as_py() or 0
        repeated = repeated_ids(store, table, hashes)
    except (CorruptObject, FileNotFoundError) as error:
        yield Difference("broken_table", None, "readable files", error_text(error), store.mended_by_run)
        return
    for name, value in found.items():
        if value != getattr(table, name):
            wanted = f"{name} {getattr(table, name)} in {table.path}/manifest.json"
            yield Difference("wrong_table_counts", None, wanted, f"{value} in its files", store.mended_by_run)
    if repeated:
        named = ", ".join(sorted(repeated)[:_NAMED])
        yield Difference(
            "duplicate_ids",
            None,
            "one line per row id",
            f"{len(repeated)} ids more than once: {named}",
            store.mended_by_run,
        )


def _count_differences(
    store: DatasetStore, table: PublishedTable, manifest: SnapshotManifest, totals: Totals
) -> Iterator[Difference]:
    """The table's counts against the snapshot's and the objects'."""
    pairs = {
        "rows": (manifest.rows + manifest.duplicates, table.rows),
        "duplicates": (manifest.duplicates, table.duplicates),
        "dead": (totals.dead, table.dead - table.dead_duplicates),
        "ok": (totals.ok, table.ok - (table.duplicates - table.dead_duplicates)),
        "prompt_tokens": (totals.prompt_tokens, table.prompt_tokens),
        "completion_tokens": (totals.completion_tokens, table.completion_tokens),
    }
    for name, (expected, found) in pairs.items():
        if expected != found:
            yield Difference("wrong_table_counts", None, f"{name} {expected}", str(found), store.mended_by_run)


@dataclass(frozen=True, slots=True)
class Totals:
    """Stable keys of `--json`. `rows` and `batches` are the snapshot's, the other counts those of sound objects.

    `table` is the folder of the published table, or None; `simulated`: it has rows of an engine simulator.
    `rejected` of `source_rows` are left out by the snapshot.
    """

    dataset: str
    rows: int = 0
    ok: int = 0
    dead: int = 0
    batches: int = 0
    batches_done: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    table: str | None = None
    source_rows: int = 0
    rejected: int = 0
    simulated: bool | None = None


REBUILD = "run rebuild-ledger: it reports the batch from the store"
DEAD_LETTERS = "materialize the dead_letters asset"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What the catalog says of a batch; a field that is None is not compared. `path` may be a full URI."""

    data_version: str
    path: str | None = None
    rows: int | None = None
    ok: int | None = None
    dead: int | None = None
    generation: int | None = None
    bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared and what differs. `notes`: what could not be compared, and why."""

    snapshot: str | None
    totals: Totals
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing differs."""
        return not self.differences


@dataclass(frozen=True, slots=True)
class _Checked:
    """One batch: its footer when its object is sound, and what differs."""

    footer: BatchFooter | None
    differences: list[Difference]


@dataclass(slots=True)
class _SoundBatches:
    """Counts over the batches whose objects are sound; of each only a key is kept, and only where it has dead rows."""

    batches: int = 0
    ok: int = 0
    dead: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    with_dead: list[str] = field(default_factory=list)

    def add(self, footer: BatchFooter) -> None:
        self.batches += 1
        self.ok += footer.ok
        self.dead += footer.dead
        self.prompt_tokens += footer.prompt_tokens
        self.completion_tokens += footer.completion_tokens
        if footer.dead:
            self.with_dead.append(footer.key)


def ledger_of_reports(reports: Mapping[str, BatchReport]) -> dict[str, LedgerEntry]:
    """What is compared of the catalog's entries."""
    return {
        key: LedgerEntry(
            report.version.data_version,
            report.path,
            report.rows,
            report.ok,
            report.dead,
            report.version.generation,
            report.bytes,
            report.sha256,
        )
        for key, report in reports.items()
    }


def verify(
    store: DatasetStore,
    ledger: Mapping[str, LedgerEntry],
    *,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Compare everything of the current snapshot; every current object and the published table are read whole.

    `progress` is told what is compared next, in this thread: it ends the comparison by raising.
    """
    progress("snapshot")
    try:
        snapshot = store.current_snapshot()
    except CorruptObject as error:
        broken = Difference("corrupt_pointer", None, "a snapshot", str(error), store.mended_by_run)
        return Verification(None, Totals(store.dataset), (broken,))
    if snapshot is None:
        missing = Difference("no_snapshot", None, "a snapshot", "none", f"`batch-assets run {store.dataset}` makes one")
        return Verification(None, Totals(store.dataset), (missing,))
    try:
        manifest, entries = store.manifest(snapshot), store.entries(snapshot)
    except CorruptObject as error:
        broken = Difference(
            "corrupt_snapshot", None, f"manifest and batches of {snapshot}", str(error), store.mended_by_run
        )
        return Verification(snapshot, Totals(store.dataset), (broken,))
    current = store.current_objects(entries)
    threads = threads or threads_for(store.objects)

    differences = list(_snapshot_differences(store, manifest, entries))
    sound = _SoundBatches()
    jobs = read_ahead(
        lambda entry: _check_batch(store, entry, current.get(entry.key), ledger.get(entry.key)), entries, threads
    )
    for number, checked in enumerate(jobs, 1):
        progress(f"batch {number:,} of {len(entries):,}")
        differences += checked.differences
        if checked.footer is not None:
            sound.add(checked.footer)
    totals = _totals(manifest, len(entries), sound)
    progress("table")
    expected = table_versions(snapshot, current) if len(current) == len(entries) else ()
    differences += verify_table(store, manifest, expected, totals if sound.batches == len(entries) else None)
    differences += _dead_letter_differences(store, snapshot, current, sound, bool(expected))
    seen = readers_version(store)
    folder = store.objects.uri(f"{store.dataset}/published/{seen}") if seen else None
    return Verification(
        snapshot,
        replace(totals, table=folder, simulated=is_simulated(store, seen)),
        tuple(differences),
        tuple(_notes(store, manifest, ledger)),
    )


def _totals(manifest: SnapshotManifest, batches: int, sound: _SoundBatches) -> Totals:
    return Totals(
        dataset=manifest.dataset,
        rows=manifest.rows,
        ok=sound.ok,
        dead=sound.dead,
        batches=batches,
        batches_done=sound.batches,
        prompt_tokens=sound.prompt_tokens,
        completion_tokens=sound.completion_tokens,
        source_rows=manifest.source_rows,
        rejected=manifest.rejected,
    )


def _notes(store: DatasetStore, manifest: SnapshotManifest, ledger: Mapping[str, LedgerEntry]) -> Iterator[str]:
    if not manifest.files:
        yield f"snapshot {manifest.snapshot} was made before there were checksums: its files were compared by counts"
    if without := sum(entry.sha256 is None for entry in ledger.values() if entry.path is not None):
        yield f"{without} batches were reported before there were checksums: page checksums and counts were compared"
    with contextlib.suppress(CorruptObject):
        listed = current_dead_letters(store)
        if listed is not None and list_manifest(store, listed) is None:
            yield f"the list of dead letters {listed} has no checksum beside it: page checksums were compared"


def _check_batch(
    store: DatasetStore, entry: BatchEntry, batch: BatchObject | None, said: LedgerEntry | None
) -> _Checked:
    key = entry.key
    if batch is None:
        wanted = f"an object at data version {entry.data_version}"
        if said is not None and said.data_version == entry.data_version:
            return _Checked(
                None, [Difference("void_catalog_entry", key, wanted, "a catalog entry only", store.mended_by_run)]
            )
        return _Checked(None, [Difference("missing_batch", key, wanted, "none", store.mended_by_run)])
    try:
        footer = check_object(store, entry, batch)
    except (CorruptObject, FileNotFoundError) as error:
        return _Checked(
            None, [Difference("corrupt_object", key, "a whole object", error_text(error), store.mended_by_run)]
        )
    if said is not None and said.generation == batch.generation and said.sha256 not in (None, footer.sha256):
        wanted = f"{store.batch_path(batch)} sha256 {said.sha256}"
        return _Checked(
            None, [Difference("corrupt_object", key, wanted, f"sha256 {footer.sha256}", store.mended_by_run)]
        )
    return _Checked(footer, list(_catalog_differences(store, batch, footer, said)))


def _catalog_differences(
    store: DatasetStore, batch: BatchObject, footer: BatchFooter, said: LedgerEntry | None
) -> Iterator[Difference]:
    key, path = batch.key, store.batch_path(batch)
    if said is None:
        yield Difference("missing_catalog_entry", key, path, "none", REBUILD)
        return
    if LedgerVersion.parse(said.data_version).anew:
        yield Difference("missing_batch", key, f"rows asked anew, beside {path}", "none yet", store.mended_by_run)
        return
    if said.data_version != batch.data_version:
        yield Difference("wrong_data_version", key, batch.data_version, said.data_version, REBUILD)
        return
    other_path = said.path is not None and said.path not in (path, store.objects.uri(path))
    if other_path or said.generation not in (None, batch.generation):
        found = said.path if other_path else f"generation {said.generation}"
        yield Difference("stale_catalog_entry", key, path, str(found), REBUILD)
        return
    for name in ("rows", "ok", "dead"):
        value = getattr(said, name)
        if value is not None and value != getattr(footer, name):
            yield Difference("wrong_catalog_counts", key, f"{name} {getattr(footer, name)}", f"{value}", REBUILD)


def _snapshot_differences(
    store: DatasetStore, manifest: SnapshotManifest, entries: Sequence[BatchEntry]
) -> Iterator[Difference]:
    """The snapshot against itself: its files are there and hold what the manifest says."""
    counts = {
        "batches": (manifest.batches, len(entries)),
        "rows": (manifest.rows, sum(entry.rows for entry in entries)),
        "rows + duplicates": (manifest.expected_rows, manifest.rows + manifest.duplicates),
        "rows in shards": (manifest.rows, sum(shard.rows for shard in manifest.shards)),
        "duplicates in shards": (manifest.duplicates, sum(shard.rows for shard in manifest.duplicate_shards)),
    }
    for name, (expected, found) in counts.items():
        if expected != found:
            yield Difference("corrupt_snapshot", None, f"{name}: {expected}", str(found), store.mended_by_run)
    unlike = unlike_checksums(store, manifest)
    for path, (expected_digest, digest) in unlike.items():
        yield Difference(
            "corrupt_snapshot", None, f"{path} sha256 {expected_digest}", f"sha256 {digest}", store.mended_by_run
        )
    for path in (found for found in damaged_files(store, manifest) if found not in unlike):
        yield Difference("corrupt_snapshot", None, path, "none", store.mended_by_run)
    of_shard: dict[int, list[BatchEntry]] = defaultdict(list)
    for entry in entries:
        of_shard[entry.shard].append(entry)
    for number, shard in enumerate((*manifest.shards, *manifest.duplicate_shards)):
        path = store.snapshot_path(manifest.snapshot, shard.path)
        if path in unlike:
            continue
        try:
            with store.objects.open(path) as file:
                metadata = pq.read_metadata(file)
        except (pa.ArrowException, OSError) as error:
            if not isinstance(error, FileNotFoundError) and not is_damage(error):
                raise
            yield Difference(
                "corrupt_snapshot", None, f"{path} with {shard.rows} rows", error_text(error), store.mended_by_run
            )
            continue
        wrong = [
            entry.key
            for entry in (of_shard[number] if number < len(manifest.shards) else ())
            if entry.row_group >= metadata.num_row_groups or metadata.row_group(entry.row_group).num_rows != entry.rows
        ]
        if wrong or metadata.num_rows != shard.rows:
            found_rows = f"{metadata.num_rows} rows" + (f", other rows in batch {wrong[0]}" if wrong else "")
            yield Difference(
                "corrupt_snapshot", None, f"{path} with {shard.rows} rows", found_rows, store.mended_by_run
            )


def _dead_letter_differences(
    store: DatasetStore,
    snapshot: str,
    current: Mapping[str, BatchObject],
    sound: _SoundBatches,
    complete: bool,
) -> Iterator[Difference]:
    """The list of dead letters, once the snapshot is complete; none at all is fine when there is nothing to list."""
    dead = sound.dead
    try:
        listed = current_dead_letters(store)
    except CorruptObject as error:
        yield Difference("corrupt_pointer", None, "a list of dead letters", str(error), DEAD_LETTERS)
        return
    if not complete or sound.batches < len(current) or (listed is None and not dead):
        return
    expected = dead_letters_version(snapshot, (current[key] for key in sound.with_dead))
    if listed != expected:
        found = "none" if listed is None else f"version {listed}"
        yield Difference("stale_dead_letters", None, f"version {expected}, {dead} rows", found, DEAD_LETTERS)
        return
    try:
        check_dead_letters(store, listed)
        rows = dead_letter_rows(store, listed)
    except (CorruptObject, FileNotFoundError) as error:
        yield Difference("stale_dead_letters", None, f"{dead} rows", error_text(error), DEAD_LETTERS)
        return
    if rows != dead:
        yield Difference("stale_dead_letters", None, f"{dead} rows", f"{rows} rows", DEAD_LETTERS)
