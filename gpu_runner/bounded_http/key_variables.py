"""API keys out of environment variables, as they can stand in a header."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gpu_runner.errors import ExitStatus, UserFacingError


class UnusableKey(UserFacingError):
    """A variable holds what can be no API key; the message names the variable and never the key."""

    exit_status = ExitStatus.WRONG_REQUEST


def key_in(variable: str, environment: Mapping[str, str] | None = None) -> str | None:
    """The key in a variable, without blanks and line ends around it; None when nothing is there.

    Raises UnusableKey for one that no header can hold.
    """
    key = (os.environ if environment is None else environment).get(variable, "").strip()
    if not key:
        return None
    if not (key.isascii() and key.isprintable()):
        kind = "a line end or another control character" if key.isascii() else "a character that is not ASCII"
        raise UnusableKey(f"{variable}: expected an API key in one line of ASCII, found {kind} within it")
    return key
