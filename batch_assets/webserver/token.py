"""The token of Dagster's webserver: a file in DAGSTER_HOME that only its owner reads, or also BATCH_ASSETS_GROUP.

BATCH_ASSETS_WEBSERVER_TOKEN takes the file's place where a proxy in another container must know the token too.

Who can read the file may change things through the webserver. The UI never sees the token itself: its cookie is derived
from it, so what a cookie gives away (cookies are shared by all ports of a host) is no token.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from batch_assets import file_permissions
from batch_assets.settings import SettingError

FILE = "webserver.token"
VARIABLE = "BATCH_ASSETS_WEBSERVER_TOKEN"
FEWEST_CHARACTERS = 32
MOST_BYTES = 200


def web_token(home: Path) -> str:
    """The token of the environment, else of this home, made when there is none. One that others could read is replaced.

    Raises PermissionError, AccessError for a group that does not exist, or SettingError.
    """
    if named := os.environ.get(VARIABLE):
        return _checked(named)
    path, group = home / FILE, file_permissions.group_id()
    for _ in range(3):
        try:
            found = _read(path, group)
        except PermissionError:
            said = "the user that owns it runs a command with BATCH_ASSETS_GROUP set" if group else "use your own home"
            raise PermissionError(f"{path}: expected a file that this user can read; what to do: {said}") from None
        if found:
            return found
        _make(path, group)
    raise PermissionError(f"{path}: expected a file that this user can write, found none")


def headers(home: Path) -> dict[str, str]:
    """What a program sends along to be let in."""
    return {"Authorization": f"Bearer {web_token(home)}"}


def cookie_value(token: str, port: int) -> str:
    """Value of the UI's cookie: proof of the token for this port, from which the token cannot be computed."""
    return hmac.new(token.encode(), f"cookie {port}".encode(), hashlib.sha256).hexdigest()


def _checked(token: str) -> str:
    if len(token) < FEWEST_CHARACTERS or not (token.isascii() and token.isalnum()):
        raise SettingError(
            f"{VARIABLE}: expected at least {FEWEST_CHARACTERS} letters and digits, found {len(token)} characters"
            f"{'' if token.isalnum() else ', others among them'}; `openssl rand -hex 32` makes one"
        )
    return token


def _read(path: Path, group: int | None) -> str:
    """The token, or "" when there is none that only we and the group could read."""
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            text = file.read(MOST_BYTES).decode("ascii", errors="replace").strip()
            shared = group is not None and state.st_gid == group
            good = (
                not state.st_mode & (0o037 if shared else 0o077) and len(text) >= FEWEST_CHARACTERS and text.isalnum()
            )
            if good and state.st_uid == os.geteuid() and stat.S_IMODE(state.st_mode) != _mode(group):
                _share(file.fileno(), group)  # it was made before the group was named
    except FileNotFoundError:
        return ""
    if not good:
        path.unlink(missing_ok=True)
    return text if good else ""


def _mode(group: int | None) -> int:
    return 0o600 if group is None else 0o640


def _share(file: int, group: int | None) -> None:
    if group is not None:
        os.fchown(file, -1, group)
    os.fchmod(file, _mode(group))


def _make(path: Path, group: int | None) -> None:
    """Written whole under another name first: who reads it finds all of it, and the first of several writers wins."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            _share(file.fileno(), group)
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
