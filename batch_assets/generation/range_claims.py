"""What keeps two runs of one range from asking for the same rows: claims on batches, in the fleet's database."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gpu_runner.fleet_database.database import Claim, FleetDatabase, FleetDatabaseError

log = logging.getLogger(__name__)


class RunClaims:
    """One run's claims in the fleet's database. `silent`: seconds without a heartbeat after which a run is dead."""

    def __init__(self, fleet_db: FleetDatabase, run_id: str, dataset: str, silent: float) -> None:
        self._book, self._run_id, self._dataset, self._silent = fleet_db, run_id, dataset, silent

    def take(self, objects: Sequence[str]) -> Claim:
        """Claim one of these; none while the fleet's database does not answer."""
        try:
            return self._book.claim(self._run_id, self._dataset, objects, self._silent)
        except FleetDatabaseError as error:
            log.warning("run %s: no batch claimed: %s", self._run_id, type(error).__name__)
            return Claim()

    def release(self, objects: Sequence[str]) -> bool:
        """Give claims up. False while the fleet's database does not answer."""
        try:
            self._book.release_claims(self._run_id, self._dataset, objects)
        except FleetDatabaseError:
            return False
        return True
