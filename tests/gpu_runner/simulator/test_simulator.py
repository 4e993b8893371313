"""The simulator as a process: pace, faults, its own log, and its end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.timing import PATIENCE

from gpu_runner.simulator.__main__ import main
from gpu_runner.simulator.generated_text import prompt_digest


@pytest.fixture(scope="module")
def shared() -> Iterator[SimulatedEngine]:
    """One fast engine for tests that leave nothing behind but faults, which each sets anew."""
    with simulated_engine("--speed", "200", "--output-tokens", "fixed:16") as engine:
        yield engine


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """One text completion; raises for anything but 200."""
    body = {"prompt": prompt, "max_tokens": 64, **fields}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        return json.loads(await answer.read())


def asked(engine: SimulatedEngine, prompt: str, **fields: Any) -> Any:
    """What one client with fresh connections gets: the body, or the error it meets."""

    async def once() -> Any:
        timeout = aiohttp.ClientTimeout(total=fields.pop("seconds", 10))
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return await ask(session, engine.url, prompt, **fields)

    try:
        return asyncio.run(once())
    except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
        return error


async def many(url: str, prompts: list[str], **fields: Any) -> list[Any]:
    """All prompts at once; errors in their place."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*[ask(session, url, p, **fields) for p in prompts], return_exceptions=True)


def test_it_says_that_it_is_a_simulation(shared: SimulatedEngine) -> None:
    (card,) = shared.get("/v1/models")["data"]
    assert (card["id"], card["owned_by"], card["simulated"]) == ("tiny", "simulated", True)
    assert shared.get("/version")["version"].startswith("simulated-")
    assert asked(shared, "x")["system_fingerprint"] == "simulated"


# Pace


@pytest.mark.parametrize(("speed", "tokens"), [(20, 1000), (400, 2000)])
def test_throughput_is_that_of_the_model_though_steps_are_shorter_than_a_sleep(speed: int, tokens: int) -> None:
    # 4 waves through 64 slots in steps of 4 ms: 0.8 s and 0.08 s. benchmarks/timing.py measures how much later it is.
    flags = ["--max-num-seqs", "64", "--weights-ms", "4", "--overhead-ms", "0", "--token-us", "0", "--context-ns", "0"]
    with simulated_engine("--speed", str(speed), *flags) as engine:
        started = time.monotonic()
        asyncio.run(many(engine.url, [f"{n}" for n in range(256)], max_tokens=tokens, ignore_eos=True))
        seconds = time.monotonic() - started
        assert engine.get("/simulator/stats")["completion_tokens"] == 256 * tokens
    least = 4 * tokens * 0.004 / speed
    assert seconds >= least * 0.98


def test_a_slower_engine_is_slower_by_the_speed_factor() -> None:
    flags = ["--weights-ms", "5", "--overhead-ms", "0", "--output-tokens", "fixed:40"]
    with simulated_engine("--speed", "1", *flags) as engine:
        started = time.monotonic()
        asked(engine, "x")
        assert time.monotonic() - started >= 0.2


