"""A real vLLM server on the CPU for contract tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from gpu_runner.providers.engine_process import free_port

# Measured 16-24 s on two idle cores; a loaded machine takes a multiple of that.
START_SECONDS = 400  # 40 to 60 alone, over 100 beside other work


@dataclass
class VllmServer:
    """A running server. `process` is the guard, the parent of vLLM's API server."""

    url: str
    process: subprocess.Popen[bytes]


def make_models(python: str, folder: Path) -> None:
    """Write the tiny models with the Python of vLLM's environment."""
    script = Path(__file__).with_name("make_tiny_models.py")
    done = subprocess.run([python, str(script), str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@contextmanager
def vllm_server(python: str, model: Path, name: str, *flags: str, **variables: str) -> Iterator[VllmServer]:
    """Serve a model folder under a name, with more flags and environment variables.

    The guard holds the server's process group and ends it when its standard input closes: at the end of the
    block, and also when this process is killed. A killed API server alone would leave its workers.
    """
    # Sockets of vLLM lie in TMPDIR, are left behind even after a clean stop, and need a short path.
    scratch = Path(tempfile.mkdtemp(prefix="v"))
    port = free_port()
    # --kv-cache-memory-bytes: the default wants nearly all memory of the machine. --dtype: with bfloat16 the attention
    # of vLLM's CPU build uses AMX where the CPU says that it has it, and was killed by an illegal instruction there.
    command = [sys.executable, "-m", "gpu_runner.providers.process_guard", "--"]
    command += [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--kv-cache-memory-bytes", "67108864"]
    command += ["--dtype", "float32"]
    environment = {
        **os.environ,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "TMPDIR": str(scratch),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    log = scratch / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    assert process.stdin is not None
    segments: set[Path] = set()
    try:
        server = VllmServer(f"http://127.0.0.1:{port}", process)
        _wait_until_healthy(server, log)
        segments = _shared_memory(process.pid)
        yield server
    finally:
        process.stdin.close()
        process.wait(30)
        shutil.rmtree(scratch, ignore_errors=True)
        for segment in segments:
            segment.unlink(missing_ok=True)


def _shared_memory(pid: int) -> set[Path]:
    """Segments of shared memory that the server's processes hold: a killed vLLM leaves them behind."""
    processes = psutil.Process(pid).children(recursive=True)
    maps = {Path(memory.path) for process in processes for memory in process.memory_maps()}
    return {path for path in maps if path.name.startswith("psm_")}


def _wait_until_healthy(server: VllmServer, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"vLLM did not start:\n{log.read_text()[-3000:]}"
        try:
            urllib.request.urlopen(server.url + "/health", timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"vLLM was not ready after {START_SECONDS} s:\n{log.read_text()[-3000:]}")
