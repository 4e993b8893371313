"""The documentation says what the code does: keys, variables, examples, links."""

from __future__ import annotations

import contextlib
import json
import re
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import dagster as dg
import polars as pl
import pytest
import sqlalchemy as sa
import yaml
from dagster_postgres.event_log import PostgresEventLogStorage
from PIL import Image
from support.documents import DOCUMENTS, FLEET, MARKS, OPERATIONS, PAGES, README, REFERENCE, REPOSITORY, Block, blocks
from support.fleet_databases import intended
from support.local_hub import LocalHub, local_hub
from support.snapshots import commit

from batch_assets.catalog import ledger
from batch_assets.catalog.asset_places import of_asset
from batch_assets.cli import docs_reference
from batch_assets.cli.fleet_commands.fleet import CostLine, cost_json, instance_json
from batch_assets.generation.op import RowsConfig
from batch_assets.orchestration.source_place import at_its_place
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.templates.prompt_template import Template
from gpu_runner.fleet_database.accounting.bill_split import Split
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.simulated.config import FaultKind
from resources.fleet.resource import FleetConfig, GpuFleet
from resources.objects.hub_client import hub_address
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore

CODE = ["batch_assets", "resources", "gpu_runner"]
ROWS = 3
LONGEST_CELL = 300
LONGEST_EVIDENCE = 150
LONGEST_README = 200


def code() -> str:
    return "\n".join(file.read_text() for folder in CODE for file in sorted((REPOSITORY / folder).rglob("*.py")))


def test_every_block_says_how_it_is_tested() -> None:
    for block in blocks():
        assert block.mark in MARKS, f"{block.name}: expected <!-- test: … --> before the fence, one of {list(MARKS)}"
        language, _ = MARKS[block.mark]
        assert block.language == (language or block.language), f"{block.name}: mark {block.mark} is for {language}"
        assert block.mark != "none" or block.reason, f"{block.name}: expected a reason"


def test_the_generated_part_is_current() -> None:
    assert REFERENCE.read_text() == docs_reference.current(), "run python -m batch_assets.cli.docs_reference"


def test_every_variable_of_the_code_is_documented() -> None:
    used = set(re.findall(r"BATCH_ASSETS_[A-Z_]+", code()))
    told = re.findall(r"^\| `(BATCH_ASSETS_[A-Z_]+)` \|", REFERENCE.read_text(), re.MULTILINE)
    assert sorted(told) == sorted(used), "one table of one page has all of them, each once"


def test_every_difference_that_verify_finds_has_its_remedy() -> None:
    kinds = {kind.replace("_", " ") for kind in re.findall(r"Difference\(\s*\"(\w+)\"", code())}
    assert len(kinds) > 10
    table = OPERATIONS.read_text().partition("| `verify` says | do |")[2].partition("\n\n")[0]
    assert [kind for kind in sorted(kinds) if kind not in table] == []


def test_every_command_of_the_readme_and_the_docs_exists() -> None:
    from typer.main import get_command

    from batch_assets.cli.main import app

    known = set(get_command(app).commands)
    written = {word for file in DOCUMENTS for word in re.findall(r"batch-assets ([a-z][a-z-]+)", file.read_text())}
    assert written <= known
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert {
        word for file in DOCUMENTS for word in re.findall(r"`?make ([a-z-]+)`?$", file.read_text(), re.M)
    } <= targets


def test_links_lead_somewhere() -> None:
    for file in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", file.read_text()):
            path, _, anchor = target.partition("#")
            other = (file.parent / path).resolve() if path else file
            assert other.exists(), f"{file.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_no_cell_of_a_table_is_a_paragraph(page: Path) -> None:
    seen = re.sub(r"\]\([^)]*\)", "]", page.read_text())  # without the targets of links
    rows = [line for line in seen.splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell) > LONGEST_CELL] == [], f"at most {LONGEST_CELL} characters a cell"


def test_evidence_is_one_page() -> None:
    text = (REPOSITORY / "docs" / "evidence.md").read_text()
    assert len(text.splitlines()) <= LONGEST_EVIDENCE, "what was measured before goes to docs/history/"
    history = {file.name for file in (REPOSITORY / "docs" / "history").glob("*.md")} - {"README.md"}
    index = (REPOSITORY / "docs" / "history" / "README.md").read_text()
    assert set(re.findall(r"^\| \[[^]]+\]\((\w+\.md)\)", index, re.MULTILINE)) == history
    assert {name for name in history if f"history/{name}" not in text} == set()


@pytest.mark.parametrize("block", blocks("fleet"), ids=lambda block: block.name)
def test_a_fleet_example_is_one(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "of the example")
    file = tmp_path / "fleet.yaml"
    file.write_text(block.text)
    config = FleetConfig.load(file)
    assert config.model_fields_set - {"prices"} == block.yaml().keys() - {"prices"}
    fleet = GpuFleet(database=f"sqlite:///{tmp_path}/fleet.db", home=str(tmp_path), config_path=str(file))
    providers = fleet.providers(config)
    declared = [*(config.simulated.providers if config.simulated else ()), *config.rented]
    elsewhere = [one.name for one in (*config.ssh, *config.ec2, *config.runpod)]
    assert list(providers) == [one.name for one in declared]
    assert all(provider.offers() for name, provider in providers.items() if name not in elsewhere)


