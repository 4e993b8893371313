"""The bill after kills: the usage ledger against the answers that callers got, token for token."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.api_service import ENDED, jsonl, line
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE

from batch_assets.api.billing.usage import Used
from batch_assets.api.billing.usage_journal import FOLDER, apply_left_behind, left_file
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.home_folders import own_folder
from batch_assets.api.database.service_database import Records

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
CALLERS, KILLS, LINES = 4, 2, 700
PRICES = """
models:
  tiny:
    interactive: {input: 0.3, output: 0.9}
    batch: [{within: 1h, input: 0.2, output: 0.6}, {input: 0.1, output: 0.3}]
"""
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


@dataclass
class Service:
    """`batch-assets serve` as a process."""

    home: Path
    endpoint: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    stock: openai.OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.stock = self.new_client()

    def start(self) -> None:
        store = {"DAGSTER_HOME": str(self.home / "home"), "BATCH_ASSETS_STORE": str(self.home / "store")}
        command = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", str(self.port)]
        command += ["--endpoint", self.endpoint, "--max-num-seqs", "16"]
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env={**os.environ, **store}, cwd=ROOT, stdout=log, stderr=log)
        self.wait(lambda: bool(self.client().models.list().data))

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def client(self) -> openai.OpenAI:
        return self.stock

    def new_client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=20)

    def wait(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE * 90
        while True:
            with contextlib.suppress(openai.APIConnectionError):
                if true():
                    return
            assert time.monotonic() < deadline, (self.home / "log").read_text()[-3000:]
            time.sleep(0.05)


@dataclass
class Answers:
    """What interactive callers have got: (input tokens, output tokens) of each answer, and requests that broke."""

    stop: threading.Event = field(default_factory=threading.Event)
    seen: list[tuple[int, int]] = field(default_factory=list)
    broken: int = 0

    def call(self, service: Service, number: int) -> None:
        with service.new_client() as client:
            while not self.stop.is_set():
                try:
                    self.seen.append(self._ask(client, stream=number % 2 == 0))
                except (openai.APIError, httpx2.HTTPError, AssertionError):
                    self.broken += 1
                    time.sleep(0.05)

    @staticmethod
    def _ask(client: openai.OpenAI, *, stream: bool) -> tuple[int, int]:
        asked = client.chat.completions
        if not stream:
            usage = asked.create(**ASK).usage
        else:
            chunks = list(asked.create(**ASK, stream=True, stream_options={"include_usage": True}))
            usage = chunks[-1].usage
        assert usage is not None
        return usage.prompt_tokens, usage.completion_tokens


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "prices.yaml").write_text(PRICES)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine = ("--max-num-seqs", "16", "--output-tokens", "fixed:8", "--weights-ms", "10")
    with simulated_engine(*engine) as running:
        served = Service(tmp_path, running.url, port)
        served.start()
        try:
            yield served
        finally:
            served.stock.close()
            if served.process is not None and served.process.poll() is None:
                served.kill()


def create(service: Service, prefix: str, window: str) -> str:
    lines = [line(f"{prefix}{number}") for number in range(LINES)]
    file = service.client().files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    made: Any = service.client().batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window=window,  # type: ignore[arg-type]
    )
    return str(made.id)


def output_tokens(service: Service, batch_id: str) -> tuple[int, int, int]:
    """(answers, input tokens, output tokens) as the lines of a batch's output file say."""
    batch = service.client().batches.retrieve(batch_id)
    assert batch.status == "completed" and batch.output_file_id is not None
    lines = [json.loads(one) for one in service.client().files.content(batch.output_file_id).text.splitlines()]
    usage = [one["response"]["body"]["usage"] for one in lines]
    found = (len(lines), sum(one["prompt_tokens"] for one in usage), sum(one["completion_tokens"] for one in usage))
    assert batch.usage is not None
    assert (LINES, batch.usage.input_tokens, batch.usage.output_tokens) == found
    return found


def ledger_by_class(home: Path) -> dict[str, Used]:
    records = Records(f"sqlite:///{home}/api.db")
    with contextlib.closing(UsageLedger(records)) as ledger:
        apply_left_behind(own_folder(home / FOLDER, records, left_file), ledger)
        found: dict[str, Used] = {}
        for one in ledger.lines("default"):
            found[one.key.service_class] = found.get(one.key.service_class, Used()).plus(one.used)
    return found


@pytest.mark.soak("losses")
def test_after_kills_the_ledger_says_what_the_answers_say(service: Service, tmp_path: Path) -> None:
    batches = {"batch_1h": create(service, "a", "30m"), "batch": create(service, "b", "24h")}
    answers = Answers()
    callers = [threading.Thread(target=answers.call, args=(service, number)) for number in range(CALLERS)]
    for caller in callers:
        caller.start()
    try:
        for number in range(KILLS):
            goal = (number + 1) * LINES // 3
            service.wait(lambda goal=goal: done(service, batches.values()) > goal)  # type: ignore[misc]
            service.kill()
            service.start()
        service.wait(lambda: ended(service, batches.values()))
    finally:
        answers.stop.set()
        for caller in callers:
            caller.join()
    told = {name: output_tokens(service, batch_id) for name, batch_id in batches.items()}
    costs: Any = service.client().get(f"/organization/costs?start_time={int(time.time()) - 90_000}", cast_to=object)
    service.kill()
    found = ledger_by_class(tmp_path / "home")
    for name, counts in told.items():
        used = found.pop(name)
        assert (used.requests, used.input_tokens, used.output_tokens) == counts, name
        prices = (200_000, 600_000) if name == "batch_1h" else (100_000, 300_000)
        assert used.amount == counts[1] * prices[0] + counts[2] * prices[1]
    used = found.pop("interactive")
    assert found == {} and answers.broken > 0 and len(answers.seen) > 10
    # Each answer has the same tokens. What was under way at a kill may be written down and not have arrived.
    (each,) = set(answers.seen)
    counted = used.requests - used.unmetered
    assert len(answers.seen) <= counted <= len(answers.seen) + KILLS * CALLERS
    assert (used.input_tokens, used.output_tokens) == (counted * each[0], counted * each[1])
    assert used.amount == counted * (each[0] * 300_000 + each[1] * 900_000)
    assert sum(bucket["results"][0]["amount"]["value"] for bucket in costs["data"] if bucket["results"]) > 0


def done(service: Service, batch_ids: Any) -> int:
    counts = [service.client().batches.retrieve(one).request_counts for one in batch_ids]
    return sum(count.completed for count in counts if count is not None)


def ended(service: Service, batch_ids: Any) -> bool:
    return all(service.client().batches.retrieve(one).status in ENDED for one in batch_ids)
