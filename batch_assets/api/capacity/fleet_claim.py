"""The fleet as one service's: those with other records would overwrite what is planned for a model (`api/MODEL`).

All replicas of a service share its records, and so the claim. It ends with the last of them, SILENT_SECONDS after a
kill.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from batch_assets.api.database.service_database import Records
from batch_assets.local_dagster.local_fleet import fleet_of
from batch_assets.settings import fleet_database
from gpu_runner.boot_clock import boot_seconds
from gpu_runner.errors import ExitStatus, UserFacingError
from gpu_runner.fleet_database.database import FleetDatabaseError
from gpu_runner.fleet_database.services import ServiceBeat
from gpu_runner.repeated_task import RepeatedTask
from resources.fleet.resource import GpuFleet

log = logging.getLogger(__name__)

BEAT_SECONDS = 3.0
SILENT_SECONDS = 20.0


class FleetTaken(UserFacingError):
    """Another service, with records of its own, leases engines of this fleet."""

    exit_status = ExitStatus.WRONG_REQUEST

    def __init__(self, own: str, other: ServiceBeat) -> None:
        super().__init__(
            f"fleet: expected the only service that leases its engines, found another one with records of its own "
            f"({other.note}; host {other.host}, process {other.pid}; this one: {own}). Both would overwrite what the "
            "other plans. Give this one the same records (BATCH_ASSETS_API_DB), a fleet of its own "
            "(BATCH_ASSETS_FLEET_DB), or engines (--endpoint); or end the other: when it was killed, its claim ends "
            f"{SILENT_SECONDS:.0f} s after its last sign of life"
        )


def fleet_claim(home: Path, records_url: str) -> FleetClaim:
    """The claim of a service with these records, on the fleet of this environment."""
    with contextlib.closing(Records(records_url)) as records:
        return FleetClaim(fleet_of(home, fleet_database()), records.identity, records.address)


class FleetClaim:
    """Context manager: holds the fleet for the records `identity`, whose address without secrets is `address`.

    Entering raises FleetTaken. While the fleet's database is away it is claimed as soon as it is back.
    """

    def __init__(
        self, fleet: GpuFleet, identity: str, address: str, *, steady: Callable[[], float] = boot_seconds
    ) -> None:
        self._fleet, self._identity, self._address, self._steady = fleet, identity, address, steady
        self._name = secrets.token_hex(8)
        self._rival: ServiceBeat | None = None
        self._beat_at = float("-inf")
        self._guard = threading.Lock()
        self._task = RepeatedTask("api-fleet-claim", self._beat_again, BEAT_SECONDS)

    def __enter__(self) -> Self:
        with contextlib.suppress(FleetDatabaseError):  # as `_beat_again` will say
            self.check()
        self._task.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._task.end()
        try:
            with self._fleet.open_database() as fleet_db:
                fleet_db.end_service(self._name)
        except FleetDatabaseError as away:
            log.warning("fleet: the claim ends in %.0f s: %s", SILENT_SECONDS, type(away).__name__)

    def check(self) -> None:
        """Raises FleetTaken where another service has it, and what the fleet's database raises."""
        if self._steady() - self._beat_at > SILENT_SECONDS:
            self._beat()
        if (rival := self._rival) is not None:
            raise FleetTaken(self._address, rival)

    def _beat(self) -> None:
        with self._guard, self._fleet.open_database() as fleet_db:
            asked_at = self._steady()
            rival = fleet_db.beat_service(self._name, self._identity, self._address, SILENT_SECONDS)
            if rival is not None and self._rival is None and self._beat_at > float("-inf"):
                log.error("%s", FleetTaken(self._address, rival))
            self._rival, self._beat_at = rival, asked_at

    def _beat_again(self) -> None:
        try:
            self._beat()
        except FleetDatabaseError as error:
            log.warning("fleet: the service's claim is not renewed now: %s", type(error).__name__)
