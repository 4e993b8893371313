"""What is known of one engine's life: when it answered and generated, whether it fails, and when it wants to rest.

The watchdog (engine_monitor.py), the engine worker and the failed requests (failed_requests.py) write it and go by it.
Times are seconds of the loop.
"""

from __future__ import annotations

import asyncio

from gpu_runner.inference.failures.retry import LivenessEvidence


class EngineLiveness:
    """`claims`: what answers say; `proof`: of those, what is known to be of the engine that there was before.

    `outage_at`: when a canary failed last. `canary_useless`: the server refuses canaries, whatever it does with rows.
    `resting_until`: when the server wants to be asked again. `trouble_since`: since when nothing was generated.
    """

    def __init__(self, now: float) -> None:
        self.proof = LivenessEvidence()
        self.claims = LivenessEvidence()
        self.outage_at = float("-inf")
        self.canary_useless = False
        self.resting_until = 0.0
        self.progress_at = now
        self.trouble_since: float | None = None
        self.uneasy = asyncio.Event()

    def answered(self, now: float) -> None:
        """The server answered a row, one way or the other."""
        self.progress_at = now

    def succeeded(self, sent: float, now: float) -> None:
        """The engine generated something."""
        self.trouble_since = None
        self.claims.success(sent, now)

    def rest_until(self, until: float) -> bool:
        """The server wants no request before `until`; False where it is to rest as long anyway."""
        if until <= self.resting_until:
            return False
        self.resting_until = until
        return True

    def suspect(self) -> None:
        """A connection was refused or broken: it is to be looked at soon instead of at the next poll."""
        self.uneasy.set()
