"""Beside what people use today: the same rows, the same engine, by each system in turn.

    python -m benchmarks.peers [--install] [--systems NAME …] [--works short gsm8k prefixes] [--rows N] [--kills]
        [--folder FOLDER] [--again] [--table]

Start and durable output are in the seconds. Each trial has a new engine: a simulated one of 256 slots that answers 270
rows a second (short), or vLLM on the CPU with a tiny model (gsm8k, prefixes: `.ci/install-vllm-cpu` builds it). What
has been measured is in results.jsonl in the folder and is not measured again. A system whose environment is not there
is left out; `--install` builds it below the folder. `--kills`: `kill -9` of all processes of the system at 60 % of the
rows, then the same command again. docs/performance.md has the results, and what they do not show.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.peers.report import table
from benchmarks.peers.systems import SYSTEMS, System
from benchmarks.peers.trial import Trial, measure
from benchmarks.peers.works import ROOT, WORKS, Engine, Work, rows_of, simulated_engine, tiny_model, vllm_engine
from gpu_runner.providers.engine_process import free_port


def install(system: System, environments: Path) -> None:
    """Build a system's environment, unless it is there. Says so where it fails."""
    folder = environments / system.environment
    if not system.packages or (folder / "installed").exists():
        return
    uv = str(Path(sys.executable).with_name("uv"))
    create = [uv, "venv", "--quiet", "--clear", "-p", "3.11", str(folder)]
    add = [uv, "pip", "install", "--quiet", "--compile-bytecode", "-p", str(folder), *system.packages]
    for command in (create, add):
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            print(f"{system.name}: not installed: {done.stderr.strip()[-300:]}", flush=True)
            return
    (folder / "installed").touch()


@contextlib.contextmanager
def engine_for(work: Work, system: System, vllm: Path, folder: Path) -> Iterator[tuple[Engine, str]]:
    """The engine of a trial, and the folder of its model."""
    if work.rate is not None:
        with simulated_engine(work.rate) as engine:
            yield engine, ""
        return
    model = tiny_model(vllm, folder / "models")
    if system.own_engine:
        yield Engine(f"http://127.0.0.1:{free_port()}", 0.0, simulated=False), str(model)
        return
    with vllm_engine(vllm, model) as engine:
        yield engine, str(model)


def why_not(system: System, work: Work, environments: Path, vllm: Path) -> str | None:
    """Why a trial cannot be made, or None."""
    if work.name in system.cannot:
        return system.cannot[work.name]
    if work.rate is None and not vllm.exists():
        return f"{vllm} is not there: build it with .ci/install-vllm-cpu, or name another with --vllm-python"
    return system.missing(environments, vllm)


def measured(file: Path) -> list[Trial]:
    """What was measured: of each trial the newest."""
    lines = file.read_text().splitlines() if file.exists() else []
    found = [Trial(**{**(one := json.loads(line)), "load": tuple(one["load"])}) for line in lines]
    return list({trial.key: trial for trial in found}.values())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--systems", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    works = [work.name for work in WORKS]
    parser.add_argument("--works", nargs="+", choices=works, default=works)
    parser.add_argument("--rows", type=int, help="at most so many of each work")
    parser.add_argument("--kills", action="store_true", help="kill -9 at 60 %% of the rows, and the same command again")
    parser.add_argument("--install", action="store_true", help="build the environments that are not there")
    parser.add_argument("--again", action="store_true", help="measure again what was measured")
    parser.add_argument("--table", action="store_true", help="only print what was measured")
    parser.add_argument("--minutes", type=float, default=15.0, help="of one trial at most")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "peers")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    return parser.parse_args()


def main() -> None:
    """Entry point."""
    asked = arguments()
    asked.folder.mkdir(parents=True, exist_ok=True)
    results, environments = asked.folder / "results.jsonl", asked.folder / "environments"
    systems = [system for system in SYSTEMS if system.name in asked.systems]
    if asked.install:
        for system in systems:
            install(system, environments)
    for work in () if asked.table else [work for work in WORKS if work.name in asked.works]:
        rows = rows_of(work, min(work.rows, asked.rows or work.rows))
        known = {trial.key for trial in measured(results) if not trial.error}
        for system in systems:
            if (system.name, work.name, len(rows), asked.kills) in known and not asked.again:
                continue
            if reason := why_not(system, work, environments, asked.vllm_python):
                print(f"{system.name}, {work.name}: left out: {reason}", flush=True)
                continue
            place = asked.folder / "trials" / f"{work.name}-{system.label}"
            with engine_for(work, system, asked.vllm_python, asked.folder) as (engine, model):
                python = system.python(environments, asked.vllm_python)
                trial = measure(system, python, work, rows, engine, model, place, asked.kills, asked.minutes)
            with results.open("a") as out:
                out.write(json.dumps(asdict(trial)) + "\n")
            print(table([trial]), flush=True)
    print(table(measured(results)))


if __name__ == "__main__":
    main()
