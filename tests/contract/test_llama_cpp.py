"""llama.cpp's server as we start it: what it cannot do of vLLM's, how it fails, and what it leaves in its log."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from support.contract_engines import API_KEY, CONTEXT
from support.llama_cpp import llama_cpp_server

from gpu_runner.client import engine_client
from gpu_runner.client.engine_client import EngineClient, EngineLost, EngineRefused, RowRejected, TimeOuts, Transient
from gpu_runner.providers.engine_process import EngineProcess, EngineStartError, served_length
from gpu_runner.rows import Generation

HELLO = orjson.dumps([{"role": "user", "content": "Hello there, a text that nobody else writes"}])


@pytest.fixture(scope="module")
def server(gguf_files: Path) -> Iterator[EngineProcess]:
    with llama_cpp_server(gguf_files / "llama.gguf", "tiny", "--context", str(CONTEXT), "--slots", "4") as process:
        yield process


def client(server: EngineProcess, sampling: dict[str, Any] | None = None, **time_outs: float) -> EngineClient:
    return EngineClient(server.endpoint, Generation("chat", "tiny", sampling or {}), time_outs=TimeOuts(**time_outs))


def ask(server: EngineProcess, sampling: dict[str, Any]) -> str:
    """The text of one row, after the hand shake."""

    async def run() -> str:
        async with client(server, sampling) as engine:
            await engine.info()
            return str((await engine.generate(HELLO)).output)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"min_tokens": 5}, "min_tokens: llama.cpp has no such request field"),
        ({"stop_token_ids": [3]}, "stop_token_ids: llama.cpp names tokens"),
        ({"bad_words": ["x"]}, "bad_words: "),
        ({"seed": 1 << 40}, "seed: llama.cpp takes 0 to 4294967294, found 1099511627776"),
    ],
)
def test_what_it_cannot_do_is_refused_at_the_hand_shake_with_the_reason(
    server: EngineProcess, sampling: dict[str, Any], said: str
) -> None:
    with pytest.raises(
        EngineRefused, match=re.escape("sampling: expected request fields that llama.cpp has")
    ) as refused:
        ask(server, sampling)
    assert said in str(refused.value)


def test_fields_that_change_nothing_are_no_reason_to_refuse(server: EngineProcess) -> None:
    assert ask(server, {"min_tokens": 0, "bad_words": [], "max_tokens": 5, "ignore_eos": True})


def test_a_repetition_penalty_has_its_effect_under_llama_cpps_name(server: EngineProcess) -> None:
    fields = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    plain, penalized = ask(server, fields), ask(server, {**fields, "repetition_penalty": 2.0})
    assert plain != penalized
    assert len(set(penalized)) > len(set(plain))


def test_what_sampling_leaves_out_is_as_with_vllm(server: EngineProcess) -> None:
    fields = {"max_tokens": 40, "ignore_eos": True, "seed": 3}
    said = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
    assert ask(server, fields) == ask(server, fields | said)
    assert ask(server, fields) != ask(server, fields | said | {"top_k": 2})


def test_its_version_and_the_context_of_a_row_are_told(server: EngineProcess) -> None:
    async def run() -> Any:
        async with client(server) as engine:
            return await engine.info()

    info = asyncio.run(run())
    assert info.version.startswith("llama.cpp xllamacpp-20")
    assert (info.max_model_len, info.simulated) == (CONTEXT, False)
    assert served_length(server.endpoint) == CONTEXT


def test_a_text_too_long_to_embed_is_the_rows_fault(gguf_files: Path) -> None:
    async def run(endpoint: str) -> None:
        async with EngineClient(endpoint, Generation("embedding", "bert")) as engine:
            await engine.generate(orjson.dumps("one " * 600))

    with (
        llama_cpp_server(gguf_files / "bert.gguf", "bert", "--embedding", "--context", "512") as process,
        pytest.raises(RowRejected) as rejected,
    ):
        asyncio.run(run(process.endpoint))
    assert rejected.value.code == "context_length_exceeded"


def test_no_text_of_a_row_is_in_its_log(server: EngineProcess) -> None:
    answer = ask(server, {"max_tokens": 20, "temperature": 0})
    log = server.log.read_text(errors="replace")
    assert "llama.cpp serves tiny" in log
    assert "nobody else writes" not in log and (len(answer) < 8 or answer not in log)


@pytest.mark.slow
def test_another_process_at_the_address_shows_in_start_time_and_counters(gguf_files: Path) -> None:
    async def load(process: EngineProcess) -> Any:
        async with client(process, {"max_tokens": 20}) as engine:
            await engine.generate(HELLO)
            return await engine.load()

    found = []
    for _ in range(2):
        with llama_cpp_server(gguf_files / "llama.gguf", "tiny", "--slots", "2") as process:
            found.append(asyncio.run(load(process)))
    assert found[0].started_at < found[1].started_at


def test_progress_shows_while_long_rows_run_although_tokens_are_counted_at_their_end(server: EngineProcess) -> None:
    async def run() -> list[Any]:
        async with client(server, {"max_tokens": CONTEXT - 100, "ignore_eos": True}) as engine:
            rows = asyncio.gather(*[engine.generate(HELLO) for _ in range(10)])
            seen = []
            while not rows.done():
                seen.append(await engine.load())
            await rows
            return [load for load in seen if load is not None and load.running]

    busy = asyncio.run(run())
    silent = [(one, two) for one, two in pairwise(busy) if one.generated_tokens == two.generated_tokens]
    assert any(one.progress < two.progress for one, two in silent)


@pytest.mark.slow
def test_a_client_that_takes_long_to_open_its_connections_loses_none(
    server: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_socket = engine_client.watched_socket

    def slowly(address: tuple[Any, ...]) -> socket.socket:
        time.sleep(0.12)  # the loop stands still, as on a machine whose cores are taken
        return make_socket(address)

    async def run() -> int:
        async with client(server, {"max_tokens": 2}) as engine:
            await engine.info()
            return len(await asyncio.gather(*[engine.generate(HELLO) for _ in range(64)]))

    monkeypatch.setattr(engine_client, "watched_socket", slowly)
    assert asyncio.run(run()) == 64  # the server closes a connection on which it hears nothing for 5 s


def test_a_process_that_hangs_answers_nothing(gguf_files: Path) -> None:
    async def run(process: EngineProcess) -> None:
        async with client(process, {"max_tokens": 5}, info=0.5, request=0.5) as engine:
            assert await engine.healthy()
            _engine_process(process).send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 10
            while await engine.healthy():  # its threads stop one after the other
                assert time.monotonic() < deadline
            with pytest.raises((Transient, EngineLost)):
                await engine.load()
            with pytest.raises(Transient, match="timeout"):
                await engine.generate(HELLO)
            _engine_process(process).send_signal(signal.SIGCONT)
            assert await engine.healthy()

    with llama_cpp_server(gguf_files / "llama.gguf", "tiny", "--slots", "2") as process:
        asyncio.run(run(process))


def test_a_killed_process_breaks_its_rows_and_is_gone_with_its_guard(gguf_files: Path) -> None:
    async def run(process: EngineProcess) -> list[Any]:
        async with client(process, {"max_tokens": 1900, "ignore_eos": True}) as engine:
            rows = [asyncio.ensure_future(engine.generate(HELLO)) for _ in range(8)]
            while not getattr(await engine.load(), "running", 0):
                pass
            _engine_process(process).kill()
            return await asyncio.gather(*rows, return_exceptions=True)

    with llama_cpp_server(gguf_files / "llama.gguf", "tiny", "--slots", "2") as process:
        found = asyncio.run(run(process))
        broken = [one for one in found if isinstance(one, Transient)]
        assert broken and all(one.code in ("connection_lost", "connect_failed") for one in broken)
        deadline = time.monotonic() + 10
        while process.alive():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _engine_process(process: EngineProcess) -> psutil.Process:
    (found,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "gpu_runner.providers.llama_cpp_server" in child.cmdline() and "--" not in child.cmdline()
    ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gguf", "/nowhere.gguf"], "--gguf: expected a file, found none at /nowhere.gguf"),
        (["--slots", "0"], "--slots: expected 1 or more, found 0"),
        (["--api-key-env", "NOT_SET_HERE"], "NOT_SET_HERE is not set"),
    ],
)
def test_a_wrong_command_line_is_named(gguf_files: Path, tmp_path: Path, flags: list[str], said: str) -> None:
    command = [sys.executable, "-m", "gpu_runner.providers.llama_cpp_server", "--model", "m", "--port", "1"]
    command += ["--gguf", str(gguf_files / "llama.gguf"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and said in done.stderr


@pytest.mark.slow
def test_a_file_that_is_no_model_is_said_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(EngineStartError, match="before it was ready"), llama_cpp_server(tmp_path / "bad.gguf", "m"):
        pass


@pytest.mark.slow
def test_the_key_is_asked_for(gguf_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRACT_API_KEY", API_KEY)

    async def run(endpoint: str, key: str | None) -> Any:
        async with EngineClient(endpoint, Generation("chat", "tiny", {"max_tokens": 2}), api_key=key) as engine:
            return await engine.generate(HELLO)

    flags = ["--api-key-env", "CONTRACT_API_KEY", "--slots", "2"]
    with llama_cpp_server(gguf_files / "llama.gguf", "tiny", *flags) as process:
        assert asyncio.run(run(process.endpoint, API_KEY)).completion_tokens <= 2
        with pytest.raises(EngineRefused, match="API key"):
            asyncio.run(run(process.endpoint, None))
