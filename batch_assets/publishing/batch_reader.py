"""Reading a snapshot's committed batches: neighbours at once, with what the snapshot keeps of their rows.

An object of 250 rows costs a round trip each on S3 and a millisecond of parsing anywhere, so they are read ahead
(`resources.objects.object_read_ahead`). Memory does not grow with the number of rows, nor with the length of their
prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from batch_assets.publishing.prompt_column import PROMPT, decoded_prompts, last_requests
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import BatchEntry, BatchObject, DatasetStore, SnapshotManifest
from resources.store.outcome_columns import OUTCOME_COLUMNS, TURNS, WRITTEN_TURNS
from resources.store.snapshot_manifest import USER_TURNS

RESERVED_COLUMNS = frozenset((*OUTCOME_COLUMNS, PROMPT, "batch", "duplicate_of"))
_PIECE_ROWS = 1000
_PIECE_BYTES = 16 << 20


def pieces(
    entries: Iterable[BatchEntry], size: Callable[[BatchEntry], int] = lambda entry: 0
) -> Iterator[list[BatchEntry]]:
    """Runs of neighbouring batches of one shard, about 1,000 rows or 16 MiB each: the unit that is read at once.

    `size`: bytes of what is read of a batch's rows in the snapshot. A larger batch is a piece of its own.
    """
    piece: list[BatchEntry] = []
    rows = held = 0
    for entry in entries:
        full = rows + entry.rows > _PIECE_ROWS or held + size(entry) > _PIECE_BYTES
        if piece and (full or entry.shard != piece[0].shard):
            yield piece
            piece, rows, held = [], 0, 0
        piece.append(entry)
        rows += entry.rows
        held += size(entry)
    if piece:
        yield piece


def table_name(column: str) -> str:
    """Name of a keep column in a table: its own, or `source_…` where outcomes have a column of that name."""
    return f"source_{column}" if column in RESERVED_COLUMNS else column


class CommittedRows:
    """Reads the rows of committed batches, with what the snapshot keeps of them. Safe to use from several threads.

    `prompt`: with the column `prompt` too.
    """

    def __init__(
        self,
        store: DatasetStore,
        manifest: SnapshotManifest,
        current: Mapping[str, BatchObject],
        *,
        prompt: bool = False,
    ) -> None:
        self._store, self._manifest, self._current = store, manifest, current
        self._columns = [*manifest.keep_columns, *([PROMPT] if prompt else [])]
        self._columns += [USER_TURNS] if prompt and manifest.turns else []
        self._task = manifest.settings().task
        self._footer: tuple[int, pq.FileMetaData | None] = (-1, None)

    def bytes_of(self, entry: BatchEntry) -> int:
        """Bytes that the prompts and kept columns of a batch take in memory, as its shard's footer says."""
        if not self._columns:
            return 0
        metadata = self._shard_footer(entry.shard)
        group = metadata.row_group(entry.row_group)
        columns = [group.column(number) for number in range(group.num_columns)]
        return sum(c.total_uncompressed_size for c in columns if c.path_in_schema.partition(".")[0] in self._columns)

    def read(self, piece: Sequence[BatchEntry]) -> pa.Table:
        """Outcomes of a piece, each with its `batch`, and the snapshot's keep columns and prompts.

        Raises CorruptObject when an object cannot be read or holds other rows than the snapshot.
        """
        table = pa.concat_tables([self._outcomes(entry) for entry in piece])
        if not self._columns:
            return table
        kept = self._kept(piece)
        if not kept.column("row_id").cast(pa.string()).equals(table.column("row_id")):
            raise CorruptObject(
                f"{self._store.dataset} batches {piece[0].key} to {piece[-1].key}: their objects hold other rows than "
                f"snapshot {self._manifest.snapshot}; run verify to find the object"
            )
        for name in self._manifest.keep_columns:
            table = table.append_column(table_name(name), kept.column(name))
        if PROMPT in self._columns:
            table = table.append_column(PROMPT, self._prompts(kept, table))
        return table

    def _prompts(self, kept: pa.Table, outcomes: pa.Table) -> pa.ChunkedArray:
        prompts, conversations = kept.column(PROMPT), self._manifest.conversations
        images = self._manifest.images
        if not self._manifest.turns:
            return decoded_prompts(prompts, self._task, conversations=conversations, images=images)
        said = kept.column(USER_TURNS)
        return last_requests(prompts, said, outcomes.column(TURNS), conversations=conversations, images=images)

    def _shard_path(self, number: int) -> str:
        return self._store.snapshot_path(self._manifest.snapshot, self._manifest.shards[number].path)

    def _shard_footer(self, number: int) -> pq.FileMetaData:
        known, metadata = self._footer
        if known != number or metadata is None:
            with self._store.objects.open(self._shard_path(number)) as file:
                metadata = pq.read_metadata(file)
            self._footer = number, metadata
        return metadata

    def _kept(self, piece: Sequence[BatchEntry]) -> pa.Table:
        """`row_id` and what is wanted of a piece; a shard's footer (400 row groups) is parsed once, not per piece."""
        number = piece[0].shard
        known, metadata = self._footer
        with (
            self._store.objects.open(self._shard_path(number)) as file,
            pq.ParquetFile(
                file, metadata=metadata if known == number else None, page_checksum_verification=True
            ) as shard,
        ):
            self._footer = number, shard.metadata
            columns = ["row_id", *self._columns]
            return shard.read_row_groups([entry.row_group for entry in piece], columns=columns, use_threads=False)

    def _outcomes(self, entry: BatchEntry) -> pa.Table:
        batch = self._current[entry.key]
        table = self._store.batch_table(batch)
        if table.num_rows != entry.rows:
            raise CorruptObject(f"{self._store.batch_path(batch)}: expected {entry.rows} rows, found {table.num_rows}")
        of_turns = {TURNS: self._manifest.turns, WRITTEN_TURNS: self._manifest.written_turns}
        # The source may have columns of these names.
        table = table.drop_columns([name for name, has in of_turns.items() if not has and name in table.schema.names])
        keys = pa.array([entry.key] * entry.rows, pa.string())
        return table.replace_schema_metadata(None).append_column("batch", keys)
