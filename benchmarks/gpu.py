"""What this platform gets out of a real engine on a real GPU, beside what the engine can do and what sizing said.

    vllm serve MODEL --max-num-seqs 1024 &    # on a machine with a GPU; --load-format dummy needs no weights
    python -m benchmarks.gpu predict --endpoint http://127.0.0.1:8000 --model MODEL --gpu H100 --memory-gib 80
    python -m benchmarks.gpu client  --endpoint http://127.0.0.1:8000 --model MODEL --prompts prompts.jsonl --rows 8000
    python -m benchmarks.gpu feed    --endpoint http://127.0.0.1:8000 --model MODEL --prompts prompts.jsonl --rows 8000
    python -m benchmarks.gpu dataset --endpoint http://127.0.0.1:8000 --model MODEL --name DATASET
    python -m benchmarks.gpu watch   --endpoint http://127.0.0.1:8000 --command 'vllm bench serve …'

`client` sends the rows with a plain loop, 4 × slots at any time; `feed` sends them through the row feed; `dataset` is
`batch-assets run` of a declared dataset, table and verification included; `watch` runs any other load generator. All
print the same line, read from the engine's own counters twice a second: tokens per second from the first to the last
token, the same while the engine was full, and the GPU's utilisation as nvidia-smi shows it. `predict` compares KV cache
and speed with those of `gpu_runner.models` and `gpu_runner.offers`. Prompts: JSONL with a column `prompt`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks import feed as feed_benchmark
from gpu_runner.client.engine_client import BATCH_PRIORITY, EngineClient
from gpu_runner.inference.feed import Feed
from gpu_runner.models.facts import facts_of
from gpu_runner.models.known import built_in
from gpu_runner.models.model_files import read_folder
from gpu_runner.models.sizing import Serving, catalog_gpu, kv_cache_bytes, kv_tokens
from gpu_runner.offers.gpus import find_sheet
from gpu_runner.offers.speed import LengthMix, NoSpeed, estimate_speed
from gpu_runner.rows import Batch, Generation, Origin, Outcome, Row

BATCH = 250
EVERY_SECONDS = 0.5
SAMPLING = '{"temperature": 1.0, "max_tokens": 128, "ignore_eos": true}'
FULL = 0.9  # of the most sequences that ran at once: the engine counts as full


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine's counters at one moment (seconds of the monotonic clock); `gpu` is nvidia-smi's percentage."""

    at: float
    generated: float
    prompt: float
    prefix_hits: float
    running: float
    waiting: float
    kv_usage: float
    preemptions: float
    gpu: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """One load. Tokens are those of the engine's counters; `full_*`: while at least 0.9 of the most sequences ran."""

    name: str
    wall_seconds: float
    busy_seconds: float
    generated: float
    prompt: float
    prefix_hits: float
    generated_per_second: float
    full_seconds: float
    full_generated_per_second: float
    full_tokens_per_second: float
    most_running: float
    most_waiting: float
    most_kv_usage: float
    preemptions: float
    gpu_percent: float | None


COUNTERS = {
    "generated": "vllm:generation_tokens_total",
    "prompt": "vllm:prompt_tokens_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total",
}


def metrics_page(endpoint: str) -> str:
    """The engine's Prometheus page."""
    with urllib.request.urlopen(f"{endpoint}/metrics", timeout=30) as answer:
        return str(answer.read(8 << 20), "utf-8")


def counter(page: str, name: str) -> float:
    """The sum of a metric over its labels; 0 where the engine does not have it."""
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE))


