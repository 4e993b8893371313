"""The works: rows, and the engine that answers them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.feed import engine_speed
from gpu_runner.providers.engine_process import free_port

ROOT = Path(__file__).parents[2]
MODEL = "tiny"
SLOTS = 256
START_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Row:
    """One row: what is asked, under which id."""

    id: str
    user: str
    system: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user}]


@dataclass(frozen=True, slots=True)
class Work:
    """Rows of one kind. `rate`: what a simulated engine answers a second; None: a real one does the work."""

    name: str
    rows: int
    max_tokens: int
    rate: float | None


WORKS = (
    Work("short", 20_000, 256, 270.0),
    Work("gsm8k", 3_000, 64, None),
    Work("prefixes", 5_000, 64, None),
)


def rows_of(work: Work, number: int) -> list[Row]:
    """The first rows of a work. SystemExit: GSM8K is not there."""
    if work.name == "short":
        return [Row(f"r{i}", f"Question {i}: what follows from {i * 7919 % 104729}?") for i in range(number)]
    if work.name == "prefixes":
        chance = random.Random(1)
        words = ("river stone lamp green quick market letter", "window paper cloud silver garden north bread")
        systems = [f"Role {n}: " + " ".join(chance.choices(words, k=20)) for n in range(50)]
        return [Row(f"r{i}", f"Say {i} in words.", chance.choice(systems)) for i in range(number)]
    folder = Path(os.environ.get("BATCH_ASSETS_TEST_DATA") or ROOT.parent / "shared" / "data")
    file = folder / "gsm8k" / "train.jsonl"
    if not file.is_file():
        raise SystemExit(f"the work gsm8k needs {file}: set BATCH_ASSETS_TEST_DATA to the folder that has gsm8k/")
    lines = file.read_text().splitlines()[:number]
    return [Row(f"r{i}", json.loads(line)["question"]) for i, line in enumerate(lines)]


def write_rows(file: Path, rows: list[Row]) -> None:
    """The input of most: JSON lines of id, user and system."""
    keys = [{"id": row.id, "user": row.user, "system": row.system or ""} for row in rows]
    file.write_text("".join(json.dumps(one) + "\n" for one in keys))


def write_lines(file: Path, rows: list[Row], max_tokens: int) -> None:
    """The same as a file of OpenAI's Batch API."""
    with file.open("w") as out:
        for row in rows:
            body = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0.0, "messages": row.messages}
            line = {"custom_id": row.id, "method": "POST", "url": "/v1/chat/completions", "body": body}
            out.write(json.dumps(line) + "\n")


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that answers, and how long it took to start."""

    url: str
    started: float
    simulated: bool

    def counts(self) -> tuple[int, int]:
        """Requests that it has got so far, and those of them that are answered. OSError: it does not say."""
        if self.simulated:
            stats = json.loads(_read(f"{self.url}/simulator/stats"))
            return stats["requests"], stats["completed"]
        return vllm_counts(_read(f"{self.url}/metrics"))


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as page:
        return str(page.read(16 << 20).decode())


def vllm_counts(page: str) -> tuple[int, int]:
    """Requests that ended, run or wait, and those that ended, by a page of vLLM's metrics."""
    totals = Counter[str]()
    for line in page.splitlines():
        if line.startswith("vllm:"):
            totals[line.partition("{")[0]] += round(float(line.rpartition(" ")[2]))
    ended = totals["vllm:request_success_total"]
    return ended + totals["vllm:num_requests_running"] + totals["vllm:num_requests_waiting"], ended


@contextlib.contextmanager
def simulated_engine(rate: float) -> Iterator[Engine]:
    """The simulator, for answers of 64 tokens on average."""
    began = time.monotonic()
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", MODEL, "--exit-with-parent"]
    command += ["--max-num-seqs", str(SLOTS), "--speed", f"{engine_speed(SLOTS, 64, rate):.3f}"]
    command += ["--output-tokens", "lognormal:64:256", "--keep-alive-timeout", "120"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            yield Engine(url, time.monotonic() - began, simulated=True)
        finally:
            process.terminate()


def vllm_flags(model: Path) -> list[str]:
    """Flags of vLLM, the same for the server and for `run-batch`.

    `--kv-cache-memory-bytes`: the default of vLLM's CPU build wants nearly all memory of the machine. `--dtype`: its
    attention in bfloat16 was killed by an illegal instruction on some machines.
    """
    flags = ["--model", str(model), "--served-model-name", MODEL, "--enforce-eager", "--dtype", "float32"]
    return [*flags, "--max-model-len", "2048", "--max-num-seqs", str(SLOTS), "--kv-cache-memory-bytes", "268435456"]


def vllm_environment(scratch: Path) -> dict[str, str]:
    """Environment variables for vLLM on the CPU. `scratch`: a short path, where its sockets lie."""
    fixed = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    return {**fixed, "TMPDIR": str(scratch), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def tiny_model(python: Path, folder: Path) -> Path:
    """A Llama of two layers with random weights, made once."""
    if not (folder / "llama" / "config.json").is_file():
        script = ROOT / "tests" / "support" / "make_tiny_models.py"
        subprocess.run([python, script, folder], check=True, capture_output=True, timeout=300)
    return folder / "llama"


@contextlib.contextmanager
def vllm_engine(python: Path, model: Path, *more: str) -> Iterator[Engine]:
    """A vLLM server on the CPU, with `more` flags, which win. SystemExit: it did not start."""
    began, port = time.monotonic(), free_port()
    scratch = Path(tempfile.mkdtemp(prefix="v"))
    command = [sys.executable, "-m", "gpu_runner.providers.process_guard", "--", str(python), "-m"]
    command += ["vllm.entrypoints.openai.api_server", *vllm_flags(model), *more]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, **vllm_environment(scratch), "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120"}
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
        )
    assert process.stdin is not None
    try:
        url = f"http://127.0.0.1:{port}"
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise SystemExit(f"vLLM did not start:\n{(scratch / 'log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield Engine(url, time.monotonic() - began, simulated=False)
    finally:
        process.stdin.close()  # the guard ends the server's process group
        process.wait(60)
        shutil.rmtree(scratch, ignore_errors=True)


def _healthy(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False
