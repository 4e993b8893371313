"""The token of Dagster's webserver: a file in DAGSTER_HOME that only its owner reads.

Who can read the file may change things through the webserver. The UI never sees the token itself: its cookie is derived
from it, so what a cookie gives away (cookies are shared by all ports of a host) is no token.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

FILE = "webserver.token"
MOST_BYTES = 200


def web_token(home: Path) -> str:
    """The token of this home, made when there is none. One that others could read is replaced."""
    path = home / FILE
    for _ in range(3):
        found = _read(path)
        if found:
            return found
        _make(path)
    raise PermissionError(f"{path}: expected a file that this user can write, found none")


def headers(home: Path) -> dict[str, str]:
    """What a program sends along to be let in."""
    return {"Authorization": f"Bearer {web_token(home)}"}


def cookie_value(token: str, port: int) -> str:
    """Value of the UI's cookie: proof of the token for this port, from which the token cannot be computed."""
    return hmac.new(token.encode(), f"cookie {port}".encode(), hashlib.sha256).hexdigest()


def _read(path: Path) -> str:
    """The token, or "" when there is none that only we could read."""
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            text = file.read(MOST_BYTES).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        return ""
    good = not state.st_mode & 0o077 and len(text) >= 32 and text.isalnum()
    if not good:
        path.unlink(missing_ok=True)
    return text if good else ""


def _make(path: Path) -> None:
    """Written whole under another name first: who reads it finds all of it, and the first of several writers wins."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink()