def gpu_percent() -> float | None:
    """Utilisation of the first GPU, None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()[0])


class Watch(threading.Thread):
    """Samples the engine until `stop`."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="watch", daemon=True)
        self.samples: list[Sample] = []
        self._endpoint = endpoint
        self._ended = threading.Event()

    def look(self) -> None:
        """One sample."""
        page, at = metrics_page(self._endpoint), time.monotonic()
        counters = {key: counter(page, name) for key, name in COUNTERS.items()}
        self.samples.append(Sample(at, **counters, gpu=gpu_percent()))

    def run(self) -> None:
        """A sample every half second; an engine that is too busy to answer is asked again."""
        while not self._ended.wait(EVERY_SECONDS):
            with contextlib.suppress(OSError):
                self.look()

    def stop(self) -> None:
        """End the thread; one more sample, so that the counters are complete."""
        self._ended.set()
        self.join()
        self.look()


def figures(name: str, samples: list[Sample]) -> Figures:
    """What the samples say of the load between the first and the last of them."""
    first, last = samples[0], samples[-1]
    steps = [(a, b) for a, b in itertools.pairwise(samples) if b.generated > a.generated]
    most = max(sample.running for sample in samples)
    full = [(a, b) for a, b in steps if min(a.running, b.running) >= FULL * most]
    busy = steps[-1][1].at - steps[0][0].at if steps else 0.0
    seconds = sum(b.at - a.at for a, b in full)
    generated = sum(b.generated - a.generated for a, b in full)
    prompt = sum(b.prompt - a.prompt for a, b in full)
    seen = [b.gpu for _, b in steps if b.gpu is not None]
    return Figures(
        name,
        wall_seconds=last.at - first.at,
        busy_seconds=busy,
        generated=last.generated - first.generated,
        prompt=last.prompt - first.prompt,
        prefix_hits=last.prefix_hits - first.prefix_hits,
        generated_per_second=(last.generated - first.generated) / busy if busy else 0.0,
        full_seconds=seconds,
        full_generated_per_second=generated / seconds if seconds else 0.0,
        full_tokens_per_second=(generated + prompt) / seconds if seconds else 0.0,
        most_running=most,
        most_waiting=max(sample.waiting for sample in samples),
        most_kv_usage=max(sample.kv_usage for sample in samples),
        preemptions=last.preemptions - first.preemptions,
        gpu_percent=statistics.mean(seen) if seen else None,
    )


def watched(name: str, endpoint: str, work: Callable[[], object]) -> Figures:
    """Do the work and say what the engine did in that time."""
    watch = Watch(endpoint)
    watch.look()
    watch.start()
    try:
        work()
    finally:
        watch.stop()
    return figures(name, watch.samples)


def prompts(path: Path, rows: int) -> list[str]:
    """The first prompts of a file."""
    with path.open() as lines:
        return [json.loads(line)["prompt"] for _, line in zip(range(rows), lines, strict=False)]


def batches(texts: list[str]) -> Iterator[Batch]:
    """Chat rows in batches of 250."""
    for start in range(0, len(texts), BATCH):
        key = f"{start // BATCH:06}"
        messages = [orjson.dumps([{"role": "user", "content": text}]) for text in texts[start : start + BATCH]]
        yield Batch(key, tuple(Row(key, f"{key}-{i}", f"{key}-{i}", prompt) for i, prompt in enumerate(messages)))


async def through_feed(endpoint: str, model: str, texts: list[str], sampling: dict[str, Any], slots: int | None) -> int:
    """Bring the rows through the row feed, without a store; returns how many were answered."""

    async def drop(job: str, key: str, outcomes: list[Outcome]) -> None:
        """Batches are not kept."""

    row_feed = Feed(batches(texts), on_row=lambda job, key, outcome: None, on_batch=drop)
    async with EngineClient(endpoint, Generation("chat", model, sampling), priority=BATCH_PRIORITY) as client:
        await client.info()
        await row_feed.serve(client, Origin(model, "vllm", "endpoint", "none", False, "bench"), slots)
    return row_feed.counts.ok


