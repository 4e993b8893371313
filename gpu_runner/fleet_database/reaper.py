"""The reaper: makes what is rented agree with the fleet's database. Sweeps may overlap, and be killed anywhere.

Each decision is one transaction of the fleet's database, taken before the provider is called; the next sweep finds what
a killed one left. A provider that does not answer is unknown for this sweep: nothing is concluded from its silence
(fault P5), but what is to end is told so again. Only machines of our own tag are touched (fault P11).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpu_runner.fleet_database.database import FleetDatabase, Instance
from gpu_runner.offers.offer import offer_name
from gpu_runner.offers.selection import FailureKind
from gpu_runner.providers.base import EndReason, Machine, Provider, ProviderError, ProviderUnclear

MISSING_SECONDS = 15.0


def sweep(
    fleet_db: FleetDatabase,
    providers: Sequence[Provider],
    *,
    tag: str,
    idle_seconds: float,
    alive: Callable[[], None] = lambda: None,
    missing_seconds: float = MISSING_SECONDS,
) -> list[str]:
    """One round; returns what was done, in sentences.

    Ends expired leases, then instances that nobody holds: never ready, retired, with a notice, or idle for
    `idle_seconds`. Then compares each provider's list with the fleet's database. `missing_seconds`: for how long a
    machine that nobody holds may be absent from the list before it counts as gone, more than the list may lag behind.
    `alive` is called whenever the fleet's database has answered: machines that hear of no sweep for long end
    themselves.
    """
    said = fleet_db.end_overdue(idle_seconds)
    alive()
    for provider in providers:
        said += _Round(fleet_db, provider, tag, missing_seconds).run()
        alive()
    known = {provider.name for provider in providers}
    for row in fleet_db.fleet():
        if row.provider not in known:
            said.append(f"{row.name} may still be billed: no provider {row.provider} is configured")
    return said


class _Round:
    """One provider's part of a sweep."""

    def __init__(self, fleet_db: FleetDatabase, provider: Provider, tag: str, missing_seconds: float) -> None:
        self.fleet_db, self.provider, self.tag, self.missing_seconds = fleet_db, provider, tag, missing_seconds
        self.said: list[str] = []

    def run(self) -> list[str]:
        """Compare and settle; returns what was done."""
        machines: dict[str, Machine] | None = None
        try:
            listed = self.provider.list(self.tag)
            machines = {machine.name: machine for machine in listed if machine.name.startswith(self.tag)}
        except (ProviderError, ProviderUnclear) as error:
            self.said.append(f"{self.provider.name} does not list its machines: {error}")
        # The fleet's database is read after the list: whatever is listed was written down before it was ordered.
        # Of those that have ended only what is listed still: the fleet's database keeps the bills of years.
        known = {row.name: row for row in self.fleet_db.fleet_of(self.provider.name, (machines or {}).keys())}
        rows = {name: row for name, row in known.items() if row.state != "ended"}
        for name, machine in (machines or {}).items():
            row = known.get(name)
            if machine.leftover:
                self.said.append(machine.leftover)
            if machine.state == "ended":
                self._ended(row, machine)
            else:
                self._alive(row, machine)
        for name, row in rows.items():
            if machines is None:
                if row.state == "ending":
                    self._terminate(name)
            elif name not in machines:
                self._absent(row)
        return self.said

    def _ended(self, row: Instance | None, machine: Machine) -> None:
        if row is not None and (row.state != "ended" or row.end_unproven):
            # Another process of ours may have ended it: a cluster does not say who deleted a pod.
            ours = machine.reason is EndReason.TERMINATED
            ours |= row.state == "ending" and machine.reason is EndReason.DELETED
            why = row.reason if ours and row.reason else _once_each(row.reason, machine.describe_end())
            self.fleet_db.ended(row.name, machine.ended_seconds or 0.0, why, machine.billed_seconds)
            self.said.append(f"{row.name} has ended: {why}")

    def _alive(self, row: Instance | None, machine: Machine) -> None:
        if row is None:
            self.said.append(f"{machine.name} is not in the fleet's database")
            self._terminate(machine.name)
            return
        if not row.seen or row.missing_seconds is not None or row.state == "ended":
            self.fleet_db.seen(row.name, machine.billed_seconds)
        if row.state in ("ending", "ended"):
            self._terminate(row.name)
        elif machine.notice_seconds is not None and row.notice_seconds is None:
            self.fleet_db.notice(row.name, machine.notice_seconds, machine.detail)
            why = f": {machine.detail}" if machine.detail else ""
            self.said.append(f"{row.name} is taken away in {machine.notice_seconds:.0f} s{why}")
        elif machine.at_risk and row.state == "ready" and not row.retiring:
            self._leave(row)

    def _leave(self, row: Instance) -> None:
        """Its holder moves on while there is time, and others of its kind look dearer for a while."""
        if self.fleet_db.retire(row.name, f"{row.provider} recommends to leave it"):
            name = offer_name(row.provider, row.region, row.instance_type, row.gpus, row.gpu, row.spot)
            self.fleet_db.offer_failed(row.provider, name, FailureKind.LOST, "its provider recommends to leave it")
            self.said.append(f"{row.name} is to end: {row.provider} recommends to leave it")

    def _absent(self, row: Instance) -> None:
        missing = self.fleet_db.missing(row.name)
        gone = missing > self.missing_seconds and self.fleet_db.begin_ending(row.name, "vanished")
        if (gone or row.state == "ending") and self._terminate(row.name) and gone:
            self.fleet_db.ended(row.name, None, "vanished")
            self.said.append(f"{row.name} is gone: not listed for {missing:.0f} s")

    def _terminate(self, name: str) -> bool:
        """Tell the provider to end it; the next list shows whether it did. False: no answer."""
        try:
            self.provider.terminate(name)
        except (ProviderError, ProviderUnclear) as error:
            self.said.append(f"{name} is to end, but {self.provider.name} did not end it: {error}")
            return False
        self.said.append(f"{name}: told {self.provider.name} to end it")
        return True


def _once_each(reason: str, end: str) -> str:
    """Both texts for people; the first may have been told the second already, with a notice."""
    return reason if end in reason else "; ".join(part for part in (reason, end) if part)
