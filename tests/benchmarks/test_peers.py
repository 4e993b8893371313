"""What the comparison with other systems counts, and that a kill takes all of a system's processes."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import psutil

from benchmarks.peers.report import table
from benchmarks.peers.run_script import kept
from benchmarks.peers.systems import BATCH_OUTPUT, Answers, System, Task, select
from benchmarks.peers.trial import Attempt, Trial, counted
from benchmarks.peers.works import Row, vllm_counts

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:request_success_total{engine="0",finished_reason="stop"} 10.0
vllm:request_success_total{engine="0",finished_reason="length"} 5.0
vllm:request_success_created{engine="0",finished_reason="length"} 1.7e+09
"""


def task(folder: Path) -> Task:
    return Task(rows="", lines="", url="", model="tiny", max_tokens=8, in_flight=1, folder=str(folder))


def test_requests_of_vllm_are_those_that_ended_run_or_wait() -> None:
    assert vllm_counts(METRICS) == (20, 15)


def test_rows_that_are_not_there_and_rows_that_are_there_twice_are_counted(tmp_path: Path) -> None:
    def answers(task: Task) -> Answers:
        return [("r0", "a"), ("r1", "b"), ("r1", "c"), ("r2", None)]

    system = System("one", "one", "json", lambda python, task: [], answers)
    rows = [Row(f"r{n}", "say") for n in range(4)]
    found = counted(Trial("one", "short", 4, kill=False), rows, system, task(tmp_path))
    assert (found.in_output, found.lost, found.doubled) == (3, 2, 1)


def test_a_system_that_ends_well_without_an_output_has_failed(tmp_path: Path) -> None:
    system = System("one", "one", "json", lambda python, task: [], select(BATCH_OUTPUT))
    found = counted(Trial("one", "short", 1, kill=False), [Row("r0", "say")], system, task(tmp_path))
    assert found.error is not None and "without an output" in found.error
    assert "failed: " in table([found])


def test_the_output_of_a_batch_is_read_line_by_line(tmp_path: Path) -> None:
    good = {"custom_id": "r0", "response": {"body": {"choices": [{"message": {"content": 'say "x", \\ and\n'}}]}}}
    bad = {"custom_id": "r1", "response": None, "error": {"code": "x"}}
    (tmp_path / "output.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    assert select(BATCH_OUTPUT)(task(tmp_path)) == [("r0", 'say "x", \\ and\n'), ("r1", None)]


def test_the_script_that_resumes_drops_a_half_line(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"id": "r0", "output": "a"}\n{"id": "r1", "out')
    assert kept(file) == {"r0"}
    assert file.read_text() == '{"id": "r0", "output": "a"}\n'


def test_a_kill_takes_processes_of_other_sessions_too(tmp_path: Path) -> None:
    command = ["sh", "-c", "setsid sleep 60 & echo $!; sleep 60"]
    attempt = Attempt(command, {"PATH": "/usr/bin:/bin"}, tmp_path / "log")
    while not (said := (tmp_path / "log").read_text().strip()):
        time.sleep(0.01)
    attempt.kill()
    assert attempt.process.returncode == -9
    with contextlib.suppress(psutil.NoSuchProcess):  # it ends in its own time, and nobody may ask how
        other = psutil.Process(int(said))
        while other.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
