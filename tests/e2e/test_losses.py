"""What is lost when something dies: the engine's own log counts, not ours."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import signal
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
from support.timing import PATIENCE, SOAK

from e2e.harness import Platform, eventually, platform, shared_data

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WINDOW = 4 * 256
JOURNAL_SECONDS = 2.0
LATE_SECONDS = 2.0  # a busy engine still reads requests of a client that was killed; the next client starts later
ROWS = 7473 if SOAK else 4000  # of GSM8K; of slow engines, which take a minute for the rest


def gsm8k(rows: int | None = None) -> dict[str, object]:
    """Real questions: 7,473 of them, or the first `rows`."""
    source: dict[str, object] = {"path": str(shared_data() / "gsm8k" / "train.jsonl")}
    return {
        "name": "gsm8k",
        "source": source | ({"limit": rows} if rows else {}),
        "prompt": {"user": "{{ question }}"},
        "sampling": {"temperature": 0.7, "max_tokens": 512},
        "keep_columns": ["answer"],
    }


def leased_run(site: Platform) -> tuple[str, int] | None:
    """(run id, worker pid) of the run that holds the engine and has answers."""
    with contextlib.closing(site.fleet_db()) as fleet_db:
        beats = [beat for beat in fleet_db.runs() if beat.state == "leased" and beat.rows_done and beat.age < 5]
    return (beats[-1].run_id, beats[-1].pid) if beats else None


def answered(site: Platform) -> Counter[str]:
    """How often the engine wrote each prompt's answer to its end."""
    done = [
        e["prompt"] for e in site.simulator.events() if e["event"] == "finished" and e["outcome"] in ("stop", "length")
    ]
    return Counter(done)


def check_table(site: Platform, rows: int) -> list[dict[str, object]]:
    """Every source row exactly once, each with a completion."""
    table = site.published_rows()
    assert len(table) == rows
    assert len({line["row_id"] for line in table}) == rows
    assert not [line for line in table if line["error"] is not None]
    return table


def published(site: Platform, seconds: float) -> None:
    eventually(lambda: site.store.current_published(), seconds, "the published table")


@dataclass(frozen=True)
class AskedAgain:
    """Rows that were asked more than once, by the engine's log alone.

    `in_flight`: the engine had not answered them at the kill. `answer_ages`: of those that it had answered, how many
    seconds before the next kill; infinite where nothing was killed between the two requests.
    """

    in_flight: int
    answer_ages: list[float]


def asked_again(events: list[dict[str, Any]], killed_at: list[float]) -> AskedAgain:
    """All requests for a row but its first one, each beside the request before it. One run has the engine at a time."""
    received, ends = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for event in events:
        if event["event"] == "received":
            received[event["prompt"]].append(event["t"])
        elif event["outcome"] in ("stop", "length"):
            ends[event["prompt"]].append(event["t"])
    in_flight, ages = 0, []
    for prompt, times in received.items():
        for asked, next_asked in itertools.pairwise(times):
            kills = [at for at in killed_at if asked - LATE_SECONDS <= at <= next_asked]
            end = next((end for end in ends[prompt] if asked <= end <= next_asked), math.inf)
            if kills and kills[0] < end:
                in_flight += 1
            else:
                ages.append(min((at - end for at in kills if end <= at), default=math.inf))
    return AskedAgain(in_flight, ages)


def losses(site: Platform) -> int:
    """How often a run of batches lost its engine or its worker, because the machine gave it no time for so long."""
    runs = site.rows_runs()
    with contextlib.closing(site.fleet_db()) as fleet_db:
        leased_again = sum(max(0, len(fleet_db.history(run.run_id)) - 1) for run in runs)
    return leased_again + sum(run.status == dg.DagsterRunStatus.FAILURE for run in runs)


def starts(site: Platform, run_id: str) -> int:
    """How many workers the run has had."""
    return sum("Started process" in (entry.message or "") for entry in site.instance.all_logs(run_id))


