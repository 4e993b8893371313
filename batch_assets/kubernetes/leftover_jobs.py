"""Which Jobs of run workers nobody needs any more. Pure.

Dagster fails a run that did not start in time, or that exceeded its time, and leaves its Job: the pod waits for ever
for an image or for room, takes the room when it comes, or works on for a run that is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum


class WorkerPhase(Enum):
    """How far the pods of a Job have come, all together."""

    WAITING = "waiting"  # none has begun: no pod was admitted, or no room, no image
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RunWorker:
    """A Job of a run worker, or a pod whose Job is gone: then `job` is the name of the Job that it had.

    `end`: how its pods were seen to end, for people; "" where none was: a pod that is gone may have a living process.
    """

    job: str
    run_id: str
    phase: WorkerPhase
    pods: tuple[str, ...] = ()
    end: str = ""


@dataclass(frozen=True, slots=True)
class Leftover:
    """What is to be deleted, and why."""

    worker: RunWorker
    reason: str


def ended_unbegun(workers: Iterable[RunWorker], starting: Iterable[str]) -> Iterator[RunWorker]:
    """Workers that were seen to end before their run began: out of memory while they load, an image that is broken.

    `starting`: ids of runs that had not begun after the workers were looked at. Nobody writes for them any more, and
    Dagster would wait for them until their start takes too long.
    """
    waiting = set(starting)
    return (one for one in workers if one.phase is WorkerPhase.ENDED and one.end and one.run_id in waiting)


def leftovers(workers: Iterable[RunWorker], ended: Mapping[str, float], grace_seconds: float) -> Iterator[Leftover]:
    """Workers of ended runs that have not ended themselves.

    `ended`: seconds since the end of each run that has ended; a run that is not in it goes on, or is not ours. A
    worker that runs has `grace_seconds` to end by itself after its run. One that waits has nothing to end.
    """
    for worker in workers:
        seconds = ended.get(worker.run_id)
        if seconds is None or worker.phase is WorkerPhase.ENDED:
            continue
        if worker.phase is WorkerPhase.WAITING:
            yield Leftover(worker, "its run has ended before it began")
        elif seconds >= grace_seconds:
            yield Leftover(worker, f"its run ended {seconds:.0f} s ago")
