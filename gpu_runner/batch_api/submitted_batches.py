"""What is kept of a batch that was sent to a provider: the run that comes after a killed one takes its answers.

It is written down before its input file is uploaded, and again before the batch is created. Without the provider's id
of it the batch is looked for by `key`, which stands in its metadata; its input file by name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field


class SubmittedBatch(BaseModel):
    """`place`: a digest of the provider's address and of the model. `digests`: of the requests, in their order.

    There are none, and no `input_file_id`, until the input file is uploaded: no batch can be there. `batch_id`: the
    provider's; "" until it is known. `created_at`: Unix seconds. `labels`: what else its metadata says.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    key: str = Field(pattern=r"^[0-9a-f]{32}$")
    place: str
    created_at: float
    digests: tuple[str, ...] = ()
    input_file_id: str = ""
    batch_id: str = ""
    labels: dict[str, str] = Field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Of its input file."""
        return f"batch-assets-{self.key}.jsonl"


class BatchRecords(Protocol):
    """Where they are kept. All calls block, and raise what their store raises."""

    def keep(self, batch: SubmittedBatch) -> None:
        """Write, or replace."""

    def all(self, besides: Collection[str] = ()) -> Sequence[SubmittedBatch]:
        """Those that are there, but for these keys; one that cannot be read is left out."""

    def drop(self, keys: Sequence[str]) -> None:
        """Delete."""
