"""`batch-assets view` in Chromium over a table of many rows: seconds to the first page, of a search, of a filter.

    python benchmarks/viewer.py [--rows 2000000] [--rounds 3] [--folder DIR]

The table is invented, and written by the platform's own writer: outputs have 20 to 80 words, about 330 bytes; one row
in 250 is a dead letter, one in 20 was cut (`length`). The word `zanzibar` is in one output of 100,000. Each round opens
a page that is new to the browser; each search is for another word. Prints the median and the worst of the rounds, the
server's CPU seconds for a search, and the most memory that it had. The first round is after a start of the server.
A table that lies in DIR already is taken as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from playwright.sync_api import Page, expect, sync_playwright

from batch_assets.publishing.published_table import PublishedTable, published_table
from batch_assets.publishing.table_files import Column, TableWriter
from resources.objects.opening import LocalObjects
from resources.store.dataset_store import DatasetStore
from resources.store.outcome_tables import outcome_schema

NAME, VERSION, SNAPSHOT = "many", "00000000000000aa", "00000000000000bb"
ROWS, BLOCK, RARE_EVERY = 2_000_000, 50_000, 100_000
_STARTED = 1_790_000_000
TOPICS = ("tea", "tides", "trains", "trees", "towers", "tigers", "tools", "tales")
_LETTERS = "etaoinshrdlu"


def _schema() -> pa.Schema:
    outcome = outcome_schema("chat")
    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    rest = [item for item in outcome if item.name not in ("row_id", "row_key", "turns")]
    kept = [pa.field("topic", pa.string()), pa.field("score", pa.float64())]
    ends = [pa.field("batch", pa.string(), nullable=False), pa.field("duplicate_of", pa.string())]
    return pa.schema([outcome.field("row_id"), *kept, pa.field("prompt", messages), *rest, *ends])


def _block(first: int, rows: int, words: np.ndarray, schema: pa.Schema) -> pa.Table:
    """Lines number `first` and on; the same ones each time."""
    random = np.random.default_rng(first)
    numbers = np.arange(first, first + rows)
    lengths = random.integers(20, 81, rows)
    drawn = words[np.minimum(random.zipf(1.3, int(lengths.sum())) - 1, len(words) - 1)].tolist()
    ends = np.cumsum(lengths).tolist()
    outputs = [" ".join(drawn[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)]
    for place in np.flatnonzero(numbers % RARE_EVERY == RARE_EVERY // 2):
        outputs[place] += " Zanzibar"
    dead, cut = numbers % 250 == 7, numbers % 20 == 3
    topics = [TOPICS[number] for number in random.integers(0, len(TOPICS), rows)]
    columns = {
        "row_id": [f"{number:08d}" for number in numbers],
        "topic": topics,
        "score": np.round(random.beta(5, 2, rows) * 10, 1),
        "prompt": [
            [
                {"role": "system", "content": "You answer briefly."},
                {"role": "user", "content": f"Question {number}: what is to be known of {topic}?"},
            ]
            for number, topic in zip(numbers.tolist(), topics, strict=True)
        ],
        "output": pa.array(outputs, mask=dead),
        "finish_reason": pa.array(np.where(cut, "length", "stop"), mask=dead),
        "prompt_tokens": random.integers(20, 60, rows),
        "completion_tokens": np.where(dead, 0, lengths * 4 // 3),
        "tries": np.where(dead, 3, 1).astype(np.int32),
        "error": pa.array(np.where(numbers % 500 == 7, "timeout", "rejected_400"), mask=~dead),
        "error_message": pa.array(np.full(rows, "no answer within the time-out"), mask=~dead),
        "model": ["bench"] * rows,
        "engine": ["simulated"] * rows,
        "provider": ["local"] * rows,
        "instance_type": ["none"] * rows,
        "spot": [False] * rows,
        "run_id": ["benchmark"] * rows,
        "started_at": pa.array((_STARTED * 1_000_000 + numbers * 1000).astype("datetime64[us]")),
        "seconds": np.round(random.gamma(4, 0.4, rows), 3),
        "usd": np.round(lengths * 2.5e-7, 9),
        "batch": [f"{number // 250:05d}" for number in numbers],
    }
    arrays = [
        pa.array(columns[field.name]).cast(field.type) if field.name in columns else pa.nulls(rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def write_table(folder: Path, rows: int) -> PublishedTable:
    """Write and publish the table in the store FOLDER/store."""
    root = folder / "store"
    root.mkdir(parents=True, exist_ok=True)
    store, schema = DatasetStore(LocalObjects(root), NAME), _schema()
    random = np.random.default_rng(1)
    words = np.array(["".join(random.choice(list(_LETTERS), length)) for length in random.integers(2, 12, 20_000)])
    with (
        tempfile.TemporaryDirectory(dir=folder) as workdir,
        TableWriter(store, VERSION, schema, Path(workdir), 5_000_000) as writer,
    ):
        for first in range(0, rows, BLOCK):
            writer.write(_block(first, min(BLOCK, rows - first), words, schema))
        files, totals = writer.finish(), writer.totals
    table = PublishedTable(
        dataset=NAME,
        model="bench",
        snapshot=SNAPSHOT,
        version=VERSION,
        created_at=float(_STARTED),
        batches=-(-rows // 250),
        generations=-(-rows // 250),
        rows=totals.rows,
        ok=totals.rows - totals.dead,
        dead=totals.dead,
        duplicates=0,
        dead_duplicates=0,
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
        usd=totals.usd,
        unpriced=totals.unpriced,
        bytes=sum(file.bytes for file in files),
        simulated=True,
        columns=[Column(name=field.name, type=str(field.type)) for field in schema],
        sources=totals.sources(),
        files=files,
    )
    store.objects.put(store.published_path(VERSION, "manifest.json"), table.to_json())
    store.publish(VERSION)
    return table


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a `batch-assets view` over the store."""
    (folder / "defs").mkdir(exist_ok=True)
    own = {"BATCH_ASSETS_STORE": str(folder / "store"), "BATCH_ASSETS_DEFS": str(folder / "defs")}
    command = [sys.executable, "-m", "batch_assets.cli.main", "view", NAME, "--port", "0"]
    environment = os.environ | own | {"DAGSTER_HOME": str(folder / "home")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[1], psutil.Process(process.pid)
        finally:
            process.terminate()


def _says(page: Page, words: str) -> None:
    expect(page.locator("#status")).to_have_text(re.compile(words), timeout=120_000)


def _seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def look(page: Page, url: str, word: str, process: psutil.Process) -> Iterator[tuple[str, float]]:
    """What a person does, with its seconds."""
    bars = page.locator(".histogram").last.locator(".numbers, .values")

    def opened() -> None:
        page.goto(url)
        _says(page, " rows, in")

    def searched(text: str, found: str) -> None:
        page.fill("#search", text)
        page.press("#search", "Enter")
        _says(page, found)

    def pressed(label: str, found: str) -> None:
        page.get_by_role("button", name=label).click()
        _says(page, found)

    def chosen() -> None:
        page.locator("tbody tr").nth(3).click()
        expect(page.locator("#detail")).to_be_visible()

    yield "first page", _seconds(opened)
    yield "all histograms", _seconds(lambda: expect(bars).to_be_visible(timeout=120_000))
    page.wait_for_timeout(1000)
    before = process.cpu_times()
    yield "search", _seconds(lambda: searched(word, r"^[\d,]{1,8} of .* rows, in"))
    after = process.cpu_times()
    yield "search, CPU", after.user + after.system - before.user - before.system
    page.wait_for_timeout(1000)
    searched("", r"^[\d,]{9,} of")
    page.wait_for_timeout(1500)
    yield "filter by a histogram", _seconds(lambda: pressed("length: ", r"^[\d,]{5,7} of"))
    page.wait_for_timeout(1500)

    def row_shown() -> None:
        page.locator("tbody tr").nth(3).click()
        expect(page.locator("#detail")).to_be_visible()

    yield "row", _seconds(row_shown)
    page.wait_for_timeout(1500)
    page.keyboard.press("Escape")
    yield "sort", _seconds(lambda: pressed("completion_tokens", r"^[\d,]{5,7} of"))


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round, and MiB of the server."""
    found: dict[str, list[float]] = defaultdict(list)
    words = ("zanzibar", "sanzibar zz", "uulorna", "trrrno", "ottern", "llllo")
    with served(folder) as (url, process), sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        for number in range(rounds):
            page = chromium.new_page(viewport={"width": 1400, "height": 900})
            for step, seconds in look(page, url, words[number % len(words)], process):
                found[step].append(seconds)
            page.close()
        chromium.close()
        status = Path(f"/proc/{process.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    return found | {"peak MiB": [int(peak[1]) / 1024]}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "store").mkdir(parents=True, exist_ok=True)
        table = published_table(DatasetStore(LocalObjects(folder / "store"), NAME)) or write_table(folder, asked.rows)
        print(
            f"{table.rows:,} rows, {table.bytes / 2**20:,.0f} MiB in {table.parts} files; load {os.getloadavg()[0]:.1f}"
        )
        figures = measure(folder, asked.rounds)
    for step, seconds in figures.items():
        print(f"{step:24} median {statistics.median(seconds):8.2f}  worst {max(seconds):8.2f}")
    print(json.dumps({step: [round(one, 3) for one in seconds] for step, seconds in figures.items()}))


if __name__ == "__main__":
    main()
