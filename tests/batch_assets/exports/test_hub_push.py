"""Exports pushed to a hub: one commit, nothing sent twice, kills, refusals, cut connections, and read back."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import polars as pl
import pytest
import yaml
from aiohttp import web
from huggingface_hub import close_session
from support.local_hub import TOKEN, LocalHub, local_hub
from support.snapshots import commit, questions, write_snapshot
from typer.testing import CliRunner

from batch_assets.asset_metadata.materialization import export_metadata
from batch_assets.cli.main import app
from batch_assets.exports import hub_push
from batch_assets.exports.declared_export import WrittenExport, export_declared, is_exported
from batch_assets.exports.hub_card import CardFacts, hub_card
from batch_assets.exports.hub_push import Pushed, push
from batch_assets.exports.record import ExportRecord
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import PublishedTable, published_table
from batch_assets.publishing.quality import CheckFigure
from batch_assets.spec.errors import SpecError
from batch_assets.spec.export_options import ExportError
from batch_assets.spec.exports import ExportSpec, PushSpec
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from resources.objects import hub_client
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore

# huggingface_hub gives its HTTP client a file in a way that this calls old.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

REPO = "acme/sums"
SFT: dict[str, Any] = {"name": "sft", "format": "messages", "part_rows": 20, "push": {"repo": REPO}}
EXTRAS = {"validation": 0.2, "split_by": "topic"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with local_hub(tmp_path / "hub") as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield found


def declared(**more: Any) -> GeneratedDatasetSpec:
    own = {"name": "sums", "source": {"path": "x.csv"}, "prompt": {"user": "Add {{ q }}"}, "model": "m", "id": "n"}
    return load_spec(own | {"keep_columns": ["topic", "level"], "license": "cc-by-4.0"} | more, "defs.yaml")


def published(objects: Objects, workdir: Path, rows: int = 50, batch_rows: int = 10) -> DatasetStore:
    store = DatasetStore(objects, "sums")
    manifest = write_snapshot(store, questions(rows), batch_rows=batch_rows, batches_per_shard=30)
    commit(store, manifest, dead=["id-000003"])
    publish(store, manifest, card=Card(), now=float(rows), workdir=workdir, part_rows=2 * batch_rows)
    return store


def write(store: DatasetStore, base: Path, **options: Any) -> WrittenExport:
    return export_declared(store, ExportSpec.model_validate({**SFT, **options}), base=base, of=declared())


def again(found: WrittenExport, folder: Path, **options: Any) -> Pushed:
    return push(found.files, found.record, "---\nconfigs: [a]\n---\n", PushSpec(repo=REPO), folder=folder, **options)


def pushed_of(found: WrittenExport) -> Pushed:
    assert found.pushed is not None
    return found.pushed


@pytest.mark.slow
def test_a_push_is_one_commit_with_the_files_and_their_card(
    any_objects: Objects, tmp_path: Path, hub: LocalHub
) -> None:
    store = published(any_objects, tmp_path)
    found = write(store, tmp_path, **EXTRAS)
    assert hub.commits(REPO) == 1 and hub.repositories[REPO].private
    there = hub.files(REPO)
    ours = {f"data/{file.name}": found.files.get(file.name) for file in found.record.files}
    assert {name: data for name, data in there.items() if name != "README.md"} == ours
    card = there["README.md"].decode()
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "cc-by-4.0" and front["size_categories"] == ["n<1K"]
    assert front["configs"] == [
        {
            "config_name": "default",
            "data_files": [
                {"split": "train", "path": "data/train-*.jsonl"},
                {"split": "validation", "path": "data/validation-*.jsonl"},
            ],
        }
    ]
    for said in (
        found.record.version,
        "Add {{ q }}",
        "dead_letter_rate",
        "left out: error",
        f"{found.record.rows}"[10:12],
    ):
        assert said in card
    assert "answer" not in card.lower().replace("answered by", ""), "no row"
    told = export_metadata(found)
    assert (told["hub_repo"], told["hub_commit"]) == (REPO, hub.repositories[REPO].branches["main"][-1][0])
    assert sorted(pushed_of(found).sent) == sorted(ours)


def test_the_card_of_judged_rows_says_who_judged_and_of_which_table_its_figures_are() -> None:
    own = {"name": "scores", "judge": {"dataset": "answers", "rubric": "Short."}, "model": "judge-model"}
    spec = load_spec(own | {"keep_columns": ["topic"]}, "defs.yaml")
    table = PublishedTable.model_construct(
        **dict.fromkeys(PublishedTable.model_fields, 0) | {"sources": [], "usd": 1.5, "simulated": False}
    )
    figure = CheckFigure("dead_letter_rate", True, 0.5, None, "", "error")
    facts = CardFacts(table, spec.generation(), [figure], [("user", "Judge it.")])
    record = ExportRecord(dataset="scores/judged", version="v", options={})
    judged = hub_card(record, replace(facts, made_of="scores", judged="answers"), folder="data")
    assert "| judged by | chat, judge-model |" in judged and "those of the dataset answers" in judged
    assert "task, model" not in judged and "## Prompt of the judge" in judged and "cost of the votes" in judged
    assert "Of the table of `scores`, of which these rows are made." in judged
    plain = hub_card(record, facts, folder="data")
    assert (
        "| task, model | chat, judge-model |" in plain and "judge it" in plain.lower() and "Of the table" not in plain
    )


@pytest.mark.slow
def test_what_is_pushed_is_read_back_the_same(local_objects: Objects, tmp_path: Path, hub: LocalHub) -> None:
    store = published(local_objects, tmp_path)
    found = write(store, tmp_path, **EXTRAS)
    program = (
        "import json, sys, datasets\n"
        f"found = datasets.load_dataset({REPO!r})\n"
        "print(json.dumps({split: list(rows['messages']) for split, rows in found.items()}))\n"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    read = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert read.returncode == 0, read.stderr[-3000:]
    here: dict[str, list[Any]] = {}
    for file in found.record.files:
        lines = found.files.get(file.name).splitlines()
        here.setdefault(file.name.split("-")[0], []).extend(json.loads(line)["messages"] for line in lines)
    assert json.loads(read.stdout.splitlines()[-1]) == here


def test_what_the_hub_has_is_not_sent_again_and_makes_no_commit(
    local_objects: Objects, tmp_path: Path, hub: LocalHub
) -> None:
    store = published(local_objects, tmp_path)
    first = write(store, tmp_path)
    sent = len(hub.uploaded)
    second = write(store, tmp_path)
    assert hub.commits(REPO) == 1 and len(hub.uploaded) == sent
    assert pushed_of(second) == Pushed(REPO, "main", pushed_of(first).commit, (), changed=False)
    published(local_objects, tmp_path, 60)
    write(store, tmp_path)
    assert hub.commits(REPO) == 2
    assert sorted(hub.files(REPO)) == ["README.md", *(f"data/train-0000{part}.jsonl" for part in range(3))]


def test_files_that_an_export_has_no_more_go_and_others_stay(
    local_objects: Objects, tmp_path: Path, hub: LocalHub
) -> None:
    store = published(local_objects, tmp_path)
    write(store, tmp_path, part_rows=10)
    commits = hub.repositories[REPO].branches["main"]
    blob = commits[-1][1]["README.md"]
    commits.append(("a" * 40, {**commits[-1][1], "data/notes.jsonl": blob, "LICENSE": blob}))
    write(store, tmp_path, part_rows=1000)
    assert sorted(hub.files(REPO)) == ["LICENSE", "README.md", "data/notes.jsonl", "data/train-00000.jsonl"]


def test_a_branch_is_made_where_there_is_none(local_objects: Objects, tmp_path: Path, hub: LocalHub) -> None:
    store = published(local_objects, tmp_path)
    write(store, tmp_path, push={"repo": REPO, "branch": "drafts", "private": False})
    assert not hub.repositories[REPO].private and hub.commits(REPO) == 0 and hub.commits(REPO, "drafts") == 1


class Killed(BaseException):
    """The process ends here."""


def test_a_killed_push_sends_no_file_twice_and_no_reader_sees_half(
    local_objects: Objects, tmp_path: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = published(local_objects, tmp_path)
    api = type(hub_push._api(os.environ))
    sent, kills = api.preupload_lfs_files, 0
    for dies_at in range(4):
        calls = 0

        def dying(*given: Any, dies_at: int = dies_at, **named: Any) -> Any:
            nonlocal calls
            if named["repo_type"] and calls == dies_at:
                raise Killed
            calls += 1
            return sent(*given, **named)

        with monkeypatch.context() as patch:
            patch.setattr(api, "preupload_lfs_files", dying)
            with pytest.raises(Killed):
                write(store, tmp_path)
            kills += 1
        assert hub.files(REPO) == {}
    found = write(store, tmp_path)
    assert kills == 4 and hub.commits(REPO) == 1
    assert len(hub.uploaded) == len(set(hub.uploaded)) == len(found.record.files) == 3


def test_large_files_are_sent_in_parts(local_objects: Objects, tmp_path: Path, hub: LocalHub) -> None:
    found = write(published(local_objects, tmp_path), tmp_path, push=None)
    file = Path(found.files.uri("train-00000.jsonl"))
    file.write_bytes(file.read_bytes() * 6000)
    hub.multipart = True
    one = found.record.files[0].model_copy(update={"bytes": file.stat().st_size, "sha256": None})
    record = found.record.model_copy(update={"files": [one]})
    push(found.files, record, "---\nconfigs: [a]\n---\n", PushSpec(repo=REPO), folder=tmp_path)
    assert file.stat().st_size > 2 * (5 << 20)
    assert hub.files(REPO)["data/train-00000.jsonl"] == file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "status", "method"),
    [
        ("/commit/", 503, ""),
        ("/commit/", 429, ""),
        ("/commit/", 0, ""),
        ("/commit/", 412, ""),
        ("/lfs/", 500, "PUT"),
        ("/lfs/", 0, "PUT"),
        ("/objects/batch", 502, ""),
        ("/preupload/", 0, ""),
        ("/tree/", 500, ""),
        ("/api/repos/create", 503, ""),
        ("/api/validate-yaml", 503, ""),
    ],
)
def test_what_passes_by_itself_is_tried_again(
    local_objects: Objects, tmp_path: Path, hub: LocalHub, where: str, status: int, method: str
) -> None:
    found = write(published(local_objects, tmp_path), tmp_path, push=None)
    hub.fail(where, status, times=2, method=method)
    waited: list[float] = []
    pushed = again(found, tmp_path, sleep=waited.append)
    assert pushed.changed and hub.commits(REPO) == 1 and len(hub.files(REPO)) == 4
    assert len(hub.uploaded) == len(set(hub.uploaded)) == 3


def test_the_hub_says_how_long_to_wait(local_objects: Objects, tmp_path: Path, hub: LocalHub) -> None:
    found = write(published(local_objects, tmp_path), tmp_path, push=None)
    hub.fail("/commit/", 429, times=1, **{"Retry-After": "7"})
    hub.fail("/api/repos/create", 429, times=1, **{"Retry-After": "86400"})
    waited: list[float] = []
    again(found, tmp_path, sleep=waited.append)
    assert waited == [300.0, 7.0]


def test_a_commit_whose_answer_is_lost_is_not_made_twice(local_objects: Objects, tmp_path: Path, hub: LocalHub) -> None:
    found = write(published(local_objects, tmp_path), tmp_path, push=None)
    lost = iter([True])

    async def answer_is_lost(request: Any) -> Any:
        if "/commit/" not in request.path or not next(lost, False):
            return None
        answer = await request.match_info.handler(request)
        request.transport.abort()
        return answer

    hub.faults.append(answer_is_lost)
    pushed = again(found, tmp_path, sleep=lambda seconds: None)
    assert hub.commits(REPO) == 1 and pushed.commit == hub.repositories[REPO].branches["main"][-1][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "status", "said"),
    [
        ("/api/datasets", 401, "expected a token that it knows in HF_TOKEN"),
        ("/api/repos/create", 403, "expected a token in HF_TOKEN that may write"),
        ("/commit/", 403, "expected a token in HF_TOKEN that may write"),
        ("/objects/batch", 403, "expected a token in HF_TOKEN that may write"),
        ("/api/repos/create", 400, "the hub answers 400"),
        ("/commit/", 507, "the hub answers 507"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence_and_loses_nothing(
    local_objects: Objects, tmp_path: Path, hub: LocalHub, where: str, status: int, said: str
) -> None:
    found = write(published(local_objects, tmp_path), tmp_path, push=None)
    hub.fail(where, status, times=1000)
    with pytest.raises(ExportError) as error:
        again(found, tmp_path, sleep=lambda seconds: pytest.fail("this does not pass by itself"))
    assert said in str(error.value) and TOKEN not in str(error.value) and "\n" not in str(error.value)
    hub.faults.clear()
    assert again(found, tmp_path).changed


def test_a_hub_that_is_silent_is_left_and_asked_again(
    local_objects: Objects, tmp_path: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "SILENCE_SECONDS", 0.3)
    found = write(published(local_objects, tmp_path), tmp_path, push=None)
    asked: list[str] = []
    close_session()  # as huggingface_hub does after an error of a connection: the next one is bounded, too

    async def silence(request: web.Request) -> web.StreamResponse | None:
        if asked or "/tree/" not in request.path:
            return None
        asked.append(request.path)
        await asyncio.sleep(3600)
        return None

    hub.faults.append(silence)
    assert again(found, tmp_path).changed and len(asked) == 1


def test_a_hub_that_is_away_is_said_after_some_tries(local_objects: Objects, tmp_path: Path, hub: LocalHub) -> None:
    found = write(published(local_objects, tmp_path), tmp_path, push=None)
    hub.fail("/", 503, times=10_000)
    waited: list[float] = []
    with pytest.raises(ExportError, match=r"the hub answers 503 .*; the same command goes on"):
        again(found, tmp_path, sleep=waited.append)
    assert waited == [1.0, 2.0, 4.0, 8.0]
    with pytest.raises(ExportError, match=r"expected an answer, found ConnectError; the same command goes on"):
        nowhere = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}
        again(found, tmp_path, sleep=waited.append, environment=nowhere)


def test_without_a_token_or_the_package_it_says_so(
    local_objects: Objects, tmp_path: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = write(published(local_objects, tmp_path), tmp_path, push=None)
    with pytest.raises(ExportError, match="expected a token with write access in the environment variable HF_TOKEN"):
        again(found, tmp_path, environment={"HF_ENDPOINT": hub.url})
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ExportError, match=r"pip install 'batch-assets\[hub\]'"):
        again(found, tmp_path)


@pytest.mark.slow
def test_a_full_disk_is_said_as_it_is(
    any_objects: Objects, tmp_path: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = write(published(any_objects, tmp_path), tmp_path, push=None)
    if "://" not in any_objects.root:
        return  # files are read where they lie

    def full(*given: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hub_push, "_blocks", full)
        with pytest.raises(OSError, match="No space left"):
            again(found, tmp_path)
    assert again(found, tmp_path).changed and not list(tmp_path.glob("*.jsonl"))


def test_an_export_is_current_once_it_is_pushed(local_objects: Objects, tmp_path: Path, hub: LocalHub) -> None:
    store, spec = published(local_objects, tmp_path), ExportSpec.model_validate(SFT)
    write(store, tmp_path, push=None)
    assert not is_exported(store, spec, tmp_path)
    early = export_declared(store, spec, base=tmp_path, of=declared(), final=False)
    assert early.pushed is None and not hub.repositories and not is_exported(store, spec, tmp_path)
    write(store, tmp_path)
    assert is_exported(store, spec, tmp_path)
    other = spec.model_copy(update={"push": PushSpec(repo=REPO, branch="drafts")})
    assert not is_exported(store, other, tmp_path)


def test_the_command_pushes_and_its_words_hold_no_token(
    local_objects: Objects, tmp_path: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_ASSETS_STORE", local_objects.root)
    monkeypatch.setenv("BATCH_ASSETS_DEFS", str(tmp_path / "defs"))
    (tmp_path / "defs").mkdir()
    published(local_objects, tmp_path)
    command = ["export", "sums", "--format", "messages", "--to", str(tmp_path / "out"), "--push", REPO]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    assert f"hub: {REPO}, branch main, commit " in found.stdout and "(1 files sent)" in found.stdout
    second = CliRunner().invoke(app, command)
    assert "(nothing was to be sent)" in second.stdout and hub.commits(REPO) == 1
    assert TOKEN not in found.output + second.output
    wrong = CliRunner().invoke(app, [*command[:-1], "sums"])
    assert wrong.exit_code == 2 and "--push sums: expected a dataset repository" in wrong.stderr


@pytest.mark.parametrize(
    ("push_to", "said"),
    [
        ({"repo": "sums"}, "exports.0.push.repo: expected a dataset repository of the Hugging Face hub"),
        ({"repo": "a/b/c"}, "exports.0.push.repo"),
        ({"repo": "a/../b"}, "exports.0.push.repo"),
        ({"repo": REPO, "branch": "a b"}, "exports.0.push.branch: expected the name of a branch"),
        ({"repo": REPO, "token": "hf_x"}, "exports.0.push.token"),
        ({}, "exports.0.push.repo"),
    ],
)
def test_a_wrong_repository_is_refused_when_the_file_is_read(push_to: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        declared(exports=[{**SFT, "push": push_to}])
    assert said in str(error.value)


def test_a_licence_has_the_hubs_name_for_it() -> None:
    with pytest.raises(SpecError, match="license: expected a licence as the Hugging Face hub names it"):
        declared(license="Apache 2")


OUT = """
import os, sys, time, warnings
from pathlib import Path
from huggingface_hub import HfApi
from batch_assets.exports.declared_export import export_declared
from batch_assets.spec.exports import ExportSpec
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore
store, spec, parts, sent = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
calls, upload = 0, HfApi.preupload_lfs_files
def dying(*given, **named):
    global calls
    if calls == sent:
        os.kill(os.getpid(), 9)
    calls += 1
    return upload(*given, **named)
