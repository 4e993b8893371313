"""The stock clients of Python and Node, as unchanged scripts use them."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
from support.batch_api import CHAT, BatchApi, jsonl

pytestmark = pytest.mark.slow

NODE_PACKAGES = "BATCH_API_NODE_MODULES"  # a folder that has the package openai; else npm installs it


def test_the_python_client_finds_all_that_it_expects(api: BatchApi, client: openai.OpenAI) -> None:
    content = jsonl(api.chat("a"), api.chat("b"))
    life: Any = {"anchor": "created_at", "seconds": 3_600}
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch", expires_after=life)
    assert file.expires_at == file.created_at + 3_600 and client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    made = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"x": "y"}, output_expires_after=life
    )
    assert made.status == "validating" and made.metadata == {"x": "y"}
    api.until(made.id)
    batch = client.batches.retrieve(made.id)
    assert batch.status == "completed" and batch.usage is not None and batch.usage.total_tokens > 0
    assert batch.request_counts is not None and batch.request_counts.completed == 2
    assert batch.output_file_id is not None and len(client.files.content(batch.output_file_id).text.splitlines()) == 2
    assert client.models.retrieve(api.model).id == api.model
    assert file.id in [one.id for one in client.files.list(limit=2)]  # the client turns the pages


def test_the_python_client_turns_all_pages(api: BatchApi, client: openai.OpenAI) -> None:
    file = api.file()["id"]
    mine = {api.create(file).json()["id"] for _ in range(5)}
    pages = [one.id for one in client.batches.list(limit=2)]
    assert mine <= set(pages) and len(pages) == len(set(pages))


def test_the_python_client_raises_the_documented_errors(api: BatchApi, client: openai.OpenAI) -> None:
    name = api.file()["id"]
    assert client.files.delete(name).deleted is True
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(name)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_nothing")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
    assert refused.value.param == "input_file_id" and refused.value.type == "invalid_request_error"
    assert refused.value.request_id


def test_a_batch_of_the_python_client_that_is_refused(api: BatchApi, client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", b"{\n"), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    api.until(made.id)
    batch = client.batches.retrieve(made.id)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == ("invalid_json_line", 1)


def test_the_node_client_finds_all_that_it_expects(api: BatchApi, tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    _install_openai(tmp_path)
    script = shutil.copy(Path(__file__).with_name("stock_client.mjs"), tmp_path)
    command = ["node", script, f"{api.base}/v1", api.model, api.key]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert found["batch"]["status"] == "completed" and found["batch"]["metadata"] == {"x": "y"}
    assert sorted(found["ids"]) == ["a", "b"] and found["batch"]["request_counts"]["completed"] == 2
    assert found["batch"]["id"] in found["listed"] and len(found["listed"]) == len(set(found["listed"])) >= 2
    assert found["file"]["id"] in found["files"] and api.model in found["models"]
    assert found["bad"]["status"] == "failed" and found["bad"]["errors"]["data"][0]["code"] == "url_mismatch"
    assert found["deleted"] == {"id": found["file"]["id"], "object": "file", "deleted": True}
    assert [found[name]["status"] for name in ("missing", "gone", "wrong", "late")] == [404, 404, 400, 400]
    assert (found["wrong"]["param"], found["wrong"]["type"]) == ("endpoint", "invalid_request_error")
    assert (found["missing"]["name"], found["wrong"]["name"]) == ("NotFoundError", "BadRequestError")


def _install_openai(folder: Path) -> None:
    """The package `openai` in a folder for node, or a skip."""
    (folder / "package.json").write_text('{"type": "module"}')
    if packages := os.environ.get(NODE_PACKAGES):
        (folder / "node_modules").symlink_to(packages)
        return
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    install = ["npm", "install", "--no-audit", "--no-fund", "--silent", "openai"]
    if subprocess.run(install, cwd=folder, capture_output=True, timeout=120, check=False).returncode != 0:
        pytest.skip("npm cannot install the package openai here")
