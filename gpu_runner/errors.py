"""Errors whose message is for the user of the command line, and the exit status of a command that ends with one."""

from __future__ import annotations

import enum
from typing import Any, ClassVar


class ExitStatus(enum.IntEnum):
    """Exit status of `batch-assets`."""

    DONE = 0
    FAILED = 1  # the work or a comparison failed
    WRONG_REQUEST = 2  # the request, a file or a setting that it rests on is wrong
    INTERRUPTED = 130


class UserFacingError(Exception):
    """An error whose text is an answer to the user: the command line prints it without a traceback and ends.

    The text says what was expected, what was found, where, and what to do. `exit_status` is that of the command. A
    class must set or inherit it: one without raises TypeError where it is defined.
    """

    exit_status: ClassVar[ExitStatus]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not isinstance(getattr(cls, "exit_status", None), ExitStatus):
            raise TypeError(f"{cls.__module__}.{cls.__qualname__}: expected an ExitStatus as exit_status, found none")
