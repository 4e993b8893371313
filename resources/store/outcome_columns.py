"""Names of the columns of outcomes. Without Arrow, which takes a fifth of a second to import."""

from __future__ import annotations

PART_COLUMNS = ("tool_calls", "reasoning", "refusal", "logprobs")  # parts of an answer, see outcome_tables.py
REUSED_FROM = "reused_from"
TURNS = "turns"  # of conversations; a table has it where its dataset has some
WRITTEN_TURNS = "user_turns"  # of those whose user's words a model writes
OPTIONAL_COLUMNS = (
    *PART_COLUMNS,
    REUSED_FROM,
    TURNS,
    WRITTEN_TURNS,
)  # of a batch object: written only where a row has one
PROVENANCE = ("model", "engine", "provider", "instance_type", "spot", "run_id")

OUTCOME_COLUMNS: tuple[str, ...] = (
    "row_id",
    "row_key",
    "output",
    "finish_reason",
    *PART_COLUMNS,
    "prompt_tokens",
    "completion_tokens",
    "tries",
    "error",
    "error_message",
    *PROVENANCE,
    "started_at",
    "seconds",
    "usd",
    REUSED_FROM,
)
