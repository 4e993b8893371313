"""A node that is cut off is told from an API server that is away. Pure."""

from __future__ import annotations

from gpu_runner.providers.kubernetes.tunnel_health import (
    AWAY_SECONDS,
    BACK_SECONDS,
    PROBE_GAP_SECONDS,
    PROBE_SECONDS,
    QUIET_SECONDS,
    SILENT_PROBES,
    Probe,
    TunnelHealth,
)
from gpu_runner.reachability import Reachability


class Steady:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_node_that_never_answers_is_lost_after_some_looks():
    health = TunnelHealth(Steady())
    for _ in range(SILENT_PROBES):
        assert health.reachability is Reachability.OPEN
        health.probed(Probe.SILENT)
    assert health.reachability is Reachability.LOST
    health.probed(Probe.ANSWERED)
    assert health.reachability is Reachability.OPEN, "it has come back"


def test_the_bound_of_the_docstring_holds():
    assert QUIET_SECONDS + SILENT_PROBES * PROBE_SECONDS + (SILENT_PROBES - 1) * PROBE_GAP_SECONDS <= 14.0


def test_one_answer_or_one_byte_begins_the_count_anew():
    for end in (lambda one: one.probed(Probe.ANSWERED), TunnelHealth.heard):
        health = TunnelHealth(Steady())
        for _ in range(SILENT_PROBES - 1):
            health.probed(Probe.SILENT)
        end(health)
        health.probed(Probe.SILENT)
        assert health.reachability is Reachability.OPEN


def test_an_api_server_that_is_away_takes_nobodys_engine_for_a_while():
    clock = Steady()
    health = TunnelHealth(clock)
    health.probed(Probe.AWAY)
    clock.now += AWAY_SECONDS - 1
    health.probed(Probe.AWAY)
    assert health.reachability is Reachability.RESTORING
    clock.now += 1
    assert health.reachability is Reachability.LOST
    health.heard()
    assert health.reachability is Reachability.OPEN


def test_once_the_api_server_is_back_the_tunnel_has_some_time_to_stand_again():
    clock = Steady()
    health = TunnelHealth(clock)
    health.probed(Probe.AWAY)
    clock.now += AWAY_SECONDS - 1
    for found in (Probe.ANSWERED, Probe.SILENT, Probe.SILENT, Probe.SILENT):  # nobody has a right yet, no node is known
        health.probed(found)
        clock.now += 2
        assert health.reachability is Reachability.RESTORING
    clock.now += BACK_SECONDS
    health.probed(Probe.ANSWERED)
    assert health.reachability is Reachability.OPEN, "what fails now is the engine's"


def test_looks_are_rare_while_they_are_answered():
    health = TunnelHealth(Steady())
    health.probed(Probe.ANSWERED)
    calm = health.next_probe_seconds
    for found in (Probe.SILENT, Probe.AWAY):
        health.probed(found)
        assert health.next_probe_seconds < calm
