"""What a snapshot says of itself: the source as read once, its batches and the files that hold their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gpu_runner.rows import Generation
from resources.store.object_integrity import Sealed, StoredFile

# Column of a shard: whether a row, with an id of its own, has the request of another one that came first.
REPEATS = "~repeats"
# Column of a shard and of the table, where the dataset asks for several samples of each prompt.
SAMPLE_INDEX = "sample_index"
# Column of a shard: request fields of a row's own, as a JSON object; null where it has none.
REQUEST_FIELDS = "~fields"
# Column of a shard: all that the user says in a row's conversation, as a JSON list of texts.
USER_TURNS = "~turns"
# Column of a shard: who the model is to be that writes the user's later words.
USER_SYSTEM = "~user_system"


class Shard(BaseModel):
    """One Parquet file of a snapshot: path below the snapshot's folder, and its rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str
    rows: int


class RowsSoFar(BaseModel):
    """How much of another dataset a snapshot was made of: the first `read` rows `of` those that it asks."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    read: int
    of: int

    def __str__(self) -> str:
        return f"{self.read:,} of {self.of:,} rows so far"


class WantedRows(BaseModel):
    """How much of a source a snapshot asks, where rows are asked until enough are accepted: of each stratum, the first
    rows in its order.

    `per`: the column whose values are the strata; without one there is one, "". `limits`: rows of each that are wanted,
    `otherwise` of one that is not among them. `read`: those that the source had: fewer, where it has no more.
    `to_come`: rows that are expected after this snapshot: few, in the middle and many.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    per: str | None = None
    limits: dict[str, int] = Field(default_factory=dict)
    otherwise: int
    read: dict[str, int] = Field(default_factory=dict)
    to_come: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def limit(self, stratum: str) -> int:
        """Rows of a stratum that are wanted."""
        return self.limits.get(stratum, self.otherwise)


def stratum_of(value: Any) -> str:
    """The stratum of a value of `per`: the same for a value of a source and of a table, where objects have all keys
    that there are."""
    return str(_as_in_both(value))


def _as_in_both(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_in_both(value[key]) for key in sorted(value) if value[key] is not None}
    if isinstance(value, list):
        return [_as_in_both(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class SnapshotManifest(Sealed):
    """The source as read once. Written last of a snapshot: its presence means that the snapshot is complete.

    `files`: all its other files with size and checksum; empty in a snapshot made before there were checksums.
    `samples`: rows that each row of the source becomes; where they are several, SAMPLE_INDEX is one of `keep_columns`.
    `upstream_version`: of the published table of another dataset that was read.
    `conversations`: prompts are messages that may hold more than a role and a text. `turns`: rows are conversations of
    several turns, of which prompts end with the first one. `images`: prompts hold those of `prompt.images`,
    or sounds of `prompt.audio`.
    `streaming`: it was made before the dataset that it reads was complete; no table is made of it.
    `wanted`: it asks no more of the source than this.
    `read_digest`: of all that it was made of, where that is told without reading the source: by a commit of the hub, by
    the ETags of objects, by the inodes and times of files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: int = 1
    dataset: str
    snapshot: str
    previous: str | None
    created_at: float
    source: str
    rows: int
    batches: int
    batch_rows: int
    source_rows: int
    rejected: int
    duplicates: int
    added: int
    changed: int
    removed: int
    unchanged: int
    keep_columns: list[str]
    shards: list[Shard]
    duplicate_shards: list[Shard] = Field(default_factory=list)
    files: list[StoredFile] = Field(default_factory=list)
    generation: dict[str, Any]
    samples: int = 1
    upstream_version: str | None = None
    conversations: bool = False
    turns: bool = False
    images: bool = False
    streaming: RowsSoFar | None = None
    wanted: WantedRows | None = None
    read_digest: str | None = None

    @property
    def expected_rows(self) -> int:
        """Lines that a table of the snapshot has: of each row of the source that is not rejected, one per sample."""
        return (self.source_rows - self.rejected) * self.samples

    def settings(self) -> Generation:
        """What all rows of the snapshot share."""
        return Generation(**self.generation)

    @property
    def written_turns(self) -> bool:
        """Whether a model writes what the user says after the first answer."""
        return self.generation.get("user_model") is not None


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One batch of a snapshot: where its rows lie, and the data version that a current object must have."""

    key: str
    rows: int
    data_version: str
    shard: int
    row_group: int
