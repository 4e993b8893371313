"""A committed batch: its name in the store, its bytes, and what it says of itself.

A batch object is one Parquet file of outcomes. Its footer, in the file's metadata, names the batch and counts its rows.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from gpu_runner.rows import Outcome, Task, data_version
from resources.objects.opening import CorruptObject
from resources.store.object_integrity import is_damage
from resources.store.outcome_tables import is_outcomes_table, outcomes_table, with_all_columns, without_empty_columns
from resources.store.snapshot_manifest import BatchEntry

FOOTER_KEY = b"batch_assets"
_OBJECT_NAME = re.compile(r"^(?P<key>\d{5,})/(?P<version>[0-9a-f]{16})-g(?P<generation>\d+)\.parquet$")


@dataclass(frozen=True, slots=True, order=True)
class BatchObject:
    """A committed batch object, as named in the store."""

    key: str
    data_version: str
    generation: int

    @property
    def name(self) -> str:
        """Path below the dataset's `batches/` folder."""
        return f"{self.key}/{self.data_version}-g{self.generation}.parquet"

    @classmethod
    def named(cls, name: str) -> BatchObject | None:
        """The object of this path below `batches/`; None for a file that is none."""
        match = _OBJECT_NAME.match(name)
        return None if match is None else cls(match["key"], match["version"], int(match["generation"]))


class BatchFooter(BaseModel):
    """What a batch object says of itself in its Parquet footer; the ledger event is made from it alone.

    `bytes` and `sha256` are those of the object: not part of what it says, but known to whoever wrote or read it whole.
    """

    model_config = ConfigDict(frozen=True)
    format: int = 1
    dataset: str
    key: str
    snapshot: str
    data_version: str
    generation: int
    epoch: int
    run_id: str
    root_run_id: str
    rows: int
    ok: int
    dead: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    answered_prompt_tokens: int | None = None
    answered_completion_tokens: int | None = None
    seconds: float
    model: str
    engine: str
    usd: float | None = None
    reused: int = 0
    reused_from: dict[str, int] = Field(default_factory=dict)
    bytes: int | None = Field(default=None, exclude=True)
    sha256: str | None = Field(default=None, exclude=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchFooter) and self.model_dump() == other.model_dump()

    @classmethod
    def of(
        cls,
        dataset: str,
        entry: BatchEntry,
        outcomes: Sequence[Outcome],
        *,
        snapshot: str,
        generation: int,
        epoch: int,
        run_id: str,
        root_run_id: str,
        reused: int = 0,
        cached_tokens: int | None = None,
    ) -> BatchFooter:
        """Counts over the outcomes; `seconds` spans from the first row's start to the last row's end.

        `reused`: rows whose outcome is that of an earlier object; `reused_from` counts the outcomes of other datasets.
        `usd` is what the rows cost, of those whose price is known; None when none is. `cached_tokens`: of the prompts'
        tokens, those that engines had in their caches; None: nobody has counted them. With them the tokens of rows that
        were answered are counted apart.
        """
        answered = None if cached_tokens is None else [outcome for outcome in outcomes if outcome.ok]
        dead = sum(not outcome.ok for outcome in outcomes)
        newest = max(outcomes, key=lambda outcome: outcome.started_at)
        ended = max(outcome.started_at + outcome.seconds for outcome in outcomes)
        mine = [outcome.started_at for outcome in outcomes if outcome.origin.run_id == run_id]
        return cls(
            dataset=dataset,
            key=entry.key,
            snapshot=snapshot,
            data_version=entry.data_version,
            generation=generation,
            epoch=epoch,
            run_id=run_id,
            root_run_id=root_run_id,
            rows=len(outcomes),
            ok=len(outcomes) - dead,
            dead=dead,
            prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
            completion_tokens=sum(outcome.completion_tokens for outcome in outcomes),
            cached_tokens=cached_tokens,
            answered_prompt_tokens=None if answered is None else sum(one.prompt_tokens for one in answered),
            answered_completion_tokens=None if answered is None else sum(one.completion_tokens for one in answered),
            seconds=max(0.0, ended - min(mine, default=ended)),
            model=newest.origin.model,
            engine=newest.origin.engine,
            usd=sum(priced) if (priced := [o.usd for o in outcomes if o.usd is not None]) else None,
            reused=reused,
            reused_from=dict(sorted(Counter(o.reused_from for o in outcomes if o.reused_from).items())),
        )


def encode_batch(path: str, footer: BatchFooter, outcomes: Sequence[Outcome], task: Task) -> bytes:
    """The bytes of a batch object. Raises CorruptObject for outcomes of other rows than the footer names."""
    found = data_version((outcome.row_id, outcome.row_key) for outcome in outcomes)
    if found != footer.data_version or len(outcomes) != footer.rows:
        raise CorruptObject(f"{path}: refused to commit outcomes of other rows (data version {found})")
    table = without_empty_columns(outcomes_table(outcomes, task))
    table = table.replace_schema_metadata({FOOTER_KEY: footer.model_dump_json()})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def decode_batch(path: str, batch: BatchObject, data: bytes) -> tuple[pa.Table, BatchFooter]:
    """Rows and footer of a whole object, page checksums verified. Raises CorruptObject."""
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            table, footer = file.read(use_threads=False), _footer(path, batch, file.metadata)
    except (pa.ArrowException, OSError) as error:
        raise _not_whole(path, error) from error
    # Page checksums cover the rows; what says how to read them, the file's own footer, has none.
    if not is_outcomes_table(table) or table.num_rows != footer.rows:
        raise CorruptObject(f"{path}: its columns or its number of rows are not as written")
    return with_all_columns(table), as_stored(footer, data)


def read_footer(path: str, batch: BatchObject, file: BinaryIO) -> BatchFooter:
    """What the object says of itself. Raises CorruptObject when it is torn or says something else than its name.

    Raises as the store where that does not give the bytes.
    """
    try:
        metadata = pq.read_metadata(file)
    except (pa.ArrowException, OSError) as error:
        if not is_damage(error):
            raise
        raise _not_whole(path, error) from error
    return _footer(path, batch, metadata)


def as_stored(footer: BatchFooter, data: bytes) -> BatchFooter:
    """The footer of an object with these bytes."""
    return footer.model_copy(update={"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})


def _not_whole(path: str, error: Exception) -> CorruptObject:
    return CorruptObject(f"{path}: not a whole batch object ({type(error).__name__}: {error})")


def _footer(path: str, batch: BatchObject, metadata: pq.FileMetaData) -> BatchFooter:
    try:
        footer = BatchFooter.model_validate_json((metadata.metadata or {})[FOOTER_KEY])
    except (KeyError, ValueError) as error:
        raise _not_whole(path, error) from error
    if (footer.key, footer.data_version, footer.generation) != (batch.key, batch.data_version, batch.generation):
        raise CorruptObject(f"{path}: its footer names batch {footer.key} {footer.data_version} g{footer.generation}")
    if metadata.num_rows != footer.rows:
        raise CorruptObject(f"{path}: expected {footer.rows} rows, found {metadata.num_rows}")
    return footer