def test_running_waiting_and_kv_usage_show_in_the_metrics_while_requests_run() -> None:
    flags = ["--speed", "1", "--max-num-seqs", "2", "--kv-tokens", "4096", "--output-tokens", "fixed:2000"]

    async def look(engine: SimulatedEngine) -> tuple[str, str]:
        async with aiohttp.ClientSession() as session:
            tasks = [asyncio.create_task(ask(session, engine.url, f"{n}", max_tokens=2000)) for n in range(5)]
            await asyncio.sleep(0.3)
            async with session.get(engine.url + "/metrics") as answer:
                during = await answer.text()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(wait_until, lambda: engine.get("/simulator/stats")["in_flight"] == 0)
        async with aiohttp.ClientSession() as session, session.get(engine.url + "/metrics") as answer:
            return during, await answer.text()

    with simulated_engine(*flags) as engine:
        during, after = (values(page) for page in asyncio.run(look(engine)))
        outcomes = engine.get("/simulator/stats")["outcomes"]
    assert (during["vllm:num_requests_running"], during["vllm:num_requests_waiting"]) == (2, 3)
    assert 0 < during["vllm:kv_cache_usage_perc"] < 1
    assert during["vllm:generation_tokens_total"] > 10
    # The clients went away: their slots are free again, as after vLLM's abort.
    assert (after["vllm:num_requests_running"], after["vllm:num_requests_waiting"]) == (0, 0)
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert outcomes == {"aborted": 5}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20 * PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def values(page: str) -> dict[str, float]:
    """Series of a metrics page by name, labels left out."""
    rows = [line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#")]
    return {name.split("{")[0]: float(value) for name, value in rows}


# Faults


@pytest.mark.parametrize(
    ("kind", "status"), [("http_429", 429), ("http_500", 500), ("http_503", 503), ("too_long", 400)]
)
def test_a_fault_answers_its_status_for_matching_prompts_only(shared: SimulatedEngine, kind: str, status: int) -> None:
    shared.set_faults(
        {"kind": kind, "match": {"contains": "bad"}, "retry_after": 7}
        if status == 429
        else {"kind": kind, "match": {"contains": "bad"}}
    )
    error = asked(shared, "a bad apple")
    assert isinstance(error, aiohttp.ClientResponseError) and error.status == status
    assert error.headers is not None and error.headers.get("Retry-After") == ("7" if status == 429 else None)
    assert asked(shared, "a good apple")["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("reset", (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)),
        ("reset_mid_body", aiohttp.ClientPayloadError),
        ("garbage", json.JSONDecodeError),
        ("hang", TimeoutError),
    ],
)
def test_a_broken_answer_breaks_the_way_its_kind_says(shared: SimulatedEngine, kind: str, error: Any) -> None:
    shared.set_faults({"kind": kind, "times": 1})
    assert isinstance(asked(shared, "x", seconds=0.5), error)
    assert asked(shared, "x")["choices"][0]["finish_reason"] == "stop"


def test_a_broken_finish_has_no_finish_reason_and_wrong_json_is_prose(shared: SimulatedEngine) -> None:
    shared.set_faults({"kind": "broken_finish", "match": {"contains": "cut"}}, {"kind": "wrong_json"})
    assert asked(shared, "cut")["choices"][0]["finish_reason"] is None
    found = asked(shared, "x", structured_outputs={"json": {"type": "object"}})["choices"][0]
    assert found["finish_reason"] == "stop"
    with pytest.raises(json.JSONDecodeError):
        json.loads(found["text"])


def test_an_idle_drop_resets_reused_connections_only(shared: SimulatedEngine) -> None:
    shared.set_faults({"kind": "drop_idle"})

    async def twice() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            await ask(session, shared.url, "x")
            with pytest.raises((aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)):
                await ask(session, shared.url, "x")
            await ask(session, shared.url, "x")

    asyncio.run(twice())


def test_wrong_faults_are_refused_and_change_nothing(shared: SimulatedEngine) -> None:
    shared.set_faults({"kind": "http_500"})
    with pytest.raises(OSError, match="400"):
        shared.set_faults({"kind": "explode"})
    assert [rule["kind"] for rule in shared.get("/simulator/faults")["faults"]] == ["http_500"]


