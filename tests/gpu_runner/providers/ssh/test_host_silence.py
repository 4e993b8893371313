"""A broken connection, a silent host and a host that refuses are told apart; time is an argument."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from typing import Any

import pytest

from gpu_runner.providers.ssh import login
from gpu_runner.providers.ssh.host_silence import (
    PROBE_GAP_SECONDS,
    PROBE_SECONDS,
    RESTORE_SECONDS,
    SILENT_PROBES,
    HostSilence,
)
from gpu_runner.providers.ssh.login import KEEPALIVE_SECONDS, KEEPALIVES, ConnectProblem, HostAddress, NotConnected
from gpu_runner.reachability import Reachability

OPEN, RESTORING, LOST = Reachability.OPEN, Reachability.RESTORING, Reachability.LOST


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_connection_that_broke_and_came_back_says_nothing_about_the_host():
    clock = Clock()
    host = HostSilence(clock)
    assert host.reachability is OPEN
    host.broken()
    clock.now += RESTORE_SECONDS - 0.1
    assert host.reachability is RESTORING
    host.connected()
    clock.now += 60
    assert host.reachability is OPEN


def test_a_host_whose_kernel_is_silent_is_lost_by_the_second_probe():
    host = HostSilence(Clock())
    host.broken()
    host.probed(answered=False)
    assert host.reachability is RESTORING
    host.probed(answered=False)
    assert host.reachability is LOST
    host.connected()
    assert host.reachability is OPEN


def test_a_probe_that_was_answered_starts_the_count_anew():
    host = HostSilence(Clock())
    host.broken()
    for answered in (False, True, False):
        host.probed(answered=answered)
    assert host.reachability is RESTORING


def test_a_host_that_answers_and_lets_nobody_in_has_some_seconds():
    clock = Clock()
    host = HostSilence(clock)
    host.broken()
    for _ in range(5):
        host.probed(answered=True)
        host.broken()  # noticed again by another tunnel: the first moment counts
        clock.now += RESTORE_SECONDS / 5
    assert host.reachability is LOST


def test_a_dead_host_is_told_within_fifteen_seconds():
    """Keep-alives that go unanswered, the probes, and the run's own look once a second, for up to two seconds."""
    keep_alive = KEEPALIVE_SECONDS * (KEEPALIVES + 1)
    probes = SILENT_PROBES * max(PROBE_SECONDS, PROBE_GAP_SECONDS)
    assert keep_alive + probes + 2 + 1 < 15


def test_probes_that_fail_at_once_are_spaced(monkeypatch: pytest.MonkeyPatch):
    """ "No route to host" comes within a millisecond: two of them in a row are one moment, not two."""
    happened: list[object] = []

    async def no_route(_: Sequence[Any]) -> Any:
        happened.append("probe")
        raise OSError(errno.EHOSTUNREACH, "no route to host")

    async def pause(seconds: float) -> None:
        assert host.reachability is RESTORING
        happened.append(seconds)

    monkeypatch.setattr(login, "_first_of", no_route)
    host = HostSilence(Clock())
    host.broken()
    address = HostAddress("h", "127.0.0.1", 22, "root", (), None, None, None)
    with pytest.raises(NotConnected) as caught:
        asyncio.run(login._reach(address, host, pause))
    assert caught.value.problem is ConnectProblem.SILENT
    assert happened == ["probe", pytest.approx(PROBE_GAP_SECONDS, abs=0.5), "probe"]
    assert host.reachability is LOST
