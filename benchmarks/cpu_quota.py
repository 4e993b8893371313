"""Part of a core for some processes: the kernel's CFS bandwidth control, cgroup v2 or v1.

Needs the right to make cgroups (root). See the kernel's Documentation/scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PERIOD_US = 10_000  # short, so that a process that has used its part waits a few milliseconds and not a hundred
_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu"))


class CpuQuota:
    """A cgroup whose processes share so much of a core."""

    def __init__(self, folder: Path, cores: float) -> None:
        self._folder = folder
        quota = int(cores * PERIOD_US)
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))

    def add(self, pid: int) -> None:
        """A process, with all its threads."""
        (self._folder / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def cpu_quotas(count: int, cores: float) -> Iterator[list[CpuQuota]]:
    """So many cgroups of so many cores each. They go at the end, when their processes have ended."""
    folders = [_parent() / f"batch-assets-{os.getpid()}-{number}" for number in range(count)]
    made: list[Path] = []
    try:
        for folder in folders:
            folder.mkdir()
            made.append(folder)
        yield [CpuQuota(folder, cores) for folder in made]
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _parent() -> Path:
    """Where cgroups with a CPU controller can be made."""
    for root in _ROOTS:
        controllers = root / "cgroup.controllers"
        v2 = controllers.exists() and "cpu" in (root / "cgroup.subtree_control").read_text().split()
        if (v2 or (root / "cpu.cfs_quota_us").exists()) and os.access(root, os.W_OK):
            return root
    raise SystemExit(
        "cgroups: expected one with a CPU controller in which this account can make others, found none; "
        "run it as root, or with --cores 0 for processes without a limit"
    )
