"""What a stack has started, and what an earlier stack of the same home has left behind.

Every process of a stack carries in its environment the stack's token (128 random bits), the child it belongs to and the
home: run workers and the engines that they start too.
The token is kept in `stack.json` of the home, from before the first child is started until after the last has ended. So
whoever starts a stack (and holds its lock, so that no other owner is alive) finds a token there only after an owner was
killed. Processes of our user with that token and this home are its orphans. Hosts of machines are none: what is rented
belongs to the fleet, and ends by itself.

An environment can only be read by its own user. Where a group shares the home, a lock that guards and their commands
inherit says that somebody else's are alive: then nothing is started.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from gpu_runner.providers.machine_host.registry import MARK
from gpu_runner.providers.process_guard import GRACE_SECONDS
from gpu_runner.providers.process_marks import STEP_SECONDS, Environment, Matches, end_marked, marked

VARIABLE = "GPU_RUNNER_STACK"  # not one of those that engines are kept from seeing
RECORD = "stack.json"
ALIVE = "stack.alive"
SOCKETS = "batch-assets-"
# A guard whose owner is dead ends its group within one grace period, and what it has adopted within another.
GUARD_SECONDS = 2 * GRACE_SECONDS + 1
INSIST_SECONDS = 5.0
SOCKET_BYTES = 100  # of a path: sockaddr_un holds 108 (unix(7)); grpc adds nothing to it


class LeftoverError(Exception):
    """Something of an earlier stack cannot be ended: says what, and what to do."""


@dataclass(frozen=True, slots=True)
class StackMark:
    """A stack's token, and the folder of its sockets: 0700, outside the home, whose path may be too long for one."""

    token: str
    sockets: str

    def environment(self, home: Path, child: str) -> dict[str, str]:
        """What each process of this child has in its environment."""
        return {"DAGSTER_HOME": str(home), VARIABLE: f"{self.token}/{child}/{home}"}

    @property
    def socket(self) -> Path:
        """Where the code server answers."""
        return Path(self.sockets) / "code-server"


def new_stack(home: Path) -> StackMark:
    """End what is left of the home's earlier stack and write down a new one. The caller holds the home's lock.

    Raises LeftoverError when a process does not end.
    """
    if (earlier := _recorded(home)) is not None:
        _end(home, earlier, None, "an earlier Dagster of this home")
        forget_stack(home, earlier)
    mark = StackMark(secrets.token_hex(16), _socket_folder(os.environ))
    draft = home / f"{RECORD}.new"
    draft.write_text(json.dumps(asdict(mark)))
    draft.replace(home / RECORD)
    return mark


def hold_alive(home: Path) -> IO[bytes]:
    """A shared lock for guards and commands to inherit: held for as long as one of them lives, as the kernel knows.

    Raises LeftoverError while those of an earlier stack hold it.
    """
    file = (home / ALIVE).open("ab")
    deadline = time.monotonic() + GUARD_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_SH)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise LeftoverError(
                    f"processes of an earlier Dagster hold {home / ALIVE}, and are not ours to end: "
                    f"`fuser -v {home / ALIVE}` names them to their user"
                ) from None
            time.sleep(STEP_SECONDS)


def end_child(home: Path, mark: StackMark, child: str) -> None:
    """End what is left of a child whose guard has died. Raises LeftoverError when a process does not end."""
    _end(home, mark, child, child)


def forget_stack(home: Path, mark: StackMark) -> None:
    """Remove the sockets and, when nothing of the stack is left, its record."""
    folder = Path(mark.sockets)
    if folder.name.startswith(SOCKETS) and _holds_sockets_only(folder):
        shutil.rmtree(folder, ignore_errors=True)
    if not any(marked(_belongs(home, mark, None))):
        (home / RECORD).unlink(missing_ok=True)


def _holds_sockets_only(folder: Path) -> bool:
    """Whether it is a folder of ours as we made it: the record may have been written by another one of the group."""
    try:
        found = folder.lstat()
        private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        return private and all(stat.S_ISSOCK(one.lstat().st_mode) for one in folder.iterdir())
    except OSError:
        return False


def _recorded(home: Path) -> StackMark | None:
    try:
        return StackMark(**json.loads((home / RECORD).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _belongs(home: Path, mark: StackMark, child: str | None) -> Matches:
    """Which environments are of this stack, or of one child of it."""
    begin = f"{VARIABLE}={mark.token}/{child or ''}".encode()
    end = f"/{home}".encode()
    machine = f"{MARK}=".encode()

    def belongs(found: Environment) -> bool:
        if any(entry.startswith(machine) for entry in found):
            return False
        return any(entry.startswith(begin) and entry.endswith(end) for entry in found)

    return belongs


def _end(home: Path, mark: StackMark, child: str | None, whose: str) -> None:
    belongs = _belongs(home, mark, child)
    deadline = time.monotonic() + GUARD_SECONDS
    while any(_is_guard(pid) for pid in marked(belongs)) and time.monotonic() < deadline:
        time.sleep(STEP_SECONDS)  # its owner is dead, so it ends its group by itself, in good order
    if left := end_marked(belongs, grace=GRACE_SECONDS, insist=INSIST_SECONDS):
        pids = " ".join(str(pid) for pid in left)
        raise LeftoverError(f"processes of {whose} do not end: {pids}. End them, then start again: kill -9 {pids}")


def _is_guard(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"gpu_runner.providers.process_guard" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def _socket_folder(variables: Mapping[str, str]) -> str:
    """A new folder that only we may enter, with a path short enough for a socket's.

    In XDG_RUNTIME_DIR, which is emptied when its user logs out, or else in the folder of temporary files.
    """
    for parent in (variables.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if parent and len(os.fsencode(parent)) <= SOCKET_BYTES - len(f"/{SOCKETS}xxxxxxxx/code-server"):
            with contextlib.suppress(OSError):
                return tempfile.mkdtemp(prefix=SOCKETS, dir=parent)
    raise LeftoverError("no folder for the code server's socket: expected one in XDG_RUNTIME_DIR, TMPDIR or /tmp")
