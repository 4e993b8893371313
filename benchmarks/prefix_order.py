"""What the order of rows is worth where they share prefixes: rows/s on vLLM, and prompt tokens that it computed.

    python -m benchmarks.prefix_order [--works documents systems alone] [--orders source prefix 100 sorted] [--turns 2]

`documents`: 30 documents of about 1,200 tokens, each asked 10 questions, scattered over the source. `systems`: 8 system
prompts of about 400 tokens. `alone`: no two rows share a prefix. vLLM's CPU build serves a Llama of 4 layers with
random weights (`.ci/install-vllm-cpu` builds it), 12 tokens an answer, with its prefix cache; the KV cache holds about
`--kv-documents` documents. The rows go through a run of the dataset (journal, objects of 250 rows; no Dagster).

Orders: the source's, the one that runs put rows into (`gpu_runner/inference/prefix_order.py`), sorted by the prompt
within so many rows of the source, and sorted as a whole: all but the second are measured as if runs did nothing. They
are measured one after the other, `--turns` times, each time with other texts, so that nothing is cached before.
Computed prompt tokens do not depend on what else the machine does, rows of a second of the engine's processor time
little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

from batch_assets.generation.range_run import Intent, RangeRun, RunIdentity, plan_range
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.models import load_spec
from benchmarks.peers.works import MODEL, ROOT, tiny_model, vllm_engine
from gpu_runner.fleet_database.database import Lease
from gpu_runner.inference.feed import FeedPolicy
from resources.fleet.resource import LeasedEngine
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

NAME = "prefixes"
WORKS, ORDERS = ("documents", "systems", "alone"), ("source", "prefix", "100", "sorted")
QUESTIONS, WORDS, SLOTS, ANSWER_TOKENS = 10, 690, 64, 12
LAYERS, KV_HEADS, HEAD_SIZE, FLOAT = 4, 2, 32, 4
SHAPE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
DOCUMENT_TOKENS = 1200
KV_BYTES = 2 * LAYERS * KV_HEADS * HEAD_SIZE * FLOAT  # of a token
VOCABULARY = ["farmer", "sells", "apples", "cents", "each", "how", "much", "earn", "weeks", "question", "and"]


@dataclass(frozen=True)
class Figures:
    """One run. `prompt_tokens`: of all rows; `computed`: those that were not in the engine's prefix cache.
    `cpu_seconds`: that vLLM's processes took.
    """

    work: str
    order: str
    asked: int
    rows_per_second: float
    prompt_tokens: int
    computed: int
    cpu_seconds: float

    @property
    def rows(self) -> float:
        """Rows of a second of the engine's processor time."""
        return self.asked / self.cpu_seconds