def test_a_stalled_engine_is_healthy_and_goes_on_where_it_stood(shared: SimulatedEngine) -> None:
    shared.set_faults({"kind": "stall"})
    assert isinstance(asked(shared, "x", seconds=0.5), TimeoutError)

    async def stalled() -> tuple[dict[str, float], dict[str, float], Any]:
        async with aiohttp.ClientSession() as session:
            waiting = asyncio.create_task(ask(session, shared.url, "y"))
            pages = []
            for _ in range(2):
                await asyncio.sleep(0.2)
                async with session.get(shared.url + "/metrics") as answer:
                    pages.append(values(await answer.text()))
                async with session.get(shared.url + "/health") as answer:
                    assert answer.status == 200
            await asyncio.to_thread(shared.set_faults)
            return pages[0], pages[1], await waiting

    first, second, answer = asyncio.run(stalled())
    assert first["vllm:generation_tokens_total"] == second["vllm:generation_tokens_total"]
    assert second["vllm:num_requests_running"] + second["vllm:num_requests_waiting"] == 1
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_slow_engine_slows_by_its_factor_for_as_long_as_the_rule_says() -> None:
    flags = ["--weights-ms", "5", "--overhead-ms", "0", "--output-tokens", "fixed:20"]
    with simulated_engine("--speed", "10", *flags) as engine:
        started = time.monotonic()
        engine.set_faults({"kind": "slow", "factor": 100, "seconds": 1.2})
        asked(engine, "x")  # 10 ms when fast, 1 s when slow
        assert time.monotonic() - started > 0.9

        def fast() -> bool:
            began = time.monotonic()
            asked(engine, "x")
            return time.monotonic() - began < 0.5

        wait_until(fast)


def test_a_crash_kills_the_process_and_keeps_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rule = json.dumps([{"kind": "crash", "match": {"contains": "poison"}}])
    with simulated_engine("--faults", rule, "--request-log", str(log)) as engine:
        asked(engine, "fine")
        assert isinstance(asked(engine, "poison"), aiohttp.ClientError)
        assert engine.process.wait(60) == -signal.SIGKILL
    assert outcomes(log) == {"stop": 1, None: 1} or outcomes(log) == {"length": 1, None: 1}


def test_a_dead_engine_process_fails_everything_then_the_server_exits() -> None:
    with simulated_engine("--speed", "1", "--output-tokens", "fixed:1000") as engine:

        async def story() -> tuple[list[Any], int]:
            tasks = asyncio.create_task(many(engine.url, ["a", "b"], max_tokens=900))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(engine.set_faults, {"kind": "engine_dead", "exit_after": 0.5})
            async with aiohttp.ClientSession() as session, session.get(engine.url + "/health") as answer:
                return await tasks, answer.status

        errors, health = asyncio.run(story())
        assert [getattr(error, "status", None) for error in errors] == [500, 500]
        assert health == 503
        assert engine.process.wait(60) == 1


def test_a_dead_engine_ends_its_streams_like_vllm_with_an_error_and_done() -> None:
    with simulated_engine("--speed", "1", "--output-tokens", "fixed:1000") as engine:

        async def story() -> str:
            async with aiohttp.ClientSession() as session:
                body = {"prompt": "x", "max_tokens": 900, "stream": True}
                async with session.post(engine.url + "/v1/completions", json=body) as answer:
                    assert answer.status == 200
                    await answer.content.readany()
                    await asyncio.to_thread(engine.set_faults, {"kind": "engine_dead"})
                    return (await answer.read()).decode()

        events = [line[6:] for line in asyncio.run(story()).splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert "EngineCore encountered an issue" in json.loads(events[-2])["error"]["message"]
        reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-2]]
        assert set(reasons) <= {None}


# The engine's own log


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def outcomes(log: Path) -> Counter[str | None]:
    """How requests ended, by the log; None for those that never did."""
    ended = {line["request"]: line["outcome"] for line in lines(log) if line["event"] == "finished"}
    return Counter(ended.get(line["request"]) for line in lines(log) if line["event"] == "received")


