"""Tokens of a line: of what a batch has finished, else of its first lines, else of other batches of its model."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.api_service import CHAT, jsonl, line

from batch_assets.api.batches.snapshot import check_input
from batch_assets.api.billing.usage import Kind, UsageKey, Used
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.capacity.backlog import backlogs
from batch_assets.api.capacity.line_lengths import MOST_TOKENS, SAMPLES, LineLength, LineLengths, estimate
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords
from batch_assets.api.database.service_database import Records
from batch_assets.api.settings import ApiLimits
from resources.objects.opening import LocalObjects, StoreError

BATCH = BatchRecord(
    "batch_1", "t", CHAT, "file-1", "1h", 0, 3_600, "d", status="in_progress", model="tiny", total=100
)  # fmt: skip


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    with contextlib.closing(Records(f"sqlite:///{tmp_path}/api.db")) as found:
        yield found


def of(body: dict[str, Any]) -> tuple[float, float]:
    found = estimate([orjson.dumps(body)])
    assert found is not None
    return found.prompt, found.output


def test_a_prompt_has_a_token_per_four_bytes_and_an_answer_half_of_its_limit() -> None:
    assert of({"prompt": "x" * 398, "max_tokens": 100}) == (100.0, 50.0)  # with its quotes
    assert of({"messages": [], "max_tokens": 100, "max_completion_tokens": 300, "n": 2}) == (0.5, 300.0)
    assert of({"messages": []})[1] == 512.0
    assert of({"input": ["ab", "cd"], "max_tokens": 7}) == (11 / 4, 0.0)
    assert of({"messages": [], "input": "x", "max_tokens": 100}) == (0.5, 50.0), "engines ignore an input of a chat"
    assert estimate([]) is None


def test_a_line_that_asks_for_more_than_any_model_has_says_nothing_about_engines() -> None:
    """Its tenant may write what it likes, and other tenants' batches are planned together with it."""
    huge = 2**63
    found = estimate([orjson.dumps({"messages": ["x" * 10**6], "max_tokens": huge, "n": huge})])
    assert found == LineLength(MOST_TOKENS, MOST_TOKENS / 2, 2 * MOST_TOKENS)


def test_what_is_finished_counts_for_more_than_what_was_read(tmp_path: Path, records: Records) -> None:
    objects, ledger = LocalObjects(tmp_path), UsageLedger(records)
    objects.put("input", jsonl([line("a", max_tokens=40)]))
    assert check_input(objects, "input", BATCH.id, CHAT, None, ApiLimits()).errors == []
    BatchRecords(records).create(BATCH)
    lengths, other = LineLengths(objects, ledger), replace(BATCH, id="batch_2")
    read = lengths.of([BATCH, other])
    assert read[BATCH.id].output == 20.0 and not read[BATCH.id].measured
    assert read[other.id].output == 20.0, "nothing of it can be read: as others of its model"
    key = UsageKey(datetime.date(2026, 1, 1), "t", "batch", "tiny", Kind.COMPLETIONS)
    assert ledger.add_part(BATCH.id, "00000", key, Used(requests=10, input_tokens=500, output_tokens=3_000))
    found = lengths.of([replace(BATCH, completed=250), other])[BATCH.id]
    assert (found.prompt, found.output, found.measured) == (50.0, 300.0, True)


def test_a_feed_has_the_share_of_its_tokens_and_never_none(tmp_path: Path, records: Records) -> None:
    embeddings = replace(BATCH, id="batch_2", endpoint="/v1/embeddings", total=1)
    found = [replace(BATCH, id="batch_3"), BATCH, embeddings]
    lengths = LineLengths(LocalObjects(tmp_path), UsageLedger(records)).of(found)
    (backlog,) = backlogs(found, lengths, {}, 0.0)
    assert backlog.task == "chat" and backlog.workload.rows == 201
    assert backlog.shares({BATCH.id, embeddings.id}, 6) == {"chat": 3, "embedding": 1}
    assert backlog.shares({one.id for one in found}, 6) == {"chat": 6, "embedding": 1}
    assert backlog.shares(set(), 6) == {}


def test_whoever_holds_all_batches_has_all_engines_and_none_too_many(tmp_path: Path, records: Records) -> None:
    lengths = LineLengths(LocalObjects(tmp_path), UsageLedger(records)).of([BATCH])
    for seventh in range(1, 100):  # tokens of a line are means: their sums are not exact
        length = replace(lengths[BATCH.id], output=512 + seventh / 7)
        (backlog,) = backlogs([BATCH], {BATCH.id: length}, {}, 0.0)
        assert {number: backlog.shares({BATCH.id}, number)["chat"] for number in (3, 6, 12)} == {3: 3, 6: 6, 12: 12}


class AwayObjects(LocalObjects):
    """A store that does not answer."""

    asked = 0

    def get(self, path: str, most: int | None = None) -> bytes:
        self.asked += 1
        raise StoreError("away")


def test_batches_that_cannot_be_read_keep_no_other_from_being_read(
    tmp_path: Path, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    objects = LocalObjects(tmp_path)
    objects.put("input", jsonl([line("a", max_tokens=40)]))
    assert check_input(objects, "input", BATCH.id, CHAT, None, ApiLimits()).errors == []
    damaged = [replace(BATCH, id=f"batch_{number}", total=1_000) for number in range(2, 2 + SAMPLES)]
    lengths = LineLengths(objects, UsageLedger(records))
    outputs = [lengths.of([*damaged, BATCH])[BATCH.id].output for _ in range(3)]
    assert outputs == [512.0, 20.0, 20.0]
    assert len(caplog.records) == SAMPLES, "each is said once"


def test_a_store_that_does_not_answer_is_asked_once_a_look(tmp_path: Path, records: Records) -> None:
    away, others = AwayObjects(tmp_path), [replace(BATCH, id=f"batch_{number}") for number in range(2, 6)]
    LineLengths(away, UsageLedger(records)).of([BATCH, *others])
    assert away.asked == 1


class CountingLedger(UsageLedger):
    """Counts what it is asked."""

    asked = 0

    def usage_of_batches(self, batch_ids: Sequence[str]) -> dict[str, Used]:
        self.asked += len(batch_ids)
        return super().usage_of_batches(batch_ids)


@pytest.mark.slow
def test_the_ledger_adds_up_a_batch_again_only_when_many_more_lines_are_done(tmp_path: Path, records: Records) -> None:
    """A million lines, looked at 4,000 times; at every look the ledger would add up up to 4,000 objects."""
    ledger = CountingLedger(records)
    lengths, million = LineLengths(LocalObjects(tmp_path), ledger), replace(BATCH, total=1_000_000)
    BatchRecords(records).create(BATCH)
    key = UsageKey(datetime.date(2026, 1, 1), "t", "batch", "tiny", Kind.COMPLETIONS)
    for part in range(4_000):
        if part % 100 == 0:  # a hundred objects in one: the ledger's own writing is not what is looked at
            used = Used(requests=25_000, input_tokens=25_000 * 50, output_tokens=25_000 * (100 + part))
            assert ledger.add_part(BATCH.id, f"{part:05d}", key, used)
        lengths.of([replace(million, completed=250 * (part + 1))])
    assert ledger.asked < 100
    mean = lengths.of([replace(million, completed=1_000_000)])[BATCH.id].output
    assert mean == pytest.approx(ledger.batch_usage(BATCH.id).output_tokens / 1_000_000, rel=0.06)
