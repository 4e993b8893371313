"""Why an engine is left, as people read it."""

from __future__ import annotations

import pytest

from batch_assets.generation.engine_supervisor import WAITS, LeaveKind, LeaveReason


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (LeaveReason(LeaveKind.OTHER_RUN), WAITS),
        (LeaveReason(LeaveKind.MIGRATION, "ba-1: from a to b: saves 1.00 $"), "ba-1: from a to b: saves 1.00 $"),
        (LeaveReason(LeaveKind.PREEMPTION_NOTICE, notice_seconds=29.6), "it will be taken away in 30 s"),
        (LeaveReason(LeaveKind.RETIRED, "nobody needs it"), "nobody needs it"),
    ],
)
def test_why_an_engine_is_left_is_said_in_a_sentence(reason: LeaveReason, words: str):
    assert reason.describe() == words