def test_the_log_names_prompts_by_digest_and_holds_no_text(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    messages = [{"role": "user", "content": "Wie heißt du?"}]
    with simulated_engine("--speed", "100", "--request-log", str(log)) as engine:

        async def chat() -> None:
            async with aiohttp.ClientSession() as session:
                async with session.post(engine.url + "/v1/chat/completions", json={"messages": messages}) as answer:
                    assert answer.status == 200
                async with session.post(engine.url + "/v1/chat/completions", json={}) as answer:
                    assert answer.status == 400

        asyncio.run(chat())
        asked(engine, "secret words")
        wait_until(lambda: outcomes(log).total() == 3)
    chat_prompt = json.dumps(messages, ensure_ascii=False, separators=(",", ":")).encode()
    expected = [prompt_digest(chat_prompt), "", prompt_digest(b"secret words")]
    assert [line["prompt"] for line in lines(log) if line["event"] == "received"] == expected
    assert "secret" not in log.read_text() and "hei" not in log.read_text()


def test_the_log_tells_what_a_killed_client_had_asked(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with simulated_engine("--speed", "1", "--output-tokens", "fixed:1000", "--request-log", str(log)) as engine:
        code = (
            "import json, urllib.request as r\n"
            "body = json.dumps({'prompt': 'x', 'max_tokens': 900}).encode()\n"
            f"r.urlopen(r.Request({engine.url!r} + '/v1/completions', body))"
        )
        client = subprocess.Popen([sys.executable, "-c", code])
        wait_until(lambda: engine.get("/simulator/stats")["in_flight"] == 1)
        client.kill()
        client.wait()
        wait_until(lambda: outcomes(log) == {"aborted": 1})
        assert engine.get("/simulator/stats")["in_flight"] == 0


def test_stats_count_prompts_that_came_again(shared: SimulatedEngine) -> None:
    shared.set_faults()
    before = shared.get("/simulator/stats")
    for prompt in ("repeat 1", "repeat 1", "repeat 1", "repeat 2", "repeat 2", "repeat 3"):
        asked(shared, prompt)
    after = shared.get("/simulator/stats")
    assert after["requests"] - before["requests"] == after["completed"] - before["completed"] == 6
    assert after["prompts"]["distinct"] - before["prompts"]["distinct"] == 3
    assert after["prompts"]["repeated"] - before["prompts"]["repeated"] == 2


# The end


def test_sigterm_ends_it_at_once_and_tells_waiting_clients(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with simulated_engine("--speed", "1", "--output-tokens", "fixed:1000", "--request-log", str(log)) as engine:

        async def story() -> list[Any]:
            tasks = asyncio.create_task(many(engine.url, ["a", "b"], max_tokens=900))
            await asyncio.to_thread(wait_until, lambda: engine.get("/simulator/stats")["in_flight"] == 2)
            engine.process.terminate()
            await asyncio.to_thread(engine.process.wait, 60)
            return await tasks

        errors = asyncio.run(story())
        assert [getattr(error, "status", None) for error in errors] == [500, 500]
        assert engine.process.returncode == 0
    assert outcomes(log) == {"error": 2}


def test_it_ends_with_its_parent() -> None:
    with simulated_engine() as engine:
        assert engine.process.stdin is not None
        engine.process.stdin.close()
        assert engine.process.wait(60) == 0


def test_it_lives_on_without_a_parent_when_not_told_otherwise() -> None:
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "tiny"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        url = json.loads(process.stdout.readline())["url"]
        time.sleep(0.2)
        assert process.poll() is None and url.startswith("http://127.0.0.1:")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--speed", "0"], "--speed: expected a number above 0"),
        (["--kv-tokens", "100"], "does not fit a KV cache of 100 tokens"),
        (["--api-key-env", "EMPTY"], "EMPTY is not set"),
        (["--faults", '[{"kind": "explode"}]'], "simulator: fault: expected a kind of"),
    ],
)
def test_a_wrong_command_line_is_said_in_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setattr(sys, "argv", ["simulator", "--model", "tiny", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code not in (None, 0) and told.out == ""
    assert said in f"{told.err}\n{ended.value.code}"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_it_answers_and_ends_on_both_event_loops(loop: str) -> None:
    with simulated_engine("--event-loop", loop, "--speed", "50") as engine:
        text = asked(engine, "on a loop")
        assert text and engine.get("/simulator/stats")["completed"] == 1
        engine.process.terminate()
        assert engine.process.wait(30) == 0


@pytest.mark.slow
def test_a_taken_port_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "tiny", "--port"]
        done = subprocess.run([*command, str(taken.getsockname()[1])], capture_output=True, text=True, timeout=20)
    assert done.returncode != 0 and done.stdout == ""
    message = done.stderr
    assert message.startswith("simulator: ") and "in use" in message and "Traceback" not in message
