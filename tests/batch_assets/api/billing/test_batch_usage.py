"""Batches of which engines had a part of the prompts in their caches: charged right on each day, and in each budget."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.api_service import CHAT, jsonl, line

from batch_assets.api.batches.snapshot import check_input
from batch_assets.api.billing.batch_usage import BatchCharges, BatchUsage
from batch_assets.api.billing.price_list import PriceList
from batch_assets.api.billing.spending import BUDGET, Spending, SpendingRecords
from batch_assets.api.billing.usage import Tokens, Used, day_of
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords, Held
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.states import ACCEPT, COMPLETE, FINALIZE
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.execution.results import write_results
from batch_assets.api.settings import ApiLimits
from gpu_runner.rows import Origin, Outcome
from resources.objects.opening import LocalObjects
from resources.store.dataset_store import BatchFooter

PRICES = PriceList.model_validate({"default": {"batch": [{"input": 1, "cached_input": 0.1, "output": 2}]}})
MICRO = 10**6
PROMPT, CACHED, ANSWER = 100, 90, 5
LINE = 10 * MICRO + 9 * MICRO + 10 * MICRO  # 10 tokens at 1, 90 at 0.1, 5 at 2 picodollars a millionth
ORIGIN = Origin("tiny", "e", "p", "i", False, "r")
FIRST_DAY, LAST_DAY = 1_800_000_000.0, 1_800_000_000.0 + 2 * 86_400


def answered(row_id: str, row_key: str) -> Outcome:
    usage = {"prompt_tokens": PROMPT, "completion_tokens": ANSWER, "prompt_tokens_details": {"cached_tokens": CACHED}}
    body = json.dumps({"choices": [], "usage": usage})
    return Outcome(row_id, row_key, body, "stop", PROMPT, ANSWER, 1, None, None, ORIGIN, 0.0, 1.0)


class BilledService:
    """Records, a store, and a clock that the test sets."""

    def __init__(self, folder: Path, url: str) -> None:
        self.objects, self.records = LocalObjects(folder / "store"), Records(url)
        self.batches, self.ledger = BatchRecords(self.records), UsageLedger(self.records)
        self.now = FIRST_DAY
        self.spending = SpendingRecords(self.records)
        self.usage = self.usage_by(PRICES)

    def usage_by(self, prices: PriceList) -> BatchUsage:
        return BatchUsage(self.ledger, BatchCharges(prices), self.spending, lambda: self.now)

    def batch(self, lines: int) -> tuple[BatchRecord, Held]:
        """One that is under way, of so many lines."""
        metadata = json.dumps({BUDGET: "100"})
        record = BatchRecord("batch_1", "acme", CHAT, "file-1", "24h", 1, 2, "d", metadata=metadata)
        self.batches.create(record)
        held = self.batches.claim(record.id, "w", 0.0, 5.0)
        self.objects.put("input", jsonl([line(str(number)) for number in range(lines)]))
        assert check_input(self.objects, "input", record.id, CHAT, None, ApiLimits()).errors == []
        assert held is not None and self.batches.move(held, ACCEPT, 2, total=lines, model="tiny")
        current = self.batches.current(held)
        assert current is not None
        return current, held

    def run(self, record: BatchRecord, held: Held) -> BatchRun:
        run = BatchRun(self.objects, record, held, "w", self.usage.budget(record))
        run.load()
        return run

    def end(self, run: BatchRun, usage: BatchUsage | None = None) -> None:
        found = write_results(run, "batch_expired", 1, 2)
        used = found.usage
        tokens = Tokens(used.input_tokens, used.cached_tokens, used.output_tokens)
        self.settle(run, tokens, found.completed, usage or self.usage)

    def settle(self, run: BatchRun, tokens: Tokens, answers: int, usage: BatchUsage) -> None:
        settled = usage.settle(run.record, tokens, answers)
        assert self.batches.move(run.held, FINALIZE, 3) and self.batches.move(run.held, COMPLETE, 4, also=settled)

    def days(self) -> dict[int, Used]:
        """The ledger, by days since the first."""
        return {(one.key.day - day_of(FIRST_DAY)).days: one.used for one in self.ledger.lines()}


@pytest.fixture
def site(tmp_path: Path, url: str) -> Iterator[BilledService]:
    site = BilledService(tmp_path, url)
    with contextlib.closing(site.records):
        yield site


def committed(run: BatchRun, part: int = 0) -> BatchFooter:
    """One object of 250 lines, all answered."""
    found = list(run.batches())[part]
    rows = [answered(row.row_id, row.row_key) for row in found.rows]
    return run.commit(found.key, rows)


def lines(count: int) -> Used:
    return Used(count, 0, count * PROMPT, count * CACHED, count * ANSWER, 0, count * LINE)


def test_cached_tokens_are_charged_as_such_on_the_day_of_their_lines(site: BilledService) -> None:
    record, held = site.batch(300)
    run = site.run(record, held)
    site.usage._write(record, committed(run))
    assert site.days() == {0: lines(250)}
    site.now = LAST_DAY
    for number in range(250, 300):
        run.note("00001", answered(str(number), "k"))
    run.write_journal()
    site.end(run)
    assert site.days() == {0: lines(250), 2: lines(50)}
    assert site.spending.read([record.id]) == {record.id: Spending(300 * LINE, False)}


def test_a_budget_counts_cached_tokens_as_they_are_charged(site: BilledService) -> None:
    record, held = site.batch(300)
    run = site.run(record, held)
    for number in range(3):
        run.note("00001", answered(str(250 + number), "k"))
    assert run.budget is not None and run.budget.spent == 3 * LINE
    committed(run)
    run.write_journal()
    taken = site.batches.claim(record.id, "other", 1e10, 5.0)
    assert taken is not None
    again = site.run(replace(record, epoch=taken.epoch), taken)
    assert again.budget is not None and again.budget.spent == 253 * LINE


def test_objects_of_an_earlier_version_are_read_for_their_cached_tokens(
    site: BilledService, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, held = site.batch(250)
    with monkeypatch.context() as patch:
        patch.setattr("batch_assets.api.execution.batch_run.BatchFooter", _EarlierFooter)
        footer = committed(site.run(record, held))
    assert footer.cached_tokens is None
    taken = site.batches.claim(record.id, "other", 1e10, 5.0)
    assert taken is not None
    again = site.run(replace(record, epoch=taken.epoch), taken)
    assert again.budget is not None and again.budget.spent == 250 * LINE
    site.usage.committed(record, footer)
    assert site.usage._queue.empty(), "its footer does not say what it costs: the end does"
    site.now = LAST_DAY
    site.end(again)
    assert site.days() == {2: lines(250)}


class _EarlierFooter(BatchFooter):
    @classmethod
    def of(cls, *arguments: object, cached_tokens: object = None, **named: object) -> BatchFooter:
        return BatchFooter.of(*arguments, **named)  # type: ignore[arg-type]


def test_what_is_not_delivered_is_taken_back_on_the_day_on_which_it_was_charged(site: BilledService) -> None:
    record, held = site.batch(500)
    run = site.run(record, held)
    parts = list(run.batches())
    for day, part in enumerate(parts):
        site.now = FIRST_DAY + day * 86_400
        rows = [answered(row.row_id, row.row_key) for row in part.rows]
        site.usage._write(record, run.commit(part.key, rows))
    assert site.days() == {0: lines(250), 1: lines(250)}
    site.now = LAST_DAY  # the second object is damaged
    site.settle(run, Tokens(250 * PROMPT, 250 * CACHED, 250 * ANSWER), 250, site.usage)
    assert site.days() == {0: lines(250), 1: Used()}


def test_prices_that_fall_before_the_end_make_no_day_negative(site: BilledService) -> None:
    """A batch is charged by the prices of the service that ends it."""
    record, held = site.batch(250)
    run = site.run(record, held)
    site.usage._write(record, committed(run))
    site.now = LAST_DAY
    site.end(run, site.usage_by(PriceList.model_validate({"default": {"batch": [{"input": 0.01}]}})))
    assert site.days() == {0: replace(lines(250), amount=250 * PROMPT * 10**4)}


def test_a_worker_that_lost_a_batch_leaves_its_spending_alone(site: BilledService) -> None:
    record, held = site.batch(250)
    assert site.spending.write(held, Spending(10, False))
    new = site.batches.claim(record.id, "other", 1e10, 5.0)
    assert new is not None and site.spending.write(new, Spending(30, True))
    assert not site.spending.write(held, Spending(20, False))
    assert site.spending.read([record.id]) == {record.id: Spending(30, True)}


def test_spending_of_a_batch_that_has_ended_is_that_of_its_end(site: BilledService) -> None:
    record, held = site.batch(250)
    run = site.run(record, held)
    committed(run)
    site.end(run)
    assert not site.spending.write(held, Spending(20, True))
    assert site.spending.read([record.id]) == {record.id: Spending(250 * LINE, False)}
