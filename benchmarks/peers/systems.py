"""Who does the works: the environment of each, its command, and where its answers lie."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import duckdb
import yaml

from batch_assets.publishing.published_table import published_table
from benchmarks.peers.works import SLOTS, vllm_environment, vllm_flags
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

HERE = Path(__file__).parent
NAME = "peers"  # of our dataset
PROJECT, VLLM = "project", "vllm"  # environments that are built elsewhere
Answers = list[tuple[str, str | None]]
"""Ids and outputs, as the durable output has them."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a system gets: files of rows, an engine's address, a folder of its own."""

    rows: str
    lines: str
    url: str
    model: str
    max_tokens: int
    in_flight: int
    folder: str
    model_folder: str = ""

    def file(self) -> str:
        """The task as the argument of a `run_*.py`."""
        path = Path(self.folder) / "task.json"
        path.write_text(json.dumps(asdict(self)))
        return str(path)


@dataclass(frozen=True, slots=True)
class System:
    """One way to have rows answered.

    `environment`: folder of its virtual environment, PROJECT or VLLM; `packages`: what is installed there; `module`:
    what must be importable. `cannot`: works that it cannot do, with the reason. `own_engine`: it starts vLLM itself.
    `in_flight`: requests at a time, where that is faster than what the others get.
    """

    name: str
    label: str
    module: str
    command: Callable[[str, Task], list[str]]
    answers: Callable[[Task], Answers]
    environment: str = PROJECT
    packages: tuple[str, ...] = ()
    prepare: Callable[[Task], None] = lambda task: None
    variables: Callable[[Task], Mapping[str, str]] = lambda task: {}
    cannot: Mapping[str, str] = field(default_factory=dict)
    own_engine: bool = False
    in_flight: int = 4 * SLOTS

    def python(self, environments: Path, vllm: Path) -> str:
        """Its Python."""
        known = {PROJECT: sys.executable, VLLM: str(vllm)}
        return known.get(self.environment) or str(environments / self.environment / "bin" / "python")

    def missing(self, environments: Path, vllm: Path) -> str | None:
        """Why it cannot run here, or None."""
        python = self.python(environments, vllm)
        if not Path(python).exists():
            return f"no environment {environments / self.environment}: run again with --install"
        done = subprocess.run([python, "-c", f"import {self.module}"], capture_output=True, text=True, timeout=120)
        return f"{python} cannot import {self.module}: {done.stderr.strip()[-200:]}" if done.returncode else None


def script(name: str, *words: str) -> Callable[[str, Task], list[str]]:
    """The command of a `run_*.py`."""
    return lambda python, task: [python, str(HERE / f"run_{name}.py"), task.file(), *words]


def select(query: str) -> Callable[[Task], Answers]:
    """Answers by SQL; `$folder` is the system's folder."""

    def answers(task: Task) -> Answers:
        with duckdb.connect() as connection:
            return connection.execute(query.replace("$folder", task.folder)).fetchall()

    return answers


JSON_LINES = "SELECT id, output FROM read_json('$folder/answers.jsonl', columns={id: 'VARCHAR', output: 'VARCHAR'})"
PARQUET = "SELECT id, output FROM read_parquet('$folder/table/**/*.parquet')"
BATCH_OUTPUT = """SELECT line->>'custom_id', line->>'$.response.body.choices[0].message.content'
    FROM read_csv('$folder/output.jsonl', columns={line: 'JSON'}, delim='\\x01', quote='', escape='', header=false)"""


DATATROVE = """SELECT id, metadata.rollout_results[1].text
    FROM read_json('$folder/output/*.jsonl', union_by_name=true, maximum_object_size=67108864)"""


def declare(task: Task) -> None:
    """A dataset of the rows, in a new project folder."""
    first = json.loads(Path(task.rows).read_text().partition("\n")[0])
    prompt = {"system": "{{ system }}"} if first["system"] else {}
    attributes = {
        "name": NAME,
        "source": {"path": task.rows},
        "prompt": {**prompt, "user": "{{ user }}"},
        "model": task.model,
        "sampling": {"temperature": 0.0, "max_tokens": task.max_tokens},
        "keep_columns": ["id"],
        "gates": dict.fromkeys(("max_cut_rate", "max_repeated_rate", "max_empty_rate")),
    }
    folder = Path(task.folder) / "defs" / NAME
    folder.mkdir(parents=True)
    document = {"type": "batch_assets.GeneratedDataset", "attributes": attributes}
    (folder / "defs.yaml").write_text(yaml.safe_dump(document))
    (Path(task.folder) / "home").mkdir()


