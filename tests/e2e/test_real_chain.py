"""The example of a chain with a small real model, by one command and by a person in a browser.

`make weights && pytest -m slow tests/e2e/test_real_chain.py`. Nothing here can be known beforehand: a real model writes
the questions. So what was asked, as a log in front of the engine has it, is compared with what the tables say.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import load_dataset
from support.llama_cpp import llama_cpp_server
from support.real_models import smollm2

import batch_assets
from e2e.browser import browser, needs_chromium
from e2e.command_line import CommandProject
from e2e.command_line import site as new_site
from e2e.harness import REPOSITORY, eventually
from gpu_runner.providers.engine_process import EngineProcess, free_port
from resources.store.dataset_store import DatasetStore

pytestmark = [pytest.mark.soak("dagster"), pytest.mark.timeout(3000)]

MODEL = "SmolLM2-135M-Instruct"
STEPS = ("questions", "answers", "judge")
CHAIN_SECONDS = 300


@dataclass
class RequestLog:
    """Passes everything on to an engine on loopback, and keeps each chat that it was asked for."""

    port: int
    chats: list[dict[str, Any]] = field(default_factory=list)

    def taken(self) -> Counter[str]:
        """What was asked since the last call: the last message of each request, and how often."""
        found = Counter(chat["messages"][-1]["content"] for chat in self.chats)
        self.chats.clear()
        return found

    @contextlib.contextmanager
    def listening(self) -> Iterator[str]:
        """Its address."""
        log = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.path.endswith("/chat/completions"):
                    log.chats.append(json.loads(body))
                connection = HTTPConnection("127.0.0.1", log.port, timeout=600)
                with contextlib.closing(connection):
                    connection.request(self.command, self.path, body, {"content-type": "application/json"})
                    answer = connection.getresponse()
                    found = answer.read()
                with contextlib.suppress(ConnectionError):  # who asked for a page has left
                    self.send_response(answer.status)
                    self.send_header("content-type", answer.getheader("content-type") or "text/plain")
                    self.send_header("content-length", str(len(found)))
                    self.end_headers()
                    self.wfile.write(found)

            do_GET = do_POST = _pass_on

            def log_message(self, *words: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


@dataclass
class Chain:
    """The example's files in a home of their own, and every request that reaches the engine."""

    site: CommandProject
    log: RequestLog
    engine: EngineProcess

    def rewrite(self, file: str, old: str, new: str) -> None:
        path = self.site.folder / "defs" / "preferences" / file
        text = path.read_text()
        assert old in text, f"{old!r} is not in {file}"
        path.write_text(text.replace(old, new))

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """The published tables of all steps."""
        store = self.site.environment["BATCH_ASSETS_STORE"]
        return {name: batch_assets.table(name, store=store).arrow().to_pylist() for name in STEPS}

    def version(self) -> str | None:
        """Of the last step's table."""
        return DatasetStore(self.site.store.objects, "judge").current_published()


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    with llama_cpp_server(smollm2(), MODEL, "--context", "1024") as engine, new_site(tmp_path) as site:
        log = RequestLog(engine.port)
        shutil.rmtree(tmp_path / "defs")
        shutil.copytree(REPOSITORY / "examples" / "chain" / "defs", tmp_path / "defs")
        with log.listening() as url:
            entry = {"name": "cpu", "kind": "endpoint", "url": url, "max_num_seqs": 16}
            (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"engines": [entry]}))
            found = Chain(site, log, engine)
            found.rewrite("defs.yaml", "Qwen/Qwen3-0.6B", MODEL)
            yield found


def topic(step: str, row: dict[str, Any]) -> str:
    """The topic that a row was made of."""
    return str(json.loads(row["row_id"])[0] if step == "judge" else row["topic"])


def asked_for(rows: list[dict[str, Any]]) -> Counter[str]:
    """What an engine is asked to make these rows."""
    found: Counter[str] = Counter()
    for row in rows:
        found[row["prompt"][-1]["content"]] += row["tries"]
    return found


