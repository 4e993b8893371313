"""`batch-assets demo`: the example dataset from nothing to a verified table, on what this machine has.

With an NVIDIA GPU and vLLM the rows are written by a small real model; otherwise by the embedded simulator, and that
is said. The two use different model names, so neither takes the other's rows for its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from batch_assets import settings
from batch_assets.fleet_command import print_costs, the_fleet
from batch_assets.progress import duration
from batch_assets.publish import published_table
from batch_assets.report import show_verification
from batch_assets.request import Request
from batch_assets.stack import prepare_home
from batch_assets.status import observing
from batch_assets.summary import carry_out
from resources.fleet_config import VLLM_COMMAND

DATASET = "example"
REAL_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SAMPLE_ROWS = 3
SHOWN_CHARACTERS = 300
MAX_NUM_SEQS = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU of this machine, and the vLLM that can use it."""

    name: str
    vllm: str


def run_demo() -> int:
    """Generate, verify, show; returns the exit status."""
    began = time.monotonic()
    prepare_home()
    gpu = gpu_with_vllm()
    config = settings.fleet_config()
    written = gpu is not None and write_fleet(gpu, config)
    _say(engine_words(gpu if written else None, config if config.exists() and not written else None))
    model = REAL_MODEL if gpu else None
    status = carry_out(Request(DATASET, model=model), as_json=False, progress=True) or show_verification(DATASET)
    if status == 0:
        with the_fleet().open_book() as book:
            print_costs(book)
        _say("", *sample_lines(), "", f"Demo done in {duration(time.monotonic() - began)}. Look around: make ui")
    return status


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


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


def write_fleet(gpu: Gpu, config: Path) -> bool:
    """Write a fleet.yaml that starts vLLM on this machine; False when there is one already: it is left as it is."""
    if config.exists():
        return False
    options = ["--max-model-len", "2048", "--max-num-seqs", str(MAX_NUM_SEQS)]
    engine: dict[str, Any] = {
        "name": "vllm",
        "kind": "process",
        "command": [gpu.vllm, *VLLM_COMMAND[1:], *options],
        "max_num_seqs": MAX_NUM_SEQS,
        "provider": "local",
        "instance_type": gpu.name.lower().replace(" ", "-"),
    }
    text = yaml.safe_dump({"engines": [engine]}, sort_keys=False)
    config.write_text(
        "# Written by `batch-assets demo`, which found an NVIDIA GPU and vLLM. Change it as you like.\n" + text
    )
    return True


def engine_words(gpu: Gpu | None, config: Path | None) -> str:
    """Which engine writes the rows, and whether it is a real one."""
    if endpoint := os.environ.get("BATCH_ASSETS_ENDPOINT"):
        return f"Engine: {endpoint} (BATCH_ASSETS_ENDPOINT)"
    if gpu is not None:
        return f"Engine: vLLM on {gpu.name} with {REAL_MODEL}; the first start downloads and loads the model"
    if config is not None:
        return f"Engine: as {config} says"
    return "Engine: the embedded simulator. No GPU with vLLM was found, so the texts are simulated; all else is real."


def sample_lines() -> list[str]:
    """Three rows of the published table, from its beginning, middle and end."""
    import polars as pl

    with observing([DATASET]) as (seen,):
        table, objects = published_table(seen.store), seen.store.objects
        if table is None:
            return []
        rows = pl.scan_parquet(table.glob(objects), storage_options=objects.storage_options())
        shown = rows.filter(pl.col("error").is_null()).select("topic", "audience", "format", "output").collect()
    lines = [f"{SAMPLE_ROWS} of {table.rows:,} rows:"]
    for index in range(min(SAMPLE_ROWS, shown.height)):
        row = shown.row(index * (shown.height - 1) // max(1, SAMPLE_ROWS - 1), named=True)
        text = " ".join(str(row["output"]).split())
        cut = text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
        lines += [f"  {row['topic']} / {row['audience']} / {row['format']}", f"    {cut}"]
    return lines