@pytest.mark.soak("losses")
def test_killed_run_workers_cost_only_rows_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, kills = random.Random(7), 5 if SOAK else 3
    with platform(tmp_path, monkeypatch, gsm8k(ROWS), simulator=["--speed", "1.5"]) as site:
        site.launch_job("gsm8k_refresh")
        killed: dict[str, float] = {}
        while len(killed) < kills:
            run_id, pid = eventually(lambda: leased_run(site), 60, "a run that holds the engine")
            if run_id in killed:
                time.sleep(0.2)
                continue
            time.sleep(rng.uniform(0.5, 4.0))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed[run_id] = time.time()
        published(site, 180)
        check_table(site, ROWS)
        again = asked_again(site.simulator.events(), sorted(killed.values()))
        unkilled = again.answer_ages.count(math.inf)
        oldest = max((age for age in again.answer_ages if age < math.inf), default=0.0)
        print(f"\n{kills} kills: asked again {again.in_flight} in flight, {len(again.answer_ages)} answered")
        print(f"the oldest {oldest:.1f} s before the kill", flush=True)
        assert again.in_flight <= kills * WINDOW
        assert oldest < 2 * JOURNAL_SECONDS * (1 if SOAK else PATIENCE)
        assert unkilled <= max(0, losses(site) - kills) * WINDOW
        assert not list(site.store.objects.list("gsm8k/journal/"))


def test_a_killed_engine_charges_no_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with platform(tmp_path, monkeypatch, gsm8k(ROWS), simulator=["--speed", "4"]) as site:
        site.launch_job("gsm8k_refresh")
        for _ in range(2):
            before = sum(answered(site).values())
            eventually(lambda: sum(answered(site).values()) > before + 1000, 60, "a thousand more answers")  # noqa: B023 - called before `before` changes
            site.simulator.kill()
            time.sleep(4)  # no engine starts quicker: the run has time to see that nobody answers
            site.simulator.start()
        published(site, 180)
        assert {line["tries"] for line in check_table(site, ROWS)} == {1}


@pytest.mark.soak("losses")
def test_a_worker_that_died_with_its_code_server_is_found_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with platform(tmp_path, monkeypatch, gsm8k(ROWS), simulator=["--speed", "2"]) as site:
        site.launch_job("gsm8k_refresh")
        run_id, pid = eventually(lambda: leased_run(site), 60, "a run that holds the engine")
        time.sleep(3)
        server = psutil.Process(site.stack.pids()["code-server"])
        victims = [*server.children(recursive=True), server]
        assert pid in [process.pid for process in victims]
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        killed_at = time.monotonic()

        def failed() -> bool:
            run = site.instance.get_run_by_id(run_id)
            return run is not None and run.status == dg.DagsterRunStatus.FAILURE

        eventually(failed, 60, "the dead run to be failed")
        found_after = time.monotonic() - killed_at
        eventually(lambda: (run := leased_run(site)) and run[0] != run_id, 60, "another run to go on")
        continued_after = time.monotonic() - killed_at
        print(f"\nfound after {found_after:.0f} s, continued after {continued_after:.0f} s")
        assert continued_after < 60 * PATIENCE
        published(site, 180)
        check_table(site, ROWS)


def a_begun_run(site: Platform, late: set[str]) -> dg.DagsterRun:
    """Asks for the rows; the run whose worker begins, as it is then. `late`: runs before it."""
    before = (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.QUEUED)
    site.launch_job("gsm8k_refresh")

    def begun() -> dg.DagsterRun | None:
        runs = [run for run in site.rows_runs() if run.run_id not in late and run.status not in before]
        return next((run for run in runs if starts(site, run.run_id)), None)

    run: dg.DagsterRun = eventually(begun, 120, "a worker that has begun", every=0.02)
    return run


@pytest.mark.soak("losses")
def test_a_worker_that_died_with_its_code_server_before_it_began_is_found_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no heartbeat yet that could stop."""
    with platform(tmp_path, monkeypatch, gsm8k(1000), simulator=["--speed", "10"]) as site:
        site.simulator.kill()  # a run that is seen too late completes no row
        late: set[str] = set()
        while (run := a_begun_run(site, late)).status != dg.DagsterRunStatus.STARTING:
            late.add(run.run_id)
            assert len(late) < 5, "no run was seen while it was STARTING"
            site.terminate(run.run_id)
            assert site.finish(run.run_id) == dg.DagsterRunStatus.CANCELED
        run_id = run.run_id
        server = psutil.Process(site.stack.pids()["code-server"])
        for process in [*server.children(recursive=True), server]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        killed_at = time.monotonic()
        site.simulator.start()
        published(site, 120)
        print(f"\npublished {time.monotonic() - killed_at:.0f} s after the end of all workers")
        check_table(site, 1000)
        ended = site.instance.get_run_by_id(run_id)
        assert ended is not None
        if ended.status == dg.DagsterRunStatus.SUCCESS:
            # The daemon's call to the code server was still open: it puts the same run back into the queue.
            assert starts(site, run_id) == 2
        else:
            assert ended.status == dg.DagsterRunStatus.FAILURE
        assert site.worker(run_id) is None