def our_variables(task: Task) -> dict[str, str]:
    """A home, a store and a project of their own."""
    folder = Path(task.folder)
    found = {
        "DAGSTER_HOME": folder / "home",
        "BATCH_ASSETS_STORE": folder / "data",
        "BATCH_ASSETS_DEFS": folder / "defs",
    }
    return {name: str(path) for name, path in found.items()}


def our_table(task: Task) -> Answers:
    """The published table."""
    store = DatasetStore(open_objects(our_variables(task)["BATCH_ASSETS_STORE"]), NAME)
    table = published_table(store)
    if table is None:
        return []
    with duckdb.connect() as connection:
        return connection.execute("SELECT id, output FROM read_parquet(?)", [table.glob(store.objects)]).fetchall()


def our_run(python: str, task: Task) -> list[str]:
    """`batch-assets run`, verified."""
    command = str(Path(python).with_name("batch-assets"))
    return [command, "run", NAME, "--endpoint", task.url, "--no-progress"]


def scratch(task: Task) -> Path:
    """A short path for vLLM's sockets."""
    folder = Path(task.folder) / "t"
    folder.mkdir(exist_ok=True)
    return folder


def run_batch(python: str, task: Task) -> list[str]:
    """`vllm run-batch`, with metrics at the task's address."""
    files = ["-i", task.lines, "-o", str(Path(task.folder) / "output.jsonl")]
    metrics = ["--enable-metrics", "--url", "127.0.0.1", "--port", task.url.rpartition(":")[2]]
    return [python, "-m", "vllm.entrypoints.openai.run_batch", *files, *metrics, *vllm_flags(Path(task.model_folder))]


SCRIPTS = ("aiohttp==3.14.5", "openai==3.57.0", "httpx==0.28.1")
SYSTEMS = (
    System("script", "script", "aiohttp", script("script"), select(JSON_LINES), "script", SCRIPTS),
    System(
        "script, openai",
        "openai",
        "openai",
        script("openai"),
        select(JSON_LINES),
        "script",
        SCRIPTS,
        in_flight=SLOTS,  # with 1,024 its client needs 28 ms of CPU a row
    ),
    System(
        "script that resumes", "durable", "aiohttp", script("script", "durable"), select(JSON_LINES), "script", SCRIPTS
    ),
    System("batch-assets run", "run", "batch_assets", our_run, our_table, prepare=declare, variables=our_variables),
    System(
        "batch-assets serve",
        "serve",
        "batch_assets",
        script("service"),
        select(BATCH_OUTPUT),
        prepare=declare,
        variables=our_variables,
    ),
    System(
        "datatrove InferenceRunner",
        "datatrove",
        "datatrove.pipeline.inference.run_inference",
        script("datatrove"),
        select(DATATROVE),
        "datatrove",
        ("datatrove[io]==0.10.1", "aiohttp==3.14.5", "aiosqlite==0.22.1", "httpx==0.28.1", "aiofiles==25.1.0"),
    ),
    System(
        "Ray Data LLM, HTTP",
        "ray",
        "ray.data.llm",
        script("ray_data"),
        select(PARQUET),
        "raydata",
        ("ray[data]==2.60.0", "pydantic==2.14.4", "aiohttp==3.14.5", "transformers==5.24.0", "jinja2==3.1.6"),
        # The requests of a batch go one after the other; so many batches of an actor go at a time (default 4).
        variables=lambda task: {"RAY_DATA_DEFAULT_ASYNC_BATCH_UDF_MAX_CONCURRENCY": "256"},
    ),
    System(
        "Bespoke Curator",
        "curator",
        "bespokelabs.curator",
        script("curator"),
        select(PARQUET),
        "curator",
        ("bespokelabs-curator==0.1.31",),
        variables=lambda task: {"TELEMETRY_ENABLED": "false", "CURATOR_VIEWER": "false"},
    ),
    System(
        "NeMo Data Designer",
        "designer",
        "data_designer.interface",
        script("data_designer"),
        select(PARQUET),
        "designer",
        ("data-designer==0.9.7",),
        variables=lambda task: {"NEMO_TELEMETRY_ENABLED": "false"},
    ),
    System(
        "vllm run-batch",
        "run-batch",
        "vllm",
        run_batch,
        select(BATCH_OUTPUT),
        VLLM,
        variables=lambda task: vllm_environment(scratch(task)),
        cannot={"short": "it starts an engine of its own, and cannot use the simulated one"},
        own_engine=True,
    ),
)
