"""What a failed run says of its error."""

from __future__ import annotations

import dagster as dg
import pytest

from batch_assets.catalog.run_errors import failure_text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError(), "AssertionError, an error without a message, raised at catalog/test_run_errors.py, line "),
        (ValueError("no such column"), "ValueError: no such column"),
    ],
)
def test_an_error_without_a_message_says_where_it_was_raised(error: Exception, said: str) -> None:
    @dg.op
    def fails() -> None:
        raise error

    @dg.job
    def job() -> None:
        fails()

    with dg.DagsterInstance.ephemeral() as instance:
        run = job.execute_in_process(instance=instance, raise_on_error=False)
        text = failure_text(instance, run.run_id)
    assert text.startswith(said)
