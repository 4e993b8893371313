"""Tells a node that is cut off from an API server that is away, for engines behind a port-forward. Pure.

A port-forward leads through the API server and the node's kubelet. When the node has no network any more, nothing of
it ends: bytes go in and none comes back. So a tunnel that was silent for QUIET_SECONDS with a request under way, or
that does not stand, is looked at: first the API server is asked for the pod, then the kubelet, through the API server,
for another stream to it. A kubelet that answers, whatever it says, has power and network: what fails is the engine's.
One that did not answer SILENT_PROBES times in a row, while the API server did each time and no byte came from the
engine, is gone with its node. Nothing follows from an API server that does not answer: it may come back, and the
engine with it, for AWAY_SECONDS. Once it is back, the tunnel has BACK_SECONDS to stand again.

A node that is cut off is told within QUIET_SECONDS + SILENT_PROBES of PROBE_SECONDS and the gaps between them: 14 s.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from gpu_runner.reachability import Reachability

QUIET_SECONDS = 4.0  # a feed asks for figures every second; an engine that is slow with them costs a probe, no more
PROBE_SECONDS = 3.0  # a kubelet answers within milliseconds; on a machine with a load of 25 it was seen to need 1 s
PROBE_GAP_SECONDS = 0.5
CALM_GAP_SECONDS = 5.0  # between probes of a kubelet that answers, while its engine does not
SILENT_PROBES = 3
AWAY_SECONDS = 90.0
BACK_SECONDS = 20.0  # kubectl tries again every 5 s; an API server that starts refuses everybody for some seconds (403)


class Probe(enum.Enum):
    """What one look came to."""

    ANSWERED = "the kubelet answered, or the pod is gone"
    SILENT = "the API server answered, the kubelet did not"
    AWAY = "the API server did not answer"


class TunnelHealth:
    """What is known of the way to an engine. `clock`: seconds that only grow."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._silent_probes = 0
        self._away_since: float | None = None
        self._back_at: float | None = None

    def heard(self) -> None:
        """A byte came from the engine."""
        self._silent_probes, self._away_since, self._back_at = 0, None, None

    def probed(self, found: Probe) -> None:
        """The way was looked at."""
        if found is Probe.AWAY:
            self._silent_probes, self._back_at = 0, None
            self._away_since = self._clock() if self._away_since is None else self._away_since
            return
        if self._away_since is not None:
            self._back_at = self._clock() if self._back_at is None else self._back_at
            if self._clock() - self._back_at < BACK_SECONDS:
                return
        self._away_since = self._back_at = None
        self._silent_probes = self._silent_probes + 1 if found is Probe.SILENT else 0

    @property
    def next_probe_seconds(self) -> float:
        """How long to wait before the next look."""
        return PROBE_GAP_SECONDS if self._silent_probes or self._away_since is not None else CALM_GAP_SECONDS

    @property
    def reachability(self) -> Reachability:
        """OPEN unless something is known against it."""
        if self._silent_probes >= SILENT_PROBES:
            return Reachability.LOST
        if self._away_since is None:
            return Reachability.OPEN
        lost = self._back_at is None and self._clock() - self._away_since >= AWAY_SECONDS
        return Reachability.LOST if lost else Reachability.RESTORING
