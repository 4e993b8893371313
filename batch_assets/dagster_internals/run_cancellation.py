"""A run that was asked to end says so in one sentence.

Dagster writes what interrupted a step as an error with its stack, once for the step and once for the run: a red
traceback for what somebody wanted. An error that brings its own text in Dagster's form is written as that text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import dagster as dg
from dagster._core.errors import DagsterExecutionInterruptedError, DagsterUserCodeProcessError
from dagster_shared.error import SerializableErrorInfo

_ASKED = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)


class RunCanceled(DagsterExecutionInterruptedError, DagsterUserCodeProcessError):
    """The run ends because somebody asked for it."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, user_code_process_error_infos=[SerializableErrorInfo(sentence, [], None)])  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def cancellation_in_words(context: dg.AssetExecutionContext, sentence: Callable[[], str]) -> Iterator[None]:
    """An interrupt of the body that somebody asked for becomes RunCanceled; any other is raised as it is."""
    try:
        yield
    except (DagsterExecutionInterruptedError, KeyboardInterrupt):
        run = context.instance.get_run_by_id(context.run.run_id)
        if run is None or run.status not in _ASKED:
            raise
        raise RunCanceled(sentence()) from None
