"""What lines cost the budget of their batch: once, and the same before and after a take-over."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

from support.open_batch import answered

from batch_assets.api.billing.answer_usage import object_tokens, tokens_of
from batch_assets.api.billing.price_list import TokenPrices
from batch_assets.api.billing.spending import BatchBudget
from batch_assets.api.billing.usage import Tokens
from batch_assets.api.database.batch_records import Held
from batch_assets.api.execution.batch_run import BatchRun
from resources.objects.opening import LocalObjects

from .test_lost_results import FIRST, LINES, commit, key_of, run_of, torn


def test_a_budget_pays_once_for_lines_that_are_asked_for_again(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    plain = run_of(objects)
    prices = TokenPrices(input=Decimal(1), output=Decimal(1))
    line_price = prices.amount(Tokens(1, 0, 1))

    def loaded(epoch: int) -> BatchRun:
        budget = BatchBudget(10**15, prices, 100)
        run = BatchRun(objects, replace(plain.record, epoch=epoch), Held("batch_1", epoch), "me", budget)
        run.load()
        return run

    def spent(run: BatchRun) -> float:
        assert run.budget is not None
        return run.budget.spent / line_price

    def work(run: BatchRun) -> None:
        for part in run.batches():
            for row in part.rows:
                run.note(key_of(part), replace(answered(row.row_id), row_key=row.row_key))
            commit(run, [part])

    run = loaded(1)
    work(run)
    assert spent(run) == LINES
    torn(objects, run.store.batch_path(run.objects[FIRST]))
    assert run.ask_again([FIRST]) == [FIRST] and spent(run) == 1
    work(run)
    assert spent(run) == LINES == spent(loaded(2))


def test_a_line_without_an_answer_costs_a_budget_nothing_before_and_after_a_take_over(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    plain = run_of(objects)
    prices = TokenPrices(input=Decimal(1), output=Decimal(1))
    run = BatchRun(objects, plain.record, plain.held, "me", BatchBudget(10**15, prices, 100))
    run.load()
    part = next(run.batches())
    rows = [replace(answered(row.row_id), row_key=row.row_key) for row in part.rows]
    rows[0] = replace(rows[0], output=None, finish_reason=None, error="http_500", prompt_tokens=1_000)
    for row in rows:
        run.note(FIRST, row)
    footer = run.commit(FIRST, rows)
    again = BatchRun(
        objects, replace(plain.record, epoch=2), Held("batch_1", 2), "me", BatchBudget(10**15, prices, 100)
    )
    again.load()
    assert run.budget is not None and again.budget is not None
    assert (
        run.budget.spent == again.budget.spent == prices.amount(tokens_of(rows)) == 249 * prices.amount(Tokens(1, 0, 1))
    )
    assert object_tokens(footer) == tokens_of(rows) and footer.prompt_tokens == 1_249
    earlier = footer.model_copy(update={"answered_prompt_tokens": None, "answered_completion_tokens": None})
    assert object_tokens(earlier) is None, "it counted the line that has no answer"