@pytest.mark.parametrize("block", blocks("regenerate"), ids=lambda block: block.name)
def test_the_run_config_fits_the_op(block: Block) -> None:
    (op, found), *others = block.yaml()["ops"].items()
    assert not others
    assert op == ledger.rows_key("example").to_python_identifier()
    assert RowsConfig(**found["config"]).regenerate


def test_the_fleet_page_names_every_key_and_fault(tmp_path: Path) -> None:
    text = FLEET.read_text()
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db:
        assert intended(fleet_db) is not None
        (instance,) = fleet_db.fleet()
    line = CostLine("sim-north", "gpu-1", "1x L40S", False, 1, 0, Split())
    for key in [*instance_json(instance), *cost_json(line)]:
        assert f"`{key}`" in text, key
    for kind in get_args(FaultKind):
        assert f"| `{kind}` |" in text, kind


@pytest.mark.parametrize("block", blocks("spec"), ids=lambda block: block.name)
def test_a_dataset_example_makes_prompts(
    block: Block, tmp_path: Path, request: pytest.FixtureRequest, local_objects: Objects
) -> None:
    document = block.yaml()
    assert document["type"] == "batch_assets.GeneratedDataset"
    spec = with_table_of_asset(load_spec(document["attributes"], "defs.yaml"), tmp_path / "table.parquet")
    make_source(spec, tmp_path, request)
    work = tmp_path / "work"
    work.mkdir()
    manifest = build_snapshot(spec, DatasetStore(local_objects, spec.name), now=0.0, workdir=work, base=tmp_path)
    assert manifest.rows + manifest.duplicates >= ROWS
    assert manifest.rejected == 0


def chain_of(block: Block) -> list[GeneratedDatasetSpec]:
    """The datasets of a block and, where the first one reads another's table, before them those of the block above."""
    specs = [load_spec(document["attributes"], "defs.yaml") for document in yaml.safe_load_all(block.text)]
    if specs[0].source.dataset is None:
        return specs
    every = blocks("chain")
    return [*chain_of(every[every.index(block) - 1]), *specs]


@pytest.mark.parametrize("block", blocks("chain"), ids=lambda block: block.name)
def test_a_chain_example_is_built_from_table_to_table(
    block: Block, tmp_path: Path, local_objects: Objects, request: pytest.FixtureRequest
) -> None:
    specs = chain_of(block)
    for number, declared in enumerate(specs):
        store, work = DatasetStore(local_objects, declared.name), tmp_path / f"work-{number}"
        with dg.DagsterInstance.ephemeral() as instance:
            spec = at_its_place(declared, instance, local_objects)
        if spec.source.dataset is None:
            make_source(spec, tmp_path, request)
        manifest = build_snapshot(spec, store, now=0.0, workdir=work, base=tmp_path)
        assert manifest.rows and not manifest.rejected
        answer = json.dumps({"questions": ["Why?", "How?"]}) if number == 0 else "Because."
        commit(store, manifest, answer=lambda *_, text=answer: text)
        publish(store, manifest, card=Card(), now=0.0, workdir=tmp_path)


def with_table_of_asset(spec: GeneratedDatasetSpec, table: Path) -> GeneratedDatasetSpec:
    """The spec as it is read where the table of the asset that it names, if any, lies there."""
    if spec.source.asset is None:
        return spec
    table.touch()
    made = dg.AssetMaterialization(dg.AssetKey.from_user_string(spec.source.asset), metadata={"path": str(table)})
    with dg.DagsterInstance.ephemeral() as instance:
        instance.report_runless_asset_event(made)
        return of_asset(spec, instance)