def run_load(options: argparse.Namespace) -> Figures:
    """The load that the command line names."""
    sampling = json.loads(options.sampling)
    if options.load == "watch":
        return watched(options.label, options.endpoint, lambda: subprocess.run(options.command, check=True))
    if options.load == "dataset":
        words = [sys.executable, "-m", "batch_assets.cli.main", "run", options.name, "--endpoint", options.endpoint]
        words += ["--model", options.model, "--no-progress", "--json"]
        return watched(f"batch-assets run {options.name}", options.endpoint, lambda: subprocess.run(words, check=True))
    texts = prompts(options.prompts, options.rows)
    if options.load == "feed":
        sent = through_feed(options.endpoint, options.model, texts, sampling, options.slots)
        return watched("feed", options.endpoint, lambda: asyncio.run(sent))
    fixed = {"model": options.model, **sampling}
    bodies = [orjson.dumps({**fixed, "messages": [{"role": "user", "content": text}]}) for text in texts]
    at_once = 4 * (options.slots or 1024)
    return watched(
        "plain client", options.endpoint, lambda: asyncio.run(feed_benchmark.client(options.endpoint, bodies, at_once))
    )


def predict(options: argparse.Namespace) -> None:
    """Print what sizing says, beside what the engine says of itself."""
    config = read_folder(options.folder) if options.folder else built_in(options.model)
    if config is None:
        raise SystemExit(f"{options.model}: shapes unknown; name the folder of its config.json with --folder")
    page = metrics_page(options.endpoint)
    blocks = re.search(r"^vllm:cache_config_info\{(.*)\}", page, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', blocks.group(1))) if blocks else {}
    serving = Serving(max_num_seqs=options.slots or 1024, max_batched_tokens=options.batched_tokens)
    if "gpu_memory_utilization" in labels:
        serving = Serving(
            max_num_seqs=serving.max_num_seqs,
            max_batched_tokens=serving.max_batched_tokens,
            memory_utilization=float(labels["gpu_memory_utilization"]),
        )
    expected = kv_tokens(config, kv_cache_bytes(config, catalog_gpu(options.gpu, options.memory_gib), serving), serving)
    found = int(labels.get("num_gpu_blocks", 0)) * int(labels.get("block_size", 0))
    share = serving.memory_utilization
    print(f"KV cache, tokens: predicted {expected:,}, engine {found:,} (gpu_memory_utilization {share})")
    mix = LengthMix(*options.mix)
    sheet = find_sheet(options.gpu, options.memory_gib)
    if sheet is None:
        raise SystemExit(f"{options.gpu} with {options.memory_gib} GiB has no datasheet here")
    speed = estimate_speed(facts_of(options.model, config, mix.tokens), sheet, options.memory_gib, 1, mix)
    if isinstance(speed, NoSpeed):
        raise SystemExit(speed.reason)
    rows = speed.tokens_per_second / mix.tokens
    print(f"{mix}: predicted {speed.tokens_per_second:,.0f} tokens/s, {rows * mix.output_tokens:,.0f} generated/s")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", choices=("client", "feed", "dataset", "watch", "predict"))
    parser.add_argument("--endpoint", required=True, help="address of the engine, without /v1")
    parser.add_argument("--model", default="", help="as the engine serves it")
    parser.add_argument("--prompts", type=Path, help="JSONL file")
    parser.add_argument("--rows", type=int, default=8_000)
    parser.add_argument("--slots", type=int, help="the engine's max_num_seqs; found out when left out")
    parser.add_argument("--sampling", default=SAMPLING, help="JSON")
    parser.add_argument("--name", help="of a declared dataset")
    parser.add_argument("--label", default="watched")
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--memory-gib", type=float, default=80.0)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--mix", type=float, nargs=2, default=(120.0, 128.0), help="mean prompt and output tokens")
    parser.add_argument("--folder", type=Path, help="of the model's config.json")
    parser.add_argument("--json", type=Path, help="append the figures here too")
    parser.add_argument("--command", type=shlex.split, help="of the load generator to watch")
    options = parser.parse_args()
    if options.load == "predict":
        return predict(options)
    found = asdict(run_load(options))
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}))
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