def rows_of(work: str, documents: int, seed: int) -> list[dict[str, str]]:
    """The rows of a work in the order of the source, with texts that no other seed has."""
    chance, rows = random.Random(seed), documents * QUESTIONS

    def text(words: int) -> str:
        return f"{chance.getrandbits(60)} " + " ".join(chance.choices(VOCABULARY, k=words))

    if work == "alone":
        return [{"shared": text(WORDS // 8), "question": f"Question {n}."} for n in range(rows)]
    shared = [text(WORDS) for _ in range(documents)] if work == "documents" else [text(WORDS // 3) for _ in range(8)]
    found = [{"shared": shared[n % len(shared)], "question": f"{text(8)} {n}"} for n in range(rows)]
    chance.shuffle(found)
    return found


def in_order(rows: list[dict[str, str]], order: str) -> list[dict[str, str]]:
    """The rows as they are asked."""
    if order in ("source", "prefix"):
        return rows
    within = len(rows) if order == "sorted" else int(order)
    parts = [rows[first : first + within] for first in range(0, len(rows), within)]
    return [row for part in parts for row in sorted(part, key=lambda row: (row["shared"], row["question"]))]


def make_dataset(folder: Path, rows: Sequence[dict[str, str]]) -> DatasetStore:
    """The dataset's snapshot in a new store."""
    (folder / "source.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    attributes: dict[str, Any] = {
        "name": NAME,
        "source": {"path": str(folder / "source.jsonl")},
        "prompt": {"system": "{{ shared }}", "user": "{{ question }}"},
        "model": MODEL,
        "sampling": {"temperature": 0.0, "max_tokens": ANSWER_TOKENS, "extra": {"ignore_eos": True}},
    }
    store = DatasetStore(open_objects(str(folder / "store")), NAME)
    build_snapshot(load_spec(attributes, NAME), store, now=time.time(), workdir=folder / "work")
    return store


async def run(store: DatasetStore, url: str, policy: FeedPolicy | None) -> float:
    """Seconds that a run of all rows is served. `policy`: None is the one that runs have."""
    snapshot = store.current_snapshot()
    assert snapshot is not None
    entries, intent = store.entries(snapshot), Intent("run")
    identity = RunIdentity("run", intent, (entries[0].key, entries[-1].key))
    whole = RangeRun(store, store.manifest(snapshot), plan_range(store, entries, intent), identity, policy=policy)
    began = time.perf_counter()
    assert await whole.prepare()
    await whole.serve(LeasedEngine(url, None, SLOTS, "endpoint", "cpu", lease=Lease("e", 1, "run", NAME)))
    took = time.perf_counter() - began
    assert not whole.missing()
    whole.close()
    return took


def prefix_counts(url: str) -> tuple[int, int]:
    """Prompt tokens that vLLM looked for in its prefix cache, and those that it found, since it began."""
    totals: Counter[str] = Counter()
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as page:
        for line in page.read(16 << 20).decode().splitlines():
            if line.startswith("vllm:prefix_cache_"):
                totals[line.partition("{")[0]] += round(float(line.rpartition(" ")[2]))
    return totals["vllm:prefix_cache_queries_total"], totals["vllm:prefix_cache_hits_total"]


def engine_seconds() -> float:
    """Processor seconds of the engine's processes, which are all children of this one."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return float(sum(one.user + one.system for one in times))


def measure(url: str, work: str, order: str, documents: int, seed: int) -> Figures:
    """One run."""
    with tempfile.TemporaryDirectory() as name:
        rows = in_order(rows_of(work, documents, seed), order)
        store = make_dataset(Path(name), rows)
        (looked, found), seconds = prefix_counts(url), engine_seconds()
        took = asyncio.run(run(store, url, None if order == "prefix" else FeedPolicy()))
        looked, found = (now - before for now, before in zip(prefix_counts(url), (looked, found), strict=True))
        seconds = engine_seconds() - seconds
    return Figures(work, order, len(rows), round(len(rows) / took, 2), looked, looked - found, round(seconds, 2))


def ratios(own: Sequence[float], source: Sequence[float]) -> str:
    """The median of the ratios, turn by turn, and the lowest and highest."""
    found = [one / other for one, other in zip(own, source, strict=False)]
    return f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})" if found else "-"


def summary(figures: Sequence[Figures]) -> list[str]:
    """A line for each work and order; ratios are to the order of the source."""
    lines = ["work       order    rows/s  ratio             rows/s of processor time: ratio  computed prompt tokens"]
    for work in dict.fromkeys(one.work for one in figures):
        source = [one for one in figures if (one.work, one.order) == (work, "source")]
        for order in dict.fromkeys(one.order for one in figures if one.work == work):
            own = [one for one in figures if (one.work, one.order) == (work, order)]
            wall = ratios([one.rows_per_second for one in own], [one.rows_per_second for one in source])
            cpu = ratios([one.rows for one in own], [one.rows for one in source])
            rate = statistics.median(one.rows_per_second for one in own)
            share = sum(one.computed for one in own) / sum(one.prompt_tokens for one in own)
            lines.append(f"{work:10} {order:8} {rate:6.1f}  {wall:17} {cpu:32} {share:.0%}")
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["documents", "alone"])
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), help="source, prefix, sorted, or a number of rows")
    parser.add_argument("--documents", type=int, default=30)
    parser.add_argument("--kv-documents", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    if not asked.vllm_python.exists():
        raise SystemExit(f"{asked.vllm_python} is not there: build it with .ci/install-vllm-cpu, or name another one")
    figures: list[Figures] = []
    with tempfile.TemporaryDirectory() as name:
        more = ["--load-format", "dummy", "--hf-overrides", json.dumps(SHAPE), "--max-num-seqs", str(SLOTS)]
        more += ["--kv-cache-memory-bytes", str(asked.kv_documents * DOCUMENT_TOKENS * KV_BYTES)]
        with vllm_engine(asked.vllm_python, tiny_model(asked.vllm_python, Path(name)), *more) as engine:
            measure(engine.url, "alone", "source", 6, 0)  # the first requests of an engine take longer
            for turn in range(asked.turns):
                for work in asked.works:
                    for order in asked.orders:
                        figures.append(measure(engine.url, work, order, asked.documents, 1 + len(figures)))
                        print(f"turn {turn + 1}: {figures[-1]}", flush=True)
    print("\n".join(summary(figures)))
    if asked.json:
        asked.json.write_bytes(orjson.dumps([asdict(one) for one in figures], option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