def check_shape(found: dict[str, list[dict[str, Any]]], topics: int) -> None:
    """Three answers to each question; a judgement of each question of a topic that has two answers or more."""
    assert len(found["questions"]) == topics
    asked = [json.loads(row["output"])["questions"] for row in found["questions"] if row["error"] is None]
    assert len(found["answers"]) == 3 * sum(map(len, asked)) > 0
    answered = Counter((row["topic"], row["questions"]) for row in found["answers"] if row["error"] is None)
    assert len(found["judge"]) == sum(count > 1 for count in answered.values()) > 0


def refreshes(chain: Chain, refresh: Callable[[], None]) -> None:
    """The whole chain, two other topics, one topic less, another judge: each time the rows below are asked alone."""
    refresh()
    before = chain.tables()
    check_shape(before, 4)
    assert chain.log.taken() == asked_for([row for rows in before.values() for row in rows])

    chain.rewrite("topics.csv", "tides,a child of ten", "tides,a sailor")
    chain.rewrite("topics.csv", "vaccines,a worried parent", "vaccines,a student of biology")
    refresh()
    after, changed = chain.tables(), {"tides", "vaccines"}
    below = [row for step in STEPS for row in after[step] if topic(step, row) in changed]
    check_shape(after, 4)
    assert chain.log.taken() == asked_for(below)
    for step in STEPS:
        kept = [row for row in before[step] if topic(step, row) not in changed]
        assert [row for row in after[step] if topic(step, row) not in changed] == kept and kept

    chain.rewrite("topics.csv", "photosynthesis,a gardener\n", "")
    refresh()
    fewer = chain.tables()
    check_shape(fewer, 3)
    assert chain.log.taken() == Counter()
    assert all(row in after[step] for step in STEPS for row in fewer[step])

    chain.rewrite("defs.yaml", "Which answer is the best", "Which answer is the most helpful")
    refresh()
    judged = chain.tables()
    assert {step: judged[step] for step in STEPS[:2]} == {step: fewer[step] for step in STEPS[:2]}
    assert chain.log.taken() == asked_for(judged["judge"])
    assert all("most helpful" in row["prompt"][-1]["content"] for row in judged["judge"])
    check_shape(judged, 3)

    read = ["prompt=question", "chosen=answers[best]", "rejected=answers[worst]"]
    to = str(chain.site.folder / "pairs")
    maps = [word for field in read for word in ("--map", field)]
    status, _ = chain.site.ask("export", "judge", "--format", "preference", "--to", to, *maps)
    pairs = load_dataset(to, split="train", cache_dir=str(chain.site.folder / "cache"))
    given = {(row["question"], answer) for row in judged["judge"] for answer in row["answers"]}
    assert status == 0 and 0 < len(pairs) <= len(judged["judge"])
    assert all({(one["prompt"], one["chosen"]), (one["prompt"], one["rejected"])} <= given for one in pairs)
    assert all(one["chosen"] != one["rejected"] for one in pairs)


def test_by_one_command(chain: Chain) -> None:
    def refresh() -> None:
        command = chain.site.start("run", "judge", "--upstream")
        assert command.end(CHAIN_SECONDS)[0] == 0, command.said()

    refreshes(chain, refresh)


@needs_chromium
def test_by_a_person_in_a_browser(chain: Chain, tmp_path: Path) -> None:
    port = free_port()
    served = chain.site.start("ui", "--port", str(port))

    def refresh() -> None:
        version = chain.version()
        ui.open("/deployment/locations")
        ui.press("Reload")
        ui.open("/locations/batch_assets/jobs/judge_refresh_upstream")
        ui.press("Materialize")
        eventually(lambda: chain.version() != version, CHAIN_SECONDS, "another table of the judge", every=1)
        ui.open_asset("dataset", "checks")
        eventually(lambda: "batches_current" in ui.text(), 30, "the checks of the table")

    try:
        eventually(lambda: "Ctrl-C ends it" in served.said() + served.output.read_text(), 60, "the UI")
        with browser(f"http://127.0.0.1:{port}", "judge", tmp_path) as ui:
            refreshes(chain, refresh)
    finally:
        served.interrupt()
        served.end(60)
