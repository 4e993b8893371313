"""How a command ends that cannot go on: errors for the user become a message and an exit status."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import typer

from gpu_runner.errors import ExitStatus, UserFacingError

if TYPE_CHECKING:
    from rich.console import Console


class CommandError(UserFacingError):
    """The command cannot be carried out as it was given."""

    exit_status = ExitStatus.WRONG_REQUEST


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Errors that are for the user end the command with their message and exit status; others are raised."""
    try:
        yield
    except UserFacingError as error:
        fail(str(error), error.exit_status)
    except Exception as error:
        if (cause := _user_error_behind(error)) is not None:
            fail(str(cause), cause.exit_status)
        if (said := _of_the_machine(error)) is not None:
            fail(said, ExitStatus.WRONG_REQUEST)
        raise


def _user_error_behind(error: BaseException) -> UserFacingError | None:
    """The error for the user that another one was raised from, as Dagster does with what a resource raises."""
    cause = error.__cause__
    while cause is not None and not isinstance(cause, UserFacingError):
        cause = cause.__cause__
    return cause


def _of_the_machine(error: BaseException | None) -> str | None:
    """What is wrong with this machine or its settings: a full disk, a folder that may not be written, no database."""
    if _is_of_dagster_yaml(error):
        return str(error)
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
            return f"{where}{error.strerror or type(error).__name__}. {_ADVICE.get(error.errno, '')}".rstrip()
        if _is_of_database(error):
            # The message of SQLAlchemy holds the statement; the driver's own says what is wrong.
            cause = str(getattr(error, "orig", None) or error).strip().splitlines()
            said = cause[0] if cause else type(error).__name__
            return f"a database cannot be used: {said}. Look at DAGSTER_HOME and BATCH_ASSETS_FLEET_DB"
        error = error.__cause__ or error.__context__
    return None


# A heavy package that is not imported yet has raised nothing: it is not imported for the question.


def _is_of_dagster_yaml(error: BaseException | None) -> bool:
    if "dagster" not in sys.modules:
        return False
    from dagster import DagsterInvalidConfigError

    return isinstance(error, DagsterInvalidConfigError)


def _is_of_database(error: BaseException) -> bool:
    if "sqlalchemy" not in sys.modules:
        return isinstance(error, sqlite3.Error)
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, sqlite3.Error | SQLAlchemyError)


_ADVICE = {
    errno.ENOSPC: "Make room there, then give the same command again: it goes on where it was.",
    errno.EDQUOT: "Make room there, then give the same command again: it goes on where it was.",
    errno.EFBIG: "A limit on the size of files (ulimit -f) is too low.",
    errno.EACCES: "Name another folder, or give this user access to it.",
    errno.EROFS: "Name another folder: DAGSTER_HOME, BATCH_ASSETS_STORE.",
}


def error_console() -> Console:
    """Standard error, for people."""
    from rich.console import Console

    return Console(stderr=True)


def fail(text: str, status: int) -> NoReturn:
    error_console().print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)
