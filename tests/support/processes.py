"""Questions about processes that may end while they are asked."""

import psutil


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one that only waits to be collected has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> list[str]:
    """Its words; none when it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def environment(process: psutil.Process) -> dict[str, str]:
    """Its variables; none when it has just ended, or is another account's."""
    try:
        return process.environ()
    except psutil.Error:
        return {}
