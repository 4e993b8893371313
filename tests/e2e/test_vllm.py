"""Real vLLM on the CPU, on this machine as a provider: rented, killed in the middle, rented anew, gone afterwards."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import command_line, runs
from support.vllm_server import make_models

from e2e.harness import eventually, platform, shared_data

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def vllm_python() -> str:
    named = os.environ.get("VLLM_PYTHON")
    if not named:
        pytest.skip("needs VLLM_PYTHON: the Python of an environment with vLLM")
    return named


def machine(python: str, model: Path, scratch: Path) -> dict[str, Any]:
    """This machine as a provider, as a user writes it in fleet.yaml."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "{model}", "--host", "127.0.0.1", "--port", "{port}", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", "268435456", "--max-model-len", "2048", "--max-num-seqs", "128"]
    command += ["--dtype", "float32"]  # as in tests/contract/vllm_server.py
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "TMPDIR": str(scratch),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    return {
        "name": "this-machine",
        "gpu": "CPU",
        "gpu_memory_gib": 4,
        "price_per_hour": 0.36,
        "command": command,
        "environment": environment,
    }


def named(processes: Iterable[psutil.Process], name: str) -> list[psutil.Process]:
    """Those whose command line or title holds `name`, and that live."""
    return [one for one in processes if name in " ".join(command_line(one)) and runs(one)]


def processes_of(model: Path) -> set[psutil.Process]:
    """Live processes of the servers of a model, and all below them. Machines are no descendants of ours."""
    found = set(named(psutil.process_iter(), str(model)))
    for server in tuple(found):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(server.children(recursive=True))
    return found


def test_gsm8k_test_split_through_a_ui_backfill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm_python: str
) -> None:
    make_models(vllm_python, tmp_path / "models")
    llama = next(folder for folder in (tmp_path / "models").iterdir() if "llama" in folder.name)
    scratch = Path("/tmp") / f"v{os.getpid()}"
    scratch.mkdir()
    spec = {
        "name": "gsm8k_test",
        "source": {"path": str(shared_data() / "gsm8k" / "test.jsonl")},
        "prompt": {"user": "{{ question }}"},
        "model": "tiny-llama",
        "sampling": {"temperature": 0.7, "max_tokens": 64},
        "gates": {"max_cut_rate": None},  # a model without sense goes on until the token limit
    }
    fleet = {"local": [machine(vllm_python, llama, scratch)], "start_seconds": 240}
    with platform(tmp_path, monkeypatch, spec, simulator=None, fleet=fleet) as site:
        site.take_snapshot()
        started = time.monotonic()
        backfill = site.launch_backfill()

        def halfway() -> bool:
            with contextlib.closing(site.fleet_db()) as fleet_db:
                return any(beat.rows_done > 400 for beat in fleet_db.runs())

        eventually(halfway, 400, "four hundred rows")
        seen = processes_of(llama)
        for server in named(seen, "VLLM::EngineCore") or named(seen, "vllm.entrypoints.openai.api_server"):
            with contextlib.suppress(psutil.NoSuchProcess):
                server.kill()
        state = site.finish_backfill(backfill, 500)
        seconds = time.monotonic() - started
        assert state["status"] == "COMPLETED_SUCCESS"
        eventually(lambda: site.store.current_published(), 60, "the published table")
        seen |= processes_of(llama)
        table = site.published_rows()
        with contextlib.closing(site.fleet_db()) as fleet_db:
            costs = fleet_db.costs()
    eventually(lambda: not processes_of(llama) and not any(map(runs, seen)), 15, "the end of every vLLM process")
    print(f"\n1,319 rows on vLLM on CPU with one engine killed: {seconds:.0f} s, two engine starts included")
    assert len(table) == len({line["row_id"] for line in table}) == 1319
    assert not [line for line in table if line["error"] is not None]
    assert {line["tries"] for line in table} == {1}
    assert {line["model"] for line in table} == {"tiny-llama"}
    assert {line["provider"] for line in table} == {"this-machine"}
    assert len(costs) == 2  # the machine whose engine was killed was given back, and another one taken
    assert sum(line["usd"] for line in table) == pytest.approx(sum(cost.usd.useful for cost in costs), rel=0.02)
    assert all(line["finish_reason"] in ("stop", "length") and line["completion_tokens"] > 0 for line in table)
