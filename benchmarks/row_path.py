"""How many modules of ours a row meets: a small dataset from source to table, and an OpenAI batch from file to file.

    python benchmarks/row_path.py [--list]

One row of each run has a word of its own in its id and its prompt. A module counts when one of its functions is called
with that row, or returns it: with a value that holds the word, or, where rows are columns, a table of them. The engine
is a process of its own and counts for nothing. `--list`: the modules by name, in the order in which the row met them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import sys
import tempfile
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

FLOORS = ("batch_assets", "resources", "gpu_runner")
WORD = "qzvxw"  # no other text has it
DEPTH, ITEMS = 4, 40
ROWS = 12
MAPPINGS, SEQUENCES = (dict, defaultdict), (list, tuple, set, frozenset)


def holds(value: Any, depth: int = DEPTH) -> bool:
    """Whether a value has the row in it, no deeper than `depth`."""
    if isinstance(value, str):
        return WORD in value
    if isinstance(value, bytes | bytearray):
        return WORD.encode() in value
    if isinstance(value, pa.Table | pa.RecordBatch):
        return bool(value.num_rows)
    if depth == 0 or value is None or isinstance(value, int | float | type):
        return False
    if type(value) in MAPPINGS:
        return any(holds(one, depth - 1) for one in list(value.values())[:ITEMS])
    if type(value) in SEQUENCES:
        return any(holds(one, depth - 1) for one in list(value)[:ITEMS])
    if dataclasses.is_dataclass(value):
        return any(holds(getattr(value, field.name, None), depth - 1) for field in dataclasses.fields(value))
    return False


class Met:
    """Modules in the order in which the row met them. For all threads that begin while it is `watching`."""

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}  # and the function

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at every call and return of Python code in the body."""
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _look(self, frame: FrameType, event: str, returned: Any) -> None:
        if event not in ("call", "return"):
            return
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in FLOORS or module in self.modules or frame.f_code.co_name == "<module>":
            return
        given: Any = returned
        if event == "call":
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            given = [frame.f_locals.get(name) for name in names if name not in ("self", "cls")]
        if holds(given):
            self.modules[module] = frame.f_code.co_qualname


def of_a_dataset(folder: Path) -> Met:
    """Source, snapshot, engine, journal, objects, table."""
    from support.dataset_project import MODEL, dataset_project
    from support.simulated_engine import simulated_engine

    rows = [{"id": f"id-{number}", "question": f"What is {number}?"} for number in range(ROWS - 1)]
    rows.append({"id": WORD, "question": f"What is {WORD}?"})
    met = Met()
    with dataset_project(folder) as project, simulated_engine("--speed", "20", model=MODEL) as engine:
        (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        with met.watching():
            assert project.materialize("prompts").success
            assert project.run_rows("00000", "00001", engine.url).success
            assert project.materialize("dataset").success
    return met


def of_a_batch(folder: Path) -> Met:
    """Input file, lines, engine, journal, objects, output file."""
    from support.api_service import api_service, line
    from support.simulated_engine import simulated_engine

    async def finished(url: str) -> None:
        lines = [line(f"line-{number}") for number in range(ROWS - 1)] + [line(WORD)]
        async with api_service(folder, url) as service:
            batch = await service.until((await service.create(lines))["id"])
            good, _ = await service.results(batch)
            assert len(good) == ROWS

    met = Met()
    with simulated_engine("--speed", "20", model="tiny") as engine, met.watching():
        asyncio.run(finished(engine.url))
    return met


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    for what, path_of in (("a row of a dataset", of_a_dataset), ("a line of an OpenAI batch", of_a_batch)):
        with tempfile.TemporaryDirectory() as folder:
            met = path_of(Path(folder))
        print(f"{what}: {len(met.modules)} modules")
        if asked.list:
            print("\n".join(f"  {module}  {function}" for module, function in met.modules.items()))


if __name__ == "__main__":
    main()
