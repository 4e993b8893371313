"""Who may read and write what is kept on disk: its user alone, or also a group (BATCH_ASSETS_GROUP).

One umask for this process and for everything that it starts, Dagster and its runs among them; the top folders get
their mode and their group when they are made.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
import sys
from pathlib import Path

from gpu_runner.errors import ExitStatus, UserFacingError

OTHERS = 0o077
GROUP_OTHERS = 0o007


class AccessError(UserFacingError):
    """BATCH_ASSETS_GROUP names a group that cannot be given access: says why."""

    exit_status = ExitStatus.WRONG_REQUEST


def group() -> str | None:
    """The group that shares home and store: BATCH_ASSETS_GROUP, else none."""
    return os.environ.get("BATCH_ASSETS_GROUP") or None


def group_id() -> int | None:
    """Number of that group, None without one. Raises AccessError."""
    name = group()
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise AccessError(f"BATCH_ASSETS_GROUP: expected a group of this machine, found {name!r}") from None


def in_group(uid: int) -> bool:
    """Whether the user with this number is in that group, as the machine's user database has it."""
    found = group_id()
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return False
    return found is not None and found in os.getgrouplist(user.pw_name, user.pw_gid)


def umask() -> int:
    """For all our processes: new files are ours alone, or ours and the group's."""
    return GROUP_OTHERS if group() else OTHERS


def make_private(folder: Path) -> None:
    """Make the folder if it is not there, for its user or the group only. Raises AccessError.

    What is there already and open to more is closed, when it is ours, and that is said.
    """
    os.umask(umask())
    folder.mkdir(parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        return
    wide = stat.S_IMODE(found.st_mode) & umask()
    if name := group():
        _give(folder, name)
    elif wide:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~wide)
    if wide and any(folder.iterdir()):
        sys.stderr.write(f"{folder} was open to other users (mode {stat.S_IMODE(found.st_mode):03o}): closed to them\n")


def too_wide(folder: Path) -> str | None:
    """What to say of a folder that more users may read or enter than should; None when all is well."""
    if not folder.is_dir() or not (wide := stat.S_IMODE(folder.stat().st_mode) & umask()):
        return None
    who = "g-rwx,o-rwx" if wide & 0o070 else "o-rwx"
    return f"{folder} is open to other users: `chmod {who} {folder}` closes it, BATCH_ASSETS_GROUP names who shares it"


def _give(folder: Path, name: str) -> None:
    """Give the folder to the group; what is made in it belongs to the group too (set-group-ID, as chmod(1) says)."""
    wanted = group_id()
    assert wanted is not None  # the name is that of a group
    try:
        if folder.stat().st_gid != wanted:
            shutil.chown(folder, group=wanted)
        folder.chmod(0o2770)
    except OSError as error:
        raise AccessError(
            f"BATCH_ASSETS_GROUP: {folder} cannot be given to {name!r} ({error.strerror}); you must be in that group"
        ) from None
