"""Tells a host that is gone from a connection that broke. Pure: the clock is an argument.

A keep-alive that was not answered says that the host is silent, or that this process did not come to read: on a loaded
machine both look alike. So a connection that broke counts as being made anew, until the host itself was asked and did
not answer: SILENT_PROBES times in a row its kernel did not accept a connection. A host that accepts or refuses one has
power and network; it gets RESTORE_SECONDS to let us in again.

A host without power is told within 8 s (keep-alive) + 2 probes of PROBE_SECONDS: 11 s. Probes that fail at once, as
with "no route to host" while a router starts again, begin PROBE_GAP_SECONDS after each other.
"""

from __future__ import annotations

from collections.abc import Callable

from gpu_runner.reachability import Reachability

SILENT_PROBES = 2
PROBE_SECONDS = 1.5  # a listening host's kernel accepts within milliseconds; the second SYN goes out after 1 s
PROBE_GAP_SECONDS = 1.0
RESTORE_SECONDS = 10.0


class HostSilence:
    """What is known of a host since its connection broke. `clock`: seconds that only grow."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._broken_at: float | None = None
        self._silent_probes = 0

    def connected(self) -> None:
        """There is a connection."""
        self._broken_at, self._silent_probes = None, 0

    def broken(self) -> None:
        """Tell that the connection is lost."""
        if self._broken_at is None:
            self._broken_at = self._clock()

    def probed(self, *, answered: bool) -> None:
        """The host was asked for a new connection; whether its kernel said anything."""
        self._silent_probes = 0 if answered else self._silent_probes + 1

    @property
    def reachability(self) -> Reachability:
        """OPEN while the connection stands."""
        if self._broken_at is None:
            return Reachability.OPEN
        given_up = self._clock() - self._broken_at >= RESTORE_SECONDS
        if given_up or self._silent_probes >= SILENT_PROBES:
            return Reachability.LOST
        return Reachability.RESTORING
