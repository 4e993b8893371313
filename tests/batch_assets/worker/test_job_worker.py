"""Jobs of one worker: a store that is away, one that ends, parts that come in pieces; none of them costs another."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
from support.fake_engine import ORIGIN, FakeEngine, batches

from batch_assets.worker import job_worker
from batch_assets.worker.job_worker import JobWorker
from gpu_runner.rows import Batch, Outcome
from resources.fleet.leased_engine import KnownEngine
from resources.store.dataset_store import BatchEntry, BatchFooter


@dataclass
class Memory:
    """A job whose store is a dictionary. `away`: so many writes of each kind fail first."""

    name: str
    away: int = 0
    pieces: int = 25  # rows of a whole part
    over: bool = False
    unwritten: bool = True
    noted: list[str] = field(default_factory=list)
    parts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    calls: Counter[str] = field(default_factory=Counter)

    def note(self, part: str, outcome: Outcome) -> None:
        self.noted.append(outcome.row_id)

    def is_whole(self, part: str, outcomes: list[Outcome]) -> bool:
        return len(outcomes) == self.pieces

    def _write(self, what: str) -> None:
        self.calls[what] += 1
        if self.calls[what] <= self.away:
            raise OSError("the store is away")

    def commit(self, part: str, outcomes: list[Outcome]) -> BatchFooter:
        self._write("commit")
        self.parts[part] += [outcome.row_id for outcome in outcomes]
        entry = BatchEntry(part, len(outcomes), "version", 0, 0)
        return BatchFooter.of(
            "d", entry, outcomes, snapshot="s", generation=0, epoch=1, run_id=self.name, root_run_id=self.name
        )

    def write_journal(self) -> None:
        self._write("journal")

    def tidy(self) -> None:
        self.calls["tidy"] += 1


ENGINE = KnownEngine("http://e", None, 8, ORIGIN.provider, ORIGIN.instance_type)


def of(job: Memory, parts: list[Batch]) -> Iterator[Batch]:
    return (replace(part, job=job.name) for part in parts)


async def served(worker: JobWorker[Memory], *jobs: Memory) -> None:
    for job in jobs:
        worker.add(job)
    async with asyncio.timeout(60):
        await worker.serve(FakeEngine(seconds=0.001), ENGINE, model="m", version="1", run_id="r")


def test_a_part_is_committed_again_until_the_store_answers_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps() -> None:
        job, told = Memory("run", away=2), list[tuple[str, str]]()
        with ThreadPoolExecutor(4) as pool:
            parts = of(job, batches(50))
            worker = JobWorker(parts, pool, committed=lambda one, footer: told.append((one.name, footer.key)))
            await served(worker, job)
        assert sorted(told) == [("run", "b0"), ("run", "b1")]
        assert (
            sorted(one for part in job.parts.values() for one in part)
            == sorted(job.noted)
            == sorted(f"r{n}" for n in range(50))
        )
        assert job.calls["commit"] == 4

    monkeypatch.setattr(job_worker, "RETRY_SECONDS", 0.01)
    asyncio.run(steps())


def test_a_job_that_is_over_commits_nothing_and_the_others_go_on() -> None:
    async def steps() -> None:
        ended, other = Memory("ended"), Memory("other")
        with ThreadPoolExecutor(4) as pool:
            parts = iter([*of(ended, batches(50)), *of(other, batches(50, start=50))])
            worker = JobWorker(parts, pool, committed=lambda one, footer: None)
            worker.add(ended)
            ended.over = True
            await served(worker, other)
        assert not ended.parts and not ended.noted
        assert sorted(other.noted) == sorted(f"r{n}" for n in range(50, 100)) and len(other.parts) == 2

    asyncio.run(steps())


def test_a_part_of_which_rows_were_left_out_is_read_again_and_not_committed() -> None:
    async def steps() -> None:
        job, again = Memory("run"), list[tuple[str, str]]()
        with ThreadPoolExecutor(4) as pool:
            (whole,) = batches(25)
            piece = replace(whole, rows=whole.rows[:10])
            worker = JobWorker(
                of(job, [piece]),
                pool,
                committed=lambda one, footer: None,
                left_out=lambda one, part: again.append((one.name, part)),
            )
            await served(worker, job)
        assert again == [("run", "b0")] and not job.parts and len(job.noted) == 10

    asyncio.run(steps())


def test_a_journal_that_cannot_be_written_keeps_no_other_from_it() -> None:
    async def steps() -> None:
        away, well = Memory("away", away=1), Memory("well")
        with ThreadPoolExecutor(4) as pool:
            worker = JobWorker(iter([]), pool, committed=lambda one, footer: None)
            worker.add(away)
            worker.add(well)
            assert not await worker.flush()
            assert (away.calls["tidy"], well.calls["tidy"]) == (0, 1)
            assert await worker.flush()
            well.unwritten = False
            assert await worker.flush()
            assert well.calls["journal"] == 2

    asyncio.run(steps())
