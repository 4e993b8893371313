"""When a platform has recovered from a fault, by the objects in the store and the cloud's own records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from e2e.witness import ObjectWatch
from gpu_runner.fleet_database.database import RunBeat
from gpu_runner.providers.machine_host.registry import MachineRecord, MachineRegistry
from gpu_runner.providers.simulated.cloud import Call, SimulatedCloud
from resources.store.dataset_store import DatasetStore


@dataclass(eq=False)
class Recovery:
    """Makes the questions that are asked again and again until the answer is yes.

    `sweeps`: when sweeps ran that are not the platform's own.
    """

    store: DatasetStore
    cloud: SimulatedCloud
    objects: ObjectWatch
    register: MachineRegistry
    sweeps: list[tuple[float, float]] = field(default_factory=list)

    def continued(self, beats: Iterable[RunBeat], *, by_others: bool = False) -> Callable[[], bool]:
        """Each range goes on: a batch of it was written since, or it is complete."""
        since, left = time.time(), list(beats)

        def recovered() -> bool:
            for beat in list(left):
                not_by = beat.run_id if by_others else None
                done = self.objects.written(beat.first_key, beat.last_key, since, not_by=not_by)
                if done or self._complete(beat.first_key, beat.last_key):
                    left.remove(beat)
            return not left

        return recovered

    def _complete(self, first: str, last: str) -> bool:
        snapshot = self.store.current_snapshot()
        assert snapshot is not None
        entries = [entry for entry in self.store.entries(snapshot) if first <= entry.key <= last]
        return len(self.store.current_objects(entries)) == len(entries)

    def over(self, record: MachineRecord, beats: list[RunBeat]) -> Callable[[], bool]:
        """The machine is billed no more, and the ranges of who used it go on."""
        continued = self.continued(beats)

        def recovered() -> bool:
            now = self.register.get(record.id)
            return now is not None and now.ended_at is not None and continued()

        return recovered

    def swept(self, since: float) -> bool:
        """The platform's own reaper has listed machines since, by the cloud's log of calls."""
        own = [
            call.at
            for call in self.cloud.calls("list")
            if call.name.endswith("-") and not any(began <= call.at <= ended for began, ended in self.sweeps)
        ]
        return bool(own) and own[-1] > since

    def answered(self, lie: Call) -> Callable[[], bool]:
        """The machine that the call was about is ready or billed no more; without one, the call was answered since."""
        machine = next((one for one in self.register.machines() if one.name == lie.name), None)

        def recovered() -> bool:
            if machine is None or lie.call not in ("create", "terminate"):
                return any(one.at > lie.at and one.result == "ok" for one in self.cloud.calls(lie.call))
            now = self.register.get(machine.id)
            ready = now is not None and now.ready_at is not None and lie.call == "create"
            return now is not None and (now.ended_at is not None or ready)

        return recovered
