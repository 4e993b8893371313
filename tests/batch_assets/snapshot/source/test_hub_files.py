"""The Hugging Face hub as a source: pinned commits, ranges, bounds, refusals, and no token where it does not belong."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from support.dataset_project import dataset_project
from support.local_hub import TOKEN, LocalHub, local_hub

from batch_assets.filtering.text_marks import files_digest
from batch_assets.snapshot.builder import build_snapshot, changed_rows
from batch_assets.snapshot.source import hub_files
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.files import find_files
from batch_assets.snapshot.source.hub_files import HubCommit, pinned
from batch_assets.snapshot.source.reader import read_source
from batch_assets.snapshot.source.size import estimated_lines
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.spec.row_rules import OverlapRule
from batch_assets.spec.source import SourceSpec
from resources.objects import hub_client
from resources.objects.hub_client import HubAddress, hub_address, hub_api
from resources.objects.object_interface import StoreError
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

REPO = "acme/sums"
TRAIN = f"hf://datasets/{REPO}/data/train-*.parquet"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with local_hub(tmp_path / "hub") as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(hub_client, "TRIES", 2)
        found.regular_bytes = 100
        found.put(REPO, {**trains(20), "data/test-0.parquet": parquet(0, 5), "README.md": b"# Sums"})
        yield found


def parquet(first: int, rows: int, **more: Any) -> bytes:
    """Questions by number, and a large column that no prompt uses."""
    numbers = range(first, first + rows)
    table = pa.table({"n": [f"id-{i}" for i in numbers], "q": [f"What is {i}?" for i in numbers]} | more)
    pq.write_table(table, out := io.BytesIO(), compression="none", use_dictionary=False)
    return out.getvalue()


def trains(rows: int) -> dict[str, bytes]:
    return {f"data/train-{part}.parquet": parquet(part * rows, rows) for part in range(2)}


def spec_of(path: str = TRAIN, **more: Any) -> GeneratedDatasetSpec:
    own = {"name": "sums", "source": {"path": path}, "prompt": {"user": "{{ q }}"}, "model": "m", "id": "n"}
    return load_spec(own | {"batch_rows": 10} | more, "defs.yaml")


def column(path: str, name: str, base: Path, **source: Any) -> list[Any]:
    blocks = read_source(SourceSpec.model_validate({"path": path, **source}), [name], base)
    return [value for block in blocks for value in block.columns[name]]


def refusal(path: str, base: Path) -> str:
    with pytest.raises(SourceError) as error:
        column(path, "q", base)
    said = str(error.value)
    assert TOKEN not in said and "\n" not in said
    return said


# What is read


@pytest.mark.parametrize(
    ("address", "repo", "revision", "path", "shown"),
    [
        ("hf://datasets/a/b.c/x.csv", "a/b.c", "main", "x.csv", None),
        ("hf://datasets/a/b", "a/b", "main", "", None),
        ("HF://datasets/a/b@v1.0/d/*-?.csv", "a/b", "v1.0", "d/*-?.csv", "hf://datasets/a/b@v1.0/d/*-?.csv"),
        ("hf://datasets/a/b@refs/pr/7/x.csv", "a/b", "refs/pr/7", "x.csv", "hf://datasets/a/b@refs%2Fpr%2F7/x.csv"),
        ("hf://datasets/a/b@~parquet/x/*.parquet", "a/b", "refs/convert/parquet", "x/*.parquet", None),
        ("hf://datasets/a/b@team%2Fnew/x@y.csv", "a/b", "team/new", "x@y.csv", None),
    ],
)
def test_an_address_names_repository_revision_and_files(
    address: str, repo: str, revision: str, path: str, shown: str | None
) -> None:
    found = hub_address(address)
    assert found == HubAddress(repo, revision, path) and str(found) == (shown or address)
    assert hub_address(str(found)) == found


def test_parquet_text_and_packed_files_are_read_in_order(hub: LocalHub, tmp_path: Path) -> None:
    import gzip

    lines = b"\n".join(json.dumps({"q": f"Q{i}"}).encode() for i in range(2000))
    hub.put(REPO, {"x/a.jsonl": lines, "x/b.jsonl.gz": gzip.compress(lines), "x/deep/c.csv": b"q\nlast\n"})
    assert column(TRAIN, "n", tmp_path) == [f"id-{i}" for i in range(40)]
    assert column(f"hf://datasets/{REPO}/x/*.jsonl*", "q", tmp_path) == 2 * [f"Q{i}" for i in range(2000)]
    assert column(f"hf://datasets/{REPO}/**/*.csv", "q", tmp_path) == ["last"]
    assert column(f"hf://datasets/{REPO}/data/test-0.parquet", "n", tmp_path) == [f"id-{i}" for i in range(5)]
    assert estimated_lines(SourceSpec(path=TRAIN), tmp_path) == 40


def test_a_revision_is_another_branch_a_commit_or_the_converted_files(hub: LocalHub, tmp_path: Path) -> None:
    first = hub.repositories[REPO].branches["main"][-1][0]
    hub.put(REPO, {"data/test-0.parquet": parquet(100, 1)})
    hub.put(REPO, {"data/test-0.parquet": parquet(200, 1)}, "team/new")
    hub.put(REPO, {"default/test/0000.parquet": parquet(300, 1)}, "refs/convert/parquet")
    for revision, path, found in (
        ("", "data/test-0.parquet", "id-100"),
        ("@main", "data/test-0.parquet", "id-100"),
        (f"@{first}", "data/test-0.parquet", "id-0"),
        ("@team%2Fnew", "data/test-0.parquet", "id-200"),
        ("@~parquet", "default/test/*.parquet", "id-300"),
        ("@refs/convert/parquet", "default/test/*.parquet", "id-300"),
    ):
        assert column(f"hf://datasets/{REPO}{revision}/{path}", "n", tmp_path)[0] == found


def test_of_parquet_only_the_wanted_columns_are_fetched(hub: LocalHub, tmp_path: Path) -> None:
    large = parquet(0, 40, image=["x" * 100_000] * 40)
    hub.put(REPO, {"large.parquet": large})
    assert len(column(f"hf://datasets/{REPO}/large.parquet", "n", tmp_path)) == 40
    fetched = sum(asked_bytes(one) for _, one, _ in hub.served)
    assert fetched < len(large) / 10


def asked_bytes(header: str) -> int:
    first, last = header.removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


def test_a_long_text_is_read_in_ever_larger_ranges_and_never_whole(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_files, "LARGEST_READ", 1 << 18)
    lines = b"".join(b'{"q": "%06d"}\n' % i for i in range(100_000))
    hub.put(REPO, {"long.jsonl": lines})
    commit = HubCommit.of(HubAddress(REPO))
    (file,) = [one for one in commit.list() if one.path == "long.jsonl"]
    with commit.open(file) as opened:
        data = b"".join(iter(lambda: opened.read(1 << 16), b""))
        assert data == lines and opened.seek(-3, io.SEEK_END) and opened.read() == lines[-3:]
    sizes = [asked_bytes(one) for _, one, _ in hub.served]
    assert sizes[:3] == [1 << 16, 1 << 17, 1 << 18] and max(sizes) == 1 << 18


def test_a_range_that_breaks_off_is_asked_again_and_a_wrong_one_refused(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    commit = HubCommit.of(HubAddress(REPO), sleep=waited.append)
    (file,) = [one for one in commit.list() if one.path == "data/test-0.parquet"]
    hub.fail("/storage/", 0)
    assert commit.read(file, 4, 100) == parquet(0, 5)[4:104]
    hub.fail("/storage/", 429, **{"Retry-After": "7"})
    assert commit.read(file, 0, 4) == b"PAR1"
    hub.fail("/storage/", 429, **{"Retry-After": "86400"})
    assert commit.read(file, 0, 4) == b"PAR1"
    assert waited == [1.0, 7.0, 60.0]

    async def whole(request: web.Request) -> web.StreamResponse | None:
        return web.Response(body=b"x" * 5000) if request.path.startswith("/storage/") else None

    hub.faults.append(whole)
    with pytest.raises(SourceError, match=r"test-0\.parquet: expected .* bytes as it was listed|expected an answer of"):
        commit.read(file, 0, 4)
    monkeypatch.setattr(hub_files, "LARGEST_WHOLE", 100)  # nobody reads all of a file to have a part of it
    with pytest.raises(SourceError, match=r"expected an answer of at most 50 bytes, found more"):
        commit.read(file, 0, 50)


def test_a_server_without_ranges_is_read_where_the_file_is_small(hub: LocalHub, tmp_path: Path) -> None:
    data = parquet(0, 5)

    async def whole(request: web.Request) -> web.StreamResponse | None:
        return web.Response(body=data) if request.path.startswith("/storage/") else None

    hub.faults.append(whole)
    assert column(f"hf://datasets/{REPO}/data/test-0.parquet", "n", tmp_path)[-1] == "id-4"


# A commit is read, not a branch


def test_a_moved_branch_is_read_again_and_one_that_did_not_move_is_not(
    hub: LocalHub, local_objects: Objects, tmp_path: Path
) -> None:
    store = DatasetStore(local_objects, "sums")
    first = built(store, tmp_path / "1")
    commit = hub.repositories[REPO].branches["main"][-1][0]
    assert first.rows == 40 and first.source == f"hf://datasets/{REPO}@{commit}/data/train-*.parquet"
    hub.requests.clear()
    assert built(store, tmp_path / "2") == first and [path for _, path in hub.requests] == [INFO]
    assert unchanged(store, tmp_path / "3") == 40 and [path for _, path in hub.requests] == [INFO] * 2
    moved = hub.put(REPO, {"README.md": b"# Other words"})
    same = built(store, tmp_path / "4")
    assert same.snapshot == first.snapshot and moved in same.source, "read again, and the same rows"
    hub.requests.clear()
    assert built(store, tmp_path / "5") == same and [path for _, path in hub.requests] == [INFO]
    hub.put(REPO, {"data/train-2.parquet": parquet(40, 20)})
    assert unchanged(store, tmp_path / "6") == 40
    more = built(store, tmp_path / "7")
    assert (more.rows, more.unchanged, more.added) == (60, 40, 20)


INFO = f"/api/datasets/{REPO}/revision/main"


def built(store: DatasetStore, workdir: Path, **more: Any) -> SnapshotManifest:
    found = build_snapshot(spec_of(**more), store, now=1.0, workdir=workdir, base=workdir.parent)
    assert store.current_snapshot() == found.snapshot
    return found


def unchanged(store: DatasetStore, workdir: Path, **more: Any) -> int:
    workdir.mkdir()
    counts = changed_rows(spec_of(**more), store, workdir=workdir, base=workdir.parent)
    assert counts is not None
    return counts.unchanged


def test_what_rows_depend_on_is_read_again_and_what_they_do_not_is_not(
    hub: LocalHub, local_objects: Objects, tmp_path: Path
) -> None:
    store, system = DatasetStore(local_objects, "sums"), tmp_path / "system.md"
    system.write_text("Be short.")
    prompt = {"user": "{{ q }}", "system_from": "system.md"}
    first = built(store, tmp_path / "1", prompt=prompt)
    assert built(store, tmp_path / "2", prompt=prompt, deadline="6h", description="Sums.") == first
    system.write_text("Be long.")
    assert built(store, tmp_path / "3", prompt=prompt).changed == 40
    assert built(store, tmp_path / "4", prompt=prompt, source={"path": TRAIN, "limit": 5}).rows == 5


def test_a_damaged_snapshot_is_made_again(hub: LocalHub, local_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(local_objects, "sums")
    first = built(store, tmp_path / "1")
    store.objects.delete([store.snapshot_path(first.snapshot, first.shards[0].path)])
    assert built(store, tmp_path / "2").snapshot == first.snapshot
    assert store.objects.exists(store.snapshot_path(first.snapshot, first.shards[0].path))


def test_rows_that_cannot_be_used_make_the_same_snapshot_at_another_commit(
    hub: LocalHub, local_objects: Objects, tmp_path: Path
) -> None:
    store = DatasetStore(local_objects, "sums")
    hub.put(REPO, {"bad.jsonl": b'{"n": "1", "q": "x"}\nno\n'})
    path = f"hf://datasets/{REPO}/*.jsonl"
    first = built(store, tmp_path / "1", source={"path": path}, on_bad_row="skip")
    hub.put(REPO, {"README.md": b"# Other words"})
    assert built(store, tmp_path / "2", source={"path": path}, on_bad_row="skip").snapshot == first.snapshot
    assert first.rejected == 1


def test_a_commit_is_not_looked_up(hub: LocalHub) -> None:
    commit = hub.repositories[REPO].branches["main"][-1][0]
    assert pinned(TRAIN) == f"hf://datasets/{REPO}@{commit}/data/train-*.parquet"
    assert pinned(pinned(TRAIN)) == pinned(TRAIN) and len(hub.requests) == 3
    assert pinned("s3://bucket/x.csv") == "s3://bucket/x.csv"


def test_evaluation_files_of_a_filter_may_lie_there(hub: LocalHub, tmp_path: Path) -> None:
    rule = OverlapRule.model_validate(
        {"files": f"hf://datasets/{REPO}/data/test-*.parquet", "text": "q", "column": "q"}
    )
    assert len(files_digest(rule, tmp_path)) == 64
    assert [one.name for one in find_files(rule.files, tmp_path)] == [f"hf://datasets/{REPO}/data/test-0.parquet"]


def test_the_asset_says_the_commit_and_fails_in_one_sentence(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dataset_project(tmp_path, source={"path": TRAIN}, prompt={"user": "{{ q }}"}, id="n") as site:
        (made,) = site.materialize("prompts").asset_materializations_for_node("d__prompts")
        commit = hub.repositories[REPO].branches["main"][-1][0]
        assert made.metadata["source"].value == f"hf://datasets/{REPO}@{commit}/data/train-*.parquet"
        assert (made.metadata["rows"].value, site.manifest().rows) == (40, 40)
        hub.repositories[REPO].private = True
        failed = site.materialize("prompts")
        assert not failed.success and "it is private, or not there; set HF_TOKEN" in site.reason()
        assert site.manifest().rows == 40


# What is refused


def test_what_is_not_there_is_answered_with_what_is(hub: LocalHub, tmp_path: Path) -> None:
    there = "its files: data/test-0.parquet, data/train-0.parquet, data/train-1.parquet"
    for path in (f"{REPO}/data/tarin-*.parquet", f"{REPO}/other/*.csv", f"{REPO}/data"):
        assert refusal(f"hf://datasets/{path}", tmp_path) == f"hf://datasets/{path}: no such file; {there}"
    said = refusal(f"hf://datasets/{REPO}", tmp_path)
    assert f"expected a file or a glob of files, found a repository; {there}" in said
    assert said.endswith(f"write for example hf://datasets/{REPO}/data/*.parquet")
    hub.put("acme/empty", {"README.md": b"# Nothing"})
    assert "its files: none that ends in .parquet" in refusal("hf://datasets/acme/empty/*.csv", tmp_path)
    hub.put("acme/many", {f"x-{i:02}.csv": b"q\n" for i in range(25)})
    assert "x-09.csv and 15 more" in refusal("hf://datasets/acme/many/*.parquet", tmp_path)


def test_who_may_not_read_is_told_what_to_do(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put("acme/secret", {"x.csv": b"q\n1\n"}, private=True)
    for path in ("hf://datasets/acme/secret/x.csv", "hf://datasets/acme/nothing/x.csv"):
        assert "it is private, or not there; set HF_TOKEN" in refusal(path, tmp_path)
    hub.repositories[REPO].gated = True
    gated = f"found a gated one: accept its terms at {hub.url}/datasets/{REPO}"
    assert f"{gated} and set HF_TOKEN" in refusal(TRAIN, tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert column("hf://datasets/acme/secret/x.csv", "q", tmp_path) == ["1"]
    assert f"{gated} with the account of the token in HF_TOKEN" in refusal(TRAIN, tmp_path)
    said = refusal("hf://datasets/acme/nothing/x.csv", tmp_path)
    assert "expected a dataset that the token in HF_TOKEN may read, found none; correct the name" in said
    assert "expected the revision 'v2', found none" in refusal(f"hf://datasets/{REPO}@v2/x.csv", tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    said = refusal("hf://datasets/acme/secret/x.csv", tmp_path)
    assert "expected a token that the hub knows in HF_TOKEN" in said and "hf_old" not in said


def test_a_hub_that_is_away_or_answers_nonsense_is_one_sentence(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batch_assets.snapshot.source.hub_files.LONGEST_WAIT", 0.0)
    hub.fail("/tree/", 503, times=100)
    assert "the hub answers 503; run again when it is back" in refusal(TRAIN, tmp_path)
    hub.faults.clear()

    async def nonsense(request: web.Request) -> web.StreamResponse | None:
        return web.Response(text="<html>") if "/revision/" in request.path else None

    hub.faults.append(nonsense)
    assert "expected JSON of the hub's API" in refusal(TRAIN, tmp_path)
    hub.faults.clear()
    monkeypatch.setattr(hub_files, "MOST_LISTING_BYTES", 100)
    assert "expected an answer of at most 100 bytes, found more" in refusal(TRAIN, tmp_path)
    monkeypatch.setattr(hub_files, "MOST_LISTING_BYTES", 1 << 20)
    monkeypatch.setattr(hub_files, "MOST_FILES", 3)
    assert "expected at most 3 files" in refusal(f"hf://datasets/{REPO}/**/*.parquet", tmp_path)
    monkeypatch.setattr(hub_files, "ANSWER_SECONDS", -1.0)
    assert "found a part of one" in refusal(TRAIN, tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "expected an answer, found ConnectError" in refusal(TRAIN, tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    assert "expected to be online, found HF_HUB_OFFLINE set" in refusal(TRAIN, tmp_path)


def test_without_the_package_it_says_how_to_have_it(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "found none; `pip install 'batch-assets[hub]'` brings it" in refusal(TRAIN, tmp_path)


def test_the_token_goes_to_the_hub_alone_and_is_nowhere_else(
    hub: LocalHub,
    local_objects: Objects,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    given: list[bool] = []

    async def look(request: web.Request) -> None:
        given.append(request.headers.get("Authorization") == f"Bearer {TOKEN}" or "/storage/" in request.path)

    hub.faults.append(look)
    with caplog.at_level(logging.DEBUG):
        manifest = built(DatasetStore(local_objects, "sums"), tmp_path / "1")
    assert all(given) and hub.served and not any(authorized for _, _, authorized in hub.served)
    assert TOKEN not in caplog.text and TOKEN not in manifest.to_json().decode()
    monkeypatch.setenv("HF_ENDPOINT", f"http://user:{TOKEN}@127.0.0.1:9")
    assert "HF_ENDPOINT: expected an address without user" in refusal(TRAIN, tmp_path)


def test_a_token_on_this_disk_is_not_sent(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("hf_of_this_disk")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    assert column(TRAIN, "n", tmp_path)[0] == "id-0", "the hub refuses a token that it does not know"


def test_the_next_page_is_asked_for_at_the_same_hub(hub: LocalHub, tmp_path: Path) -> None:
    async def elsewhere(request: web.Request) -> web.StreamResponse | None:
        if "/tree/" not in request.path or "cursor" in request.query:
            return None
        one = {"type": "file", "path": "data/train-0.parquet", "size": 1, "oid": "0"}
        link = '<http://192.0.2.1/api/tree?cursor=2>; rel="next"'
        return web.json_response([one], headers={"Link": link})

    hub.faults.append(elsewhere)
    found = [one.path for one in HubCommit.of(HubAddress(REPO)).list("data")]
    assert found == ["data/train-0.parquet", "data/train-1.parquet"]


def test_an_endpoint_with_a_secret_is_refused_for_a_push_too() -> None:
    with pytest.raises(StoreError, match="HF_ENDPOINT: expected an address without user") as error:
        hub_api({"HF_ENDPOINT": "https://user:xyz@host"})
    assert "xyz" not in str(error.value)
