"""The register's records, as they are stored."""

from __future__ import annotations

import itertools
import os
import sqlite3
from pathlib import Path

import pytest

from gpu_runner.providers.base import EndReason
from gpu_runner.providers.machine_host.manager import describe
from gpu_runner.providers.machine_host.registry import MachineRecord, MachineRegistry, hold


def record(name: str) -> MachineRecord:
    return MachineRecord(f"id-{name}", "sim-a", name, "", "one", "L4", 1, False, 1.0, 1.0, 8, "", created_at=10.0)


@pytest.mark.parametrize("reason", EndReason)
def test_every_reason_of_an_end_is_kept_as_its_text(tmp_path: Path, reason: EndReason):
    register = MachineRegistry(tmp_path)
    with register.transaction() as connection:
        register.add(connection, record("ba-1"))
    alive = register.find("sim-a", "ba-1")
    assert alive is not None and alive.reason is None
    assert register.end(alive.id, reason, at=20.0)
    ended = register.find("sim-a", "ba-1")
    assert ended is not None and ended.reason is reason
    assert describe(ended, 25.0).describe_end() == reason.value
    with sqlite3.connect(register.path) as connection:
        assert connection.execute("SELECT reason FROM machines").fetchall() == [(reason.value,)]


def test_records_that_an_older_version_wrote_are_read(tmp_path: Path):
    register = MachineRegistry(tmp_path)
    with register.transaction() as connection:
        for number, old in enumerate(("", "terminated", "interrupted", "orphaned", "boot failed")):
            register.add(connection, record(f"ba-{number}"))
            connection.execute("UPDATE machines SET reason = ? WHERE name = ?", (old, f"ba-{number}"))
    assert [found.reason for found in register.machines()] == [
        None,
        EndReason.TERMINATED,
        EndReason.INTERRUPTED,
        EndReason.ORPHANED,
        EndReason.BOOT_FAILED,
    ]


@pytest.mark.parametrize("gives_up", [True, False])
def test_processes_of_ended_machines_are_waited_for_and_those_that_stay_are_named(tmp_path: Path, gives_up: bool):
    register = MachineRegistry(tmp_path)
    held = {}
    for name in ("ba-ending", "ba-running"):
        with register.transaction() as connection:
            register.add(connection, record(name))
        held[name] = hold(register.lock_path(f"id-{name}"))
    register.end("id-ba-ending", EndReason.TERMINATED)
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if gives_up and len(pauses) == 3:
            os.close(held.pop("ba-ending"))

    assert register.wait_gone(pause, lambda: 0.0) == ([] if gives_up else ["ba-ending"])
    assert len(pauses) == 3 if gives_up else 20 < sum(pauses) < 21
    for descriptor in held.values():
        os.close(descriptor)


def test_looks_that_take_long_are_part_of_the_wait_for_processes(tmp_path: Path):
    register, pauses = MachineRegistry(tmp_path), []
    with register.transaction() as connection:
        register.add(connection, record("ba-ending"))
    descriptor = hold(register.lock_path("id-ba-ending"))
    register.end("id-ba-ending", EndReason.TERMINATED)
    each_look_takes = itertools.count(step=4.0)
    assert register.wait_gone(pauses.append, lambda: next(each_look_takes)) == ["ba-ending"]
    assert len(pauses) == 5
    os.close(descriptor)
