"""The ledger: additions count once, a batch's end settles what its parts did not say."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_assets.api.billing.usage import Kind, TaskUsage, UsageKey, Used
from batch_assets.api.billing.usage_ledger import TASK_SECONDS, LedgerTotals, UsageLedger
from batch_assets.api.database.amounts import split_amount, whole_amount
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.states import ACCEPT, END_CANCEL

DAY = datetime.date(2027, 3, 1)
KEY = UsageKey(DAY, "acme", "interactive", "m", Kind.COMPLETIONS)
OTHER = UsageKey(DAY + datetime.timedelta(days=1), "acme", "batch", "m", Kind.COMPLETIONS)


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    with contextlib.closing(Records(f"sqlite:///{tmp_path}/api.db")) as records:
        yield records


@pytest.fixture
def ledger(records: Records) -> UsageLedger:
    return UsageLedger(records)


def used(tokens: int, amount: int = 0) -> Used:
    return Used(requests=1, input_tokens=tokens, output_tokens=2 * tokens, amount=amount)


def batch(records: Records) -> str:
    """A batch that is under way."""
    batches = BatchRecords(records)
    batches.create(BatchRecord("batch_1", "acme", "/v1/chat/completions", "file-1", "24h", 1, 9, "d"))
    held = batches.claim("batch_1", "w", 0.0, 5.0)
    assert held is not None and batches.move(held, ACCEPT, 2)
    return "batch_1"


def test_bytes_of_a_journal_are_added_once_and_in_order(ledger: UsageLedger) -> None:
    assert ledger.apply("j", 0, 10, {KEY: used(5, 7)})
    assert not ledger.apply("j", 0, 10, {KEY: used(5, 7)})
    assert not ledger.apply("j", 20, 30, {KEY: used(5)})
    assert ledger.apply("j", 10, 20, {KEY: used(1, 1), OTHER: used(2)})
    assert ledger.applied("j") == 20 and ledger.applied("another") == 0
    assert {line.key: line.used for line in ledger.lines()} == {KEY: used(5, 7).plus(used(1, 1)), OTHER: used(2)}


def test_an_online_request_is_charged_once_whoever_answered_it(url: str) -> None:
    """Two consumers have answered `a`, one says so twice; after days its id is forgotten."""

    def task(name: str, tokens: int, at: float = 1_800_000_000.0) -> TaskUsage:
        return TaskUsage(f"task_{name}", at, KEY, used(tokens, 3 * tokens))

    with contextlib.closing(UsageLedger(Records(url))) as ledger:
        assert ledger.apply("j", 0, 10, {KEY: used(1)}, [task("b", 10), task("a", 100), task("a", 100)])
        assert ledger.apply("k", 0, 10, {}, [task("a", 1000), task("c", 10_000)])
        assert not ledger.apply("k", 0, 10, {}, [task("d", 5)]), "not the next bytes: nothing of it is kept"
        assert [line.used.input_tokens for line in ledger.lines()] == [10_111]
        assert ledger.apply("k", 10, 20, {}, [task("d", 20_000, 1_800_000_000.0 + TASK_SECONDS + 1)])
        assert ledger.apply("k", 20, 30, {}, [task("d", 20_000), task("a", 100_000)])
        assert [line.used.input_tokens for line in ledger.lines()] == [130_111]


def test_many_online_requests_at_once_are_charged_once(url: str) -> None:
    tasks = [TaskUsage(f"task_{number}", 1.8e9, KEY, used(1)) for number in range(5_000)]
    with contextlib.closing(UsageLedger(Records(url))) as ledger:
        assert ledger.apply("j", 0, 10, {}, tasks[:3_000]) and ledger.apply("k", 0, 10, {}, tasks)
        assert [line.used.requests for line in ledger.lines()] == [5_000]


def test_a_tenant_and_days_are_looked_up(ledger: UsageLedger) -> None:
    foreign = UsageKey(DAY, "other", "interactive", "m", Kind.EMBEDDINGS)
    ledger.apply("j", 0, 1, {KEY: used(1), OTHER: used(2), foreign: used(3)})
    assert [line.key for line in ledger.lines("acme")] == [KEY, OTHER]
    assert [line.key for line in ledger.lines("acme", since=OTHER.day)] == [OTHER]
    assert [line.key for line in ledger.lines(until=OTHER.day)] == [KEY, foreign]


def test_an_object_of_a_batch_counts_once_and_the_end_settles_the_rest(records: Records, ledger: UsageLedger) -> None:
    name = batch(records)
    assert ledger.add_part(name, "00000", OTHER, used(10, 30))
    assert not ledger.add_part(name, "00000", OTHER, used(10, 30))
    held = BatchRecords(records).claim(name, "other", 100.0, 5.0)
    assert held is not None
    BatchRecords(records).cancel("acme", name, 3)
    whole = Used(requests=3, input_tokens=14, output_tokens=21, amount=35)
    for _ in range(2):
        BatchRecords(records).move(held, END_CANCEL, 4, also=lambda c: ledger.settle(c, name, OTHER, whole))
    assert not ledger.add_part(name, "00001", OTHER, used(4, 5)), "what comes after the end is in its settlement"
    assert ledger.batch_usage(name) == whole
    assert [line.used for line in ledger.lines()] == [whole]


def test_a_settlement_that_is_rolled_back_with_its_transition_counts_nothing(
    records: Records, ledger: UsageLedger
) -> None:
    name = batch(records)
    BatchRecords(records).cancel("acme", name, 3)
    held = BatchRecords(records).claim(name, "other", 100.0, 5.0)
    assert held is not None

    def fails(connection: object) -> None:
        ledger.settle(connection, name, OTHER, used(1))  # type: ignore[arg-type]
        raise RuntimeError("killed here")

    with pytest.raises(RuntimeError):
        BatchRecords(records).move(held, END_CANCEL, 4, also=fails)
    assert ledger.lines() == [] and BatchRecords(records).open_batches()


LARGE = (1 << 63) - 1  # picodollars, 9.2 million dollars: what a column holds
HUGE = Used(requests=1, input_tokens=1, amount=LARGE)


def test_amounts_have_no_end(url: str) -> None:
    """Of one line, of several in one journal, and of what a batch gives back."""
    with contextlib.closing(UsageLedger(Records(url))) as ledger:
        for number in range(4):
            assert ledger.apply("j", number, number + 1, {KEY: HUGE.plus(HUGE), OTHER: used(1, -LARGE)})
        lines = {line.key: line.used for line in ledger.lines()}
        assert lines[KEY] == Used(requests=8, input_tokens=8, amount=8 * LARGE)
        assert lines[OTHER].amount == -4 * LARGE
        totals = ledger.totals()
        assert totals.used == lines[KEY].plus(lines[OTHER]) and totals.last_day == OTHER.day


def test_a_batch_may_cost_more_than_a_column_holds(url: str) -> None:
    with contextlib.closing(Records(url)) as records:
        ledger, name = UsageLedger(records), batch(records)
        for part in ("00000", "00001", "00002"):
            assert ledger.add_part(name, part, OTHER, HUGE)
        assert ledger.batch_usage(name).amount == 3 * LARGE
        held = BatchRecords(records).claim(name, "other", 100.0, 5.0)
        assert held is not None
        BatchRecords(records).cancel("acme", name, 3)
        whole = Used(requests=2, input_tokens=2, amount=LARGE + 5)
        assert BatchRecords(records).move(held, END_CANCEL, 4, also=lambda c: ledger.settle(c, name, OTHER, whole))
        assert ledger.batch_usage(name) == whole and ledger.totals().used == whole


def test_totals_are_those_of_the_lines(ledger: UsageLedger) -> None:
    assert ledger.totals() == LedgerTotals()
    ledger.apply("j", 0, 1, {KEY: used(3, 10**18 + 7), OTHER: used(2, 5)})
    assert ledger.totals() == LedgerTotals(used(3, 10**18 + 7).plus(used(2, 5)), OTHER.day)


@given(st.lists(st.integers(-(10**20), 10**20), max_size=8))
def test_split_amounts_add_up(amounts: list[int]) -> None:
    columns = [split_amount(amount) for amount in amounts]
    assert all(abs(one["amount"]) < 10**18 for one in columns)
    assert [whole_amount(one["amount_millions"], 0, one["amount"]) for one in columns] == amounts


def test_what_a_batch_used_in_parts_is_forgotten_with_its_contents(url: str) -> None:
    with contextlib.closing(Records(url)) as records:
        ledger, name = UsageLedger(records), batch(records)
        assert ledger.add_part(name, "00000", OTHER, used(1, 2))
        before = ledger.lines()
        BatchRecords(records).set_contents_deleted("another", 9)
        assert ledger.batch_usage(name) == used(1, 2)
        BatchRecords(records).set_contents_deleted(name, 9)
        assert ledger.batch_usage(name) == Used() and ledger.lines() == before
