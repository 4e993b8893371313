"""The fence of a run: its row in the fleet's database, which its worker must find alive to go on."""

from __future__ import annotations

from batch_assets.kubernetes.worker_health import Fence, FenceState
from gpu_runner.fleet.database import FleetDatabase, FleetDatabaseError


class RunFences:
    """Looks at fences and moves them. `url`: SQLAlchemy URL of a fleet's database that workers share, or None."""

    def __init__(self, url: str | None) -> None:
        self._url = url
        self._database: FleetDatabase | None = None

    def look(self, run_id: str) -> Fence:
        """The run's fence. Never raises: a database that is away, or is not named, is an unknown fence."""
        try:
            database = self._open()
            beat = None if database is None else database.run_beat(run_id)
        except FleetDatabaseError:
            return Fence(FenceState.UNKNOWN)
        if database is None:
            return Fence(FenceState.UNKNOWN)
        if beat is None:
            return Fence(FenceState.NONE)
        age = max(0.0, beat.age)
        if beat.state != "ended":
            return Fence(FenceState.HELD, age)
        return Fence(FenceState.MOVED if beat.declared_dead else FenceState.NONE, age)

    def move(self, run_id: str) -> bool:
        """Declare the run's worker dead: it writes nothing in the run's name any more. False: not written."""
        try:
            database = self._open()
            if database is None:
                return False
            database.declare_dead(run_id)
        except FleetDatabaseError:
            return False
        return True

    def _open(self) -> FleetDatabase | None:
        if self._database is None and self._url is not None:
            self._database = FleetDatabase(self._url)
        return self._database
