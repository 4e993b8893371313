"""The example of a chain with a small real model, by one command and by a person in a browser.

`make weights && pytest -m slow tests/e2e/test_real_chain.py`. Nothing here can be known beforehand: a real model writes
the questions. So what was asked, as a log in front of the engine has it, is compared with what the tables say.
"""

from __future__ import annotations

import contextlib
import json
import os
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
from support.local_hub import TOKEN, LocalHub, local_hub
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
STEPS = ("questions", "answers", "scores")
CHAIN_SECONDS = 300
TOPICS = ["bread", "rain", "trains", "honey", "chess", "glass", "bridges", "music", "paper", "salt", "horses", "wind"]
TOPICS += ["clocks", "tea", "ships", "gardens", "rivers", "lamps", "wool", "maps", "snow", "coffee", "owls", "bees"]


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

    @property
    def folder(self) -> Path:
        """Where the example's files are."""
        return self.site.folder / "defs" / "preferences"

    def change(self, name: str, **attributes: Any) -> None:
        """Other attributes of a dataset; None: without them."""
        file = self.folder / "defs.yaml"
        documents = list(yaml.safe_load_all(file.read_text()))
        (found,) = (one["attributes"] for one in documents if one["attributes"]["name"] == name)
        found |= attributes
        for key in [key for key, value in attributes.items() if value is None]:
            del found[key]
        file.write_text(yaml.safe_dump_all(documents))

    def rewrite(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        text = path.read_text()
        assert old in text, f"{old!r} is not in {file}"
        path.write_text(text.replace(old, new))

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """The published tables of all steps."""
        store = self.site.environment["BATCH_ASSETS_STORE"]
        return {name: batch_assets.table(name, store=store).arrow().to_pylist() for name in STEPS}

    def exported(self, name: str) -> dict[str, list[dict[str, Any]]]:
        """The records of an export, by their split, as `datasets` reads its folder."""
        place = self.site.folder / "store" / "scores" / "exports" / name
        files = place / (place / "CURRENT").read_text()
        found = load_dataset(str(files), cache_dir=str(self.site.folder / "cache"))
        return {split: list(records) for split, records in found.items()}

    def version(self) -> str | None:
        """Of the last step's table."""
        return DatasetStore(self.site.store.objects, "scores").current_published()


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


def asked_for(rows: list[dict[str, Any]]) -> Counter[str]:
    """What an engine is asked to make these rows."""
    found: Counter[str] = Counter()
    for row in rows:
        found[row["prompt"][-1]["content"]] += row["tries"]
    return found


def check_shape(found: dict[str, list[dict[str, Any]]], topics: int) -> None:
    """Three answers to each question; a vote on each answer that there is."""
    assert len(found["questions"]) == topics
    asked = [json.loads(row["output"])["questions"] for row in found["questions"] if row["error"] is None]
    assert len(found["answers"]) == 3 * sum(map(len, asked)) > 0
    assert len(found["scores"]) == sum(row["error"] is None for row in found["answers"]) > 0


def refreshes(chain: Chain, refresh: Callable[[], None]) -> None:
    """The whole chain, two other topics, one topic less, another judge: each time the rows below are asked alone."""
    chain.change("answers", want=None)  # all rows, so that those below a change are known
    refresh()
    before = chain.tables()
    check_shape(before, 4)
    assert chain.log.taken() == asked_for([row for rows in before.values() for row in rows])

    chain.rewrite("topics.csv", "tides,a child of ten", "tides,a sailor")
    chain.rewrite("topics.csv", "vaccines,a worried parent", "vaccines,a student of biology")
    refresh()
    after, changed = chain.tables(), {"tides", "vaccines"}
    below = [row for step in STEPS for row in after[step] if row["topic"] in changed]
    check_shape(after, 4)
    assert chain.log.taken() == asked_for(below)
    for step in STEPS:
        kept = [row for row in before[step] if row["topic"] not in changed]
        assert [row for row in after[step] if row["topic"] not in changed] == kept and kept

    chain.rewrite("topics.csv", "photosynthesis,a gardener\n", "")
    refresh()
    fewer = chain.tables()
    check_shape(fewer, 3)
    assert chain.log.taken() == Counter()
    assert all(row in after[step] for step in STEPS for row in fewer[step])

    chain.rewrite("defs.yaml", "A good answer is true", "A most helpful answer is true")
    refresh()
    judged = chain.tables()
    assert {step: judged[step] for step in STEPS[:2]} == {step: fewer[step] for step in STEPS[:2]}
    assert chain.log.taken() == asked_for(judged["scores"])
    assert all("most helpful" in row["prompt"][-1]["content"] for row in judged["scores"])
    check_shape(judged, 3)

    pairs = chain.exported("pairs")["train"]
    given = {(row["questions"], row["output"]) for row in judged["answers"]}
    assert len(pairs) <= sum(map(len, (json.loads(row["output"])["questions"] for row in judged["questions"])))
    for one in pairs:
        (asked, better), (_, worse) = ((one["questions"], one[key][0]["content"]) for key in ("chosen", "rejected"))
        assert {(asked, better), (asked, worse)} <= given and better != worse


def wants(chain: Chain, rows: int, hub: LocalHub) -> dict[str, str]:
    """Have the example want so many rows, of topics enough, and push its files; returns what the command's environment
    is. The judge is a tiny one: its scores are drawn, so that some rows pass and some do not."""
    topics = [f"{one} {of}" for of in ("in history", "at home", "in nature", "for children") for one in TOPICS]
    needed = max(8, rows // 6)  # of which each makes 18 answers; of these a third passes, or more
    lines = [f"{one},a child of ten" for one in topics[:needed]]
    (chain.folder / "topics.csv").write_text("\n".join(["topic,audience", *lines, ""]))
    batch = {"batch_rows": max(9, rows // 10)}
    short = {"temperature": 1.0, "seed": 7, "max_tokens": 32}
    chain.change("answers", want={"rows": rows, "accepted_by": "scores"}, samples=6, sampling=short, **batch)
    judge = {"dataset": "answers", "rubric": "A good answer is true.", "scale": [1, 10], "reason": False}
    exports = [
        {"name": "sft", "format": "messages", "passed": True, "validation": 0.2, "split_by": "topic"},
        {"name": "pairs", "format": "preference", "judged": True, "group_by": "questions", "rank_by": "score"},
    ]
    for one in exports:
        one |= {"columns": ["topic", "questions"], "push": {"repo": f"me/{one['name']}"}}
    drawn = {"temperature": 1.0, "seed": 7, "max_tokens": 40}
    chain.change("scores", judge={**judge, "accept": "score >= 5"}, sampling=drawn, exports=exports, **batch)
    for step in ("questions", "scores"):
        chain.change(step, checks={"max_dead_rate": 0.1})  # now and then so small a model writes no list, or no score
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}


def check_accepted(chain: Chain, hub: LocalHub, rows: int) -> None:
    """So many rows are accepted; the files have these, a trainer can read them, and the hub has the files."""
    store = chain.site.environment["BATCH_ASSETS_STORE"]
    passed = batch_assets.table("scores", store=store, passed=True).arrow().to_pylist()
    judged = batch_assets.table("scores", store=store, judged=True).arrow().to_pylist()
    made = chain.tables()["answers"]
    print(f"{rows} wanted: {len(passed)} accepted of {len(judged)} judged, {len(made)} made")
    assert len(passed) == rows and all(row["score"] >= 5 for row in passed)
    assert len({row["output"].casefold() for row in passed}) == rows, "the filter takes equal answers out"
    assert {row["row_id"] for row in judged} == {row["row_id"] for row in made if row["error"] is None}

    files, pairs = chain.exported("sft"), chain.exported("pairs")["train"]
    assert sum(map(len, files.values())) == rows
    sides = [{one["topic"] for one in files.get(split, [])} for split in ("train", "validation")]
    assert not sides[0] & sides[1], "no topic is on both sides"
    answers = {(row["questions"], row["output"]) for row in passed}
    template = chat_template()
    for one in [one for records in files.values() for one in records]:
        text = template.render(messages=one["messages"], add_generation_prompt=False)
        answer = one["messages"][-1]["content"]
        assert f"<|im_start|>assistant\n{answer}<|im_end|>" in text
        assert (one["questions"], answer) in answers
    scores = {(row["questions"], row["output"]): row["score"] for row in judged}
    assert pairs, "some questions have a better answer and a worse one"
    for one in pairs:
        better, worse = (scores[one["questions"], one[key][0]["content"]] for key in ("chosen", "rejected"))
        assert better > worse

    for name, count in (("sft", rows), ("pairs", len(pairs))):
        pushed = hub.files(f"me/{name}")
        place = Path(store) / "scores" / "exports" / name
        here = place / (place / "CURRENT").read_text()
        ours = {f"data/{file.name}": file.read_bytes() for file in here.glob("*.jsonl")}
        assert {file: data for file, data in pushed.items() if file.startswith("data/")} == ours
        assert sum(data.count(b"\n") for data in ours.values()) == count
        assert hub.commits(f"me/{name}") == 1, "it is pushed once, when enough are accepted"
        assert MODEL in pushed["README.md"].decode()


def test_accepted_rows_become_training_files_in_a_repository(chain: Chain, tmp_path: Path) -> None:
    """BATCH_ASSETS_ACCEPTED_ROWS: how many are wanted."""
    rows = int(os.environ.get("BATCH_ASSETS_ACCEPTED_ROWS") or 40)
    with local_hub(tmp_path / "hub") as hub:
        command = chain.site.start("run", "scores", "--upstream", "--json", **wants(chain, rows, hub))
        status, output = command.end(60 * rows)
        assert status == 0, command.said()
        assert [one["dataset"] for one in json.loads(output)["steps"]] == list(STEPS)
        check_accepted(chain, hub, rows)


@needs_chromium
def test_accepted_rows_by_a_person_in_a_browser(chain: Chain, tmp_path: Path) -> None:
    port, rows = free_port(), 12
    with local_hub(tmp_path / "hub") as hub:
        served = chain.site.start("ui", "--port", str(port), **wants(chain, rows, hub))
        try:
            eventually(lambda: "Ctrl-C ends it" in served.said() + served.output.read_text(), 60, "the UI")
            with browser(f"http://127.0.0.1:{port}", "scores", tmp_path) as ui:
                ui.open("/locations/batch_assets/jobs/scores_refresh_upstream")
                ui.press("Materialize")
                eventually(lambda: len(hub.repositories) == 2, 2 * CHAIN_SECONDS, "two repositories", every=1)
                eventually(lambda: all(map(hub.commits, hub.repositories)), CHAIN_SECONDS, "what is pushed", every=1)
                check_accepted(chain, hub, rows)
                for name in ("judged", "passed", "exports/sft"):
                    ui.open_asset(name)
                    eventually(lambda: "rows" in ui.metadata(), 60, "the metadata of the files")
                    ui.shot(name.replace("/", "-"))
                assert "me/sft" in ui.text()
                ui.page.set_viewport_size({"width": 2200, "height": 760})
                ui.open_asset("exports/sft", "lineage", lineageScope="upstream", lineageDepth="50")
                ui.page.locator("svg foreignObject").first.wait_for()
                ui.page.wait_for_timeout(10_000)  # until the boxes have their colours
                ui.shot("accepted-lineage")
        finally:
            served.interrupt()
            served.end(60)


def chat_template() -> Any:
    """What `apply_chat_template` renders: the template that the weights bring along, in Jinja."""
    from gguf import GGUFReader
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = GGUFReader(smollm2()).fields["tokenizer.chat_template"].contents()
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)


def test_by_one_command(chain: Chain) -> None:
    def refresh() -> None:
        command = chain.site.start("run", "scores", "--upstream")
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
        ui.open("/locations/batch_assets/jobs/scores_refresh_upstream")
        ui.press("Materialize")
        eventually(lambda: chain.version() != version, CHAIN_SECONDS, "another table of votes", every=1)
        ui.open_asset("dataset", "checks")
        eventually(lambda: "batches_current" in ui.text(), 30, "the checks of the table")

    try:
        eventually(lambda: "Ctrl-C ends it" in served.said() + served.output.read_text(), 60, "the UI")
        with browser(f"http://127.0.0.1:{port}", "scores", tmp_path) as ui:
            refreshes(chain, refresh)
    finally:
        served.interrupt()
        served.end(60)
