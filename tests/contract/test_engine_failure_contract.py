"""How an engine fails, asked of both: what the feed's watchdogs rely on.

The simulator fails by script, vLLM by signals to its processes. The tests share one engine and end with its death.
"""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import psutil
import pytest
from support.contract_engines import CONTEXT, Answer, Served
from support.timing import PATIENCE


def faults(engine: Served, *rules: dict[str, object]) -> None:
    assert engine.call("/simulator/faults", list(rules)).status == 200


def send(engine: Served, name: str, number: signal.Signals) -> None:
    """Send a signal to the processes of vLLM that carry a name."""
    found = [process for process in engine.processes() if name in " ".join([process.name(), *process.cmdline()])]
    assert found, f"no process named {name}"
    for process in found:
        process.send_signal(number)


def long_requests(
    engine: Served, count: int, answers: list[Answer], *, wait: bool = True, **fields: object
) -> list[threading.Thread]:
    """Requests that run for a while, each in a thread; answers go to the list. `wait`: until the engine has them."""

    def ask(number: int) -> None:
        prompt = [9 + number, 10, 11]
        answers.append(engine.complete(prompt, max_tokens=CONTEXT - 10, ignore_eos=True, **fields))

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while wait and engine.total("num_requests_running") == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return threads


def await_requests(engine: Served, count: int) -> None:
    """Wait until the engine, which stands still, has this many requests.

    The simulator counts them still. Of vLLM one sees that its server has accepted as many connections; a moment more is
    for what was sent on them.
    """
    deadline = time.monotonic() + 30 * PATIENCE
    if engine.kind == "simulator":
        while (has := engine.total("num_requests_running") + engine.total("num_requests_waiting")) < count:
            assert time.monotonic() < deadline, f"{has:.0f} of {count} requests"
            time.sleep(0.05)
        return
    port = urllib.parse.urlsplit(engine.url).port
    while True:
        accepted = [
            connection
            for process in engine.processes()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
        ]
        if len(accepted) >= count:
            break
        assert time.monotonic() < deadline, f"{len(accepted)} of {count} connections"
        time.sleep(0.05)
    time.sleep(0.5)


def test_a_hang_looks_healthy_and_shows_in_a_counter_that_stands_still(mortal_engine: Served) -> None:
    engine = mortal_engine
    answers: list[Answer] = []
    threads = long_requests(engine, 30, answers)
    if engine.kind == "simulator":
        faults(engine, {"kind": "stall"})
    else:
        send(engine, "VLLM::EngineCore", signal.SIGSTOP)
    time.sleep(0.5)
    first = engine.total("generation_tokens_total")
    time.sleep(1.0)
    assert engine.call("/health").status == 200
    assert engine.total("generation_tokens_total") == first
    assert engine.total("num_requests_running") > 0
    if engine.kind == "simulator":
        faults(engine)
    else:
        send(engine, "VLLM::EngineCore", signal.SIGCONT)
    for thread in threads:
        thread.join(60)
    assert [answer.status for answer in answers] == [200] * 30


def test_a_dead_engine_process_fails_its_requests_and_then_the_server_exits(mortal_engine: Served) -> None:
    engine = mortal_engine
    plain: list[Answer] = []
    streams: list[Answer] = []
    server = engine.processes()
    # The engine stands still until all are there: a quick one would have done the first before the last are sent.
    if engine.kind == "simulator":
        faults(engine, {"kind": "stall"})
    else:
        send(engine, "VLLM::EngineCore", signal.SIGSTOP)
    threads = long_requests(engine, 30, plain, wait=False) + long_requests(engine, 30, streams, wait=False, stream=True)
    await_requests(engine, len(threads))
    if engine.kind == "simulator":
        faults(engine, {"kind": "engine_dead", "exit_after": 1})
    else:
        send(engine, "VLLM::EngineCore", signal.SIGKILL)  # it stands still: none is done, however busy the computer is
    for thread in threads:
        thread.join(30)
    assert {answer.status for answer in plain} == {500}
    for answer in plain:
        error = answer.json["error"]
        assert error["type"] == "InternalServerError" and "EngineCore encountered an issue" in error["message"]
    for answer in streams:
        *events, last = answer.events
        assert (answer.status, last) == (200, "[DONE]")
        assert "EngineCore encountered an issue" in json.loads(events[-1])["error"]["message"]
        assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in events[:-1])
    check_gone(engine, server)


def check_gone(engine: Served, server: list[psutil.Process]) -> None:
    """/health says 503 until nothing answers, and no process is left."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            assert engine.call("/health").status == 503
        except (urllib.error.URLError, OSError):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the server still answers")
    _, alive = psutil.wait_procs(server, timeout=10)
    assert not alive