def told(record):
    if record.parts == parts:
        os.kill(os.getpid(), 9)
HfApi.preupload_lfs_files = dying
warnings.simplefilter("ignore")
began = time.process_time()
data = DatasetStore(open_objects(store), "sums")
export_declared(data, ExportSpec.model_validate_json(spec), base=Path(store), told=told)
(line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
peak = int(line.split()[1]) // 1024
print(f"{time.process_time() - began:.1f} s of CPU, {peak} MiB")
"""

BACK = """
import hashlib, sys, datasets, orjson
digest, rows = hashlib.sha256(), datasets.load_dataset(sys.argv[1], split="train")
for one in rows:
    digest.update(orjson.dumps(one["messages"]) + b"\\n")
print(len(rows), digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.soak("rows")
@pytest.mark.timeout(600)
def test_a_hundred_thousand_rows_come_back_byte_by_byte_after_two_kills(
    local_objects: Objects, tmp_path: Path, hub: LocalHub
) -> None:
    """Killed in the export behind its third file, and in the push behind the fourth file that was sent."""
    store, rows = published(local_objects, tmp_path, 100_000, 2000), 100_000
    table = published_table(store)
    assert table is not None
    wanted = hashlib.sha256()
    for row in pl.read_parquet(table.glob(local_objects)).filter(pl.col("output").is_not_null()).iter_rows(named=True):
        prompt = [{"role": one["role"], "content": one["content"]} for one in row["prompt"]]
        wanted.update(orjson.dumps([*prompt, {"role": "assistant", "content": row["output"]}]) + b"\n")
    spec = ExportSpec.model_validate({**SFT, "part_rows": 10_000}).model_dump_json(exclude_unset=True)
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", program, *arguments]
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)

    assert run(OUT, local_objects.root, spec, "3", "-1").returncode == -9
    assert run(OUT, local_objects.root, spec, "-1", "4").returncode == -9
    assert hub.files(REPO) == {} and len(hub.uploaded) == 4
    whole = run(OUT, local_objects.root, spec, "-1", "-1")
    assert whole.returncode == 0, whole.stderr[-2000:]
    print(f"the last third: {whole.stdout}", end="")
    assert hub.commits(REPO) == 1
    assert len(hub.uploaded) == len(set(hub.uploaded)) == len(hub.files(REPO)) - 1 >= 5
    back = run(BACK, REPO)
    assert back.stdout.split() == [str(rows - 1), wanted.hexdigest()], back.stderr[-2000:]