def make_source(spec: GeneratedDatasetSpec, folder: Path, request: pytest.FixtureRequest) -> None:
    """Files with the columns that the example reads, where the example looks for them."""
    for values in (spec.source.grid or {}).values():
        if not isinstance(values, list):
            pl.DataFrame({values.column: [f"value {i}" for i in range(ROWS)]}).write_csv(folder / values.csv)
    if spec.source.path is None:
        return
    templates = [text for _, _, text in spec.prompt.templates()]
    columns = {name for text in templates for name in Template(text).columns} | set(spec.keep_columns)
    rows: dict[str, list[Any]] = {name: [f"{name} {i}" for i in range(ROWS)] for name in sorted(columns)}
    rows |= {spec.id: list(range(ROWS))} if spec.id else {}
    if (column := spec.prompt.messages_from) is not None:
        rows[column] = [[{"role": "user", "content": f"Hello {i}"}] for i in range(ROWS)]
    if (images := spec.prompt.all_images) is not None:
        (folder / images.folders[0]).mkdir()
        Image.new("RGB", (8, 8)).save(folder / images.folders[0] / "a.png")
        rows |= dict.fromkeys(images.columns, ["a.png"] * ROWS)
    if (audio := spec.prompt.all_audio) is not None:
        (folder / audio.folders[0]).mkdir()
        with wave.open(str(folder / audio.folders[0] / "a.wav"), "wb") as sound:
            sound.setparams((1, 2, 8000, 0, "NONE", ""))
            sound.writeframes(bytes(800))
        rows |= dict.fromkeys(audio.columns, ["a.wav"] * ROWS)
    for text, content in (
        (spec.prompt.system_from, "Be brief."),
        (spec.prompt.examples, '{"user":"a","assistant":"b"}'),
    ):
        if text is not None:
            (folder / text).write_text(content)
    for rule in (spec.filter or {}).values():
        if rule.overlap is not None:
            found = folder / str(rule.overlap.files).replace("*", "test")
            found.parent.mkdir(parents=True, exist_ok=True)
            found.write_text(json.dumps({rule.overlap.text: "Which words are in both?"}))
    rows |= {"stars": [1] * ROWS, "lang": ["en"] * ROWS, "price": [12.5] * ROWS} if spec.source.where else {}
    on_hub = hub_address(spec.source.path)
    name = on_hub.path if on_hub is not None else spec.source.path.removeprefix("s3://bucket/")
    name = name.replace("**", "2026").replace("*", "part-0")
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    write(pl.DataFrame(rows), file, spec.source.format or name, spec.source.delimiter or ",")
    if spec.source.encoding:
        file.write_bytes(file.read_text().encode(spec.source.encoding))
    if spec.source.path.startswith("s3://"):
        upload(file, name, request)
    if on_hub is not None:
        request.getfixturevalue("hub").put(on_hub.repo, {name: file.read_bytes()})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with local_hub(tmp_path / "hub") as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield found


def write(rows: pl.DataFrame, file: Path, kind: str, delimiter: str) -> None:
    if kind.endswith("parquet"):
        rows.write_parquet(file)
    elif kind.endswith("csv"):
        rows.write_csv(file, separator=delimiter)
    elif kind.endswith(".gz"):
        import gzip

        file.write_bytes(gzip.compress(rows.write_ndjson().encode()))
    else:
        rows.write_ndjson(file)


def upload(file: Path, key: str, request: pytest.FixtureRequest) -> None:
    import boto3

    request.getfixturevalue("s3_objects")  # the server, its bucket and the environment
    boto3.client("s3").upload_file(str(file), "bucket", key)


@pytest.mark.slow
def test_the_postgres_block_is_what_dagster_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.postgres import postgres, why_not

    if reason := why_not():
        pytest.skip(reason)
    (block,) = blocks("postgres")
    with postgres(durable=False) as server:
        found = block.yaml()
        database = found["storage"]["postgres"]["postgres_db"]
        database |= {"hostname": "127.0.0.1", "port": server.port, "username": "postgres", "db_name": "postgres"}
        monkeypatch.setenv(database["password"]["env"], server.password)
        text = (REPOSITORY / "deploy" / "local" / "dagster.yaml").read_text()
        (tmp_path / "dagster.yaml").write_text(text + yaml.safe_dump(found))
        with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
            assert instance.get_runs_count() == 0
            storage = instance.event_log_storage
            assert isinstance(storage, PostgresEventLogStorage)
            with storage.index_connection() as connection:
                assert connection.scalar(sa.text("SHOW statement_timeout")) == "5min"
                driver = connection.connection.driver_connection
                assert driver is not None
                said = driver.get_dsn_parameters()
            assert (said["connect_timeout"], said["tcp_user_timeout"]) == ("10", "30000")


def test_the_pages_have_their_pictures_within_their_size() -> None:
    shown = {page.parent / name for page in PAGES for name in re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text())}
    assert {file.resolve() for file in shown} == set((REPOSITORY / "docs" / "images").iterdir())
    assert [file.name for file in shown if file.stat().st_size >= 300_000] == []


def test_the_readme_is_short_and_has_one_picture() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= LONGEST_README, "what does not fit is for docs/"
    assert text.count("```mermaid") == 1


def test_the_index_of_the_documentation_names_every_page() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text()
    pages = {page.name for page in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"]({name})" not in index} == set()


def test_the_index_of_what_tests_share_has_a_line_for_each_module() -> None:
    support = REPOSITORY / "tests" / "support"
    listed = re.findall(r"^\| `(\w+)` \| \S.*\|$", (support / "README.md").read_text(), re.MULTILINE)
    assert listed == sorted(file.stem for file in support.glob("*.py") if file.stem != "__init__")


def test_what_is_done_before_a_commit_can_be_done() -> None:
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    programs = {hook["entry"].split()[0] for hook in hooks}
    assert programs == {".venv/bin/ruff", ".venv/bin/python"}
    assert re.search(r"^\t\$\(BIN\)/ruff format --check \.$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
