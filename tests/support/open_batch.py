"""A batch under way: checked, loaded, and rows that an engine has answered."""

from __future__ import annotations

from batch_assets.api.batches.snapshot import check_input
from batch_assets.api.database.batch_records import BatchRecord, Held
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.settings import ApiLimits
from gpu_runner.rows import Origin, Outcome
from resources.objects.opening import LocalObjects
from support.api_service import CHAT, jsonl, line

ORIGIN = Origin("tiny", "e", "p", "i", False, "r")
KEY = "00000"


def answered(name: str) -> Outcome:
    return Outcome(name, f"key-{name}", "{}", "stop", 1, 1, 1, None, None, ORIGIN, 0.0, 1.0)


def run_of(objects: LocalObjects, *names: str) -> BatchRun:
    """A batch of these lines, checked and loaded."""
    record = BatchRecord("batch_1", "t", CHAT, "file-1", "24h", 1, 2, "d", epoch=1)
    objects.put("input", jsonl([line(name) for name in names]))
    assert check_input(objects, "input", record.id, CHAT, None, ApiLimits()).errors == []
    run = BatchRun(objects, record, Held(record.id, 1), "me")
    run.load()
    return run
