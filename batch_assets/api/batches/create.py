"""What a client may ask for when it creates a batch: the documented fields and their limits."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from batch_assets.api.billing.spending import BUDGET, BudgetInvalid, parse_budget
from batch_assets.api.database.file_records import LONGEST_LIFE, SHORTEST_LIFE
from batch_assets.api.requests.api_error import ApiError
from batch_assets.spec.deadline import parse_seconds

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MOST_PAIRS, KEY_LENGTH, VALUE_LENGTH = 16, 64, 512
LONGEST_WINDOW = 366 * 86_400
PRIORITIES = {"low": -1, "normal": 0, "high": 1}


class ExpiresAfter(BaseModel):
    """How long output files are kept, from their creation."""

    model_config = ConfigDict(extra="forbid")
    anchor: Literal["created_at"]
    seconds: Annotated[StrictInt, Field(ge=SHORTEST_LIFE, le=LONGEST_LIFE)]


class CreateBatch(BaseModel):
    """The body of `POST /v1/batches`."""

    model_config = ConfigDict(extra="forbid")
    input_file_id: StrictStr
    endpoint: StrictStr
    completion_window: StrictStr
    metadata: dict[StrictStr, StrictStr] | None = None
    output_expires_after: ExpiresAfter | None = None

    def check(self) -> int:
        """Seconds of the window. Raises ApiError 400 for what the types above do not say."""
        if self.endpoint not in ENDPOINTS:
            known = ", ".join(f"'{name}'" for name in ENDPOINTS)
            said = f"Invalid value: '{self.endpoint[:80]}'. Supported values are: {known}."
            raise ApiError(400, said, param="endpoint", code="invalid_value")
        window = self.completion_window
        seconds = parse_seconds(window) if len(window) <= 64 and window == window.strip() else None
        if seconds is None or not 1 <= seconds <= LONGEST_WINDOW:
            said = "expected a time of 1s to 366d, as 24h, 90s or 7d"
            raise ApiError(
                400, f"Invalid value for 'completion_window': {said}.", param="completion_window", code="invalid_value"
            )
        _check_metadata(self.metadata or {})
        return int(seconds)

    def digest(self) -> str:
        """The same for the same request."""
        return hashlib.sha256(orjson.dumps(self.model_dump(), option=orjson.OPT_SORT_KEYS)).hexdigest()


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MOST_PAIRS:
        said = f"Invalid 'metadata': too many properties. Expected at most {MOST_PAIRS}, found {len(metadata)}."
        raise ApiError(400, said, param="metadata", code="object_above_max_properties")
    for key, value in metadata.items():
        if not key or len(key) > KEY_LENGTH:
            said = f"Invalid 'metadata': expected keys of 1 to {KEY_LENGTH} characters, found one of {len(key)}."
            raise ApiError(400, said, param="metadata", code="invalid_value")
        if len(value) > VALUE_LENGTH:
            said = f"Invalid 'metadata.{key}': string too long. Expected at most {VALUE_LENGTH} characters."
            raise ApiError(400, said, param=f"metadata.{key}", code="string_above_max_length")
    try:
        parse_budget(metadata)
    except BudgetInvalid as error:
        said = f"Invalid 'metadata.{BUDGET}': {error}."
        raise ApiError(400, said, param=f"metadata.{BUDGET}", code="invalid_value") from None


def priority_of(metadata: dict[str, str] | None) -> int:
    """Which batch comes first where several wait: -1, 0 or 1, from `metadata.priority`; a foreign value is none."""
    return PRIORITIES.get((metadata or {}).get("priority", ""), 0)
