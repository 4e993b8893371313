"""Names of workers, and whether the process behind a name is gone: as far as this computer can tell."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path


def own_name() -> str:
    """The name of a worker in this process: computer, process id, when the process began, and a number."""
    pid = os.getpid()
    return f"{socket.gethostname()[:60]}/{pid}/{began(pid)}/{secrets.token_hex(4)}"


def began(pid: int) -> str:
    """When a process began, in ticks since boot; "": there is none, or the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def gone(name: str) -> bool:
    """Whether the process of this name surely runs no more. Of another computer nobody knows."""
    try:
        host, pid, since, _ = name.split("/")
        number = int(pid)
    except ValueError:
        return False
    return host == socket.gethostname()[:60] and since != "" and began(number) != since
