"""The service against its own OpenAPI description: requests made from it, valid and not; each answer is held to it."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.api_service import jsonl, line, no_instance
from support.front_doors import front_door_alone
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE

from batch_assets.api import server, service
from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.front_door import build_front_door
from batch_assets.api.openapi import docs_page
from batch_assets.api.requests.callers import Scope
from batch_assets.api.settings import ApiSettings

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES = 10
RESPONSES = "/v1/responses"  # the simulated engine has none: 404


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and key of the whole service before a simulated engine."""
    home = tmp_path_factory.mktemp("openapi")
    (home / "limits.yaml").write_text("default: {requests_per_minute: 10000000, tokens_per_minute: 1000000000000}\n")
    database = f"sqlite:///{home}/api.db"
    with contextlib.closing(KeyStore(database, time.time)) as keys:
        _, key = keys.create("acme", frozenset(Scope))
    before, service._open_instance = service._open_instance, no_instance
    with simulated_engine("--speed", "1000") as engine:
        found = ApiSettings(home, f"{home}/store", database, port=0, endpoints=(engine.url,))
        running = uvicorn.Server(server.server_config(build_front_door(found), found))
        thread = threading.Thread(target=running.run, daemon=True)
        thread.start()
        try:
            deadline = time.monotonic() + 30 * PATIENCE
            while not running.started:
                assert thread.is_alive() and time.monotonic() < deadline
                time.sleep(0.02)
            yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}", key
        finally:
            running.should_exit = True
            thread.join(30)
            service._open_instance = before


@pytest.fixture(scope="module")
def api_schema(served: tuple[str, str]) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{served[0]}/openapi.json")


class Things:
    """What a valid request may name: every second one does, so that it comes further than `not found`."""

    def __init__(self, client: httpx.Client) -> None:
        self._client, self._number = client, 0
        self.model = str(client.get("/v1/models").json()["data"][0]["id"])

    def put_into(self, case: schemathesis.Case) -> None:
        """Put a file, a batch or a model that is there in place of an invented one."""
        self._number += 1
        if self._number % 2:
            return
        if "file_id" in (case.path_parameters or {}):
            case.path_parameters["file_id"] = self._file()
        if "batch_id" in (case.path_parameters or {}):
            case.path_parameters["batch_id"] = self._batch()
        if "task_id" in (case.path_parameters or {}):
            asked = {**ASKED["/v1/inference"], "model": self.model}
            case.path_parameters["task_id"] = self._client.post("/v1/inference", json=asked).json()["task_id"]
        if "model" in (case.path_parameters or {}):
            case.path_parameters["model"] = self.model
        if isinstance(case.query, dict):
            for name in ("after", "page", "end_time"):
                case.query.pop(name, None)
        if isinstance(case.body, dict) and "model" in case.body:
            stream = {"stream": True} if case.body.get("stream") is True else {}
            case.body = {**ASKED[case.path], "model": self.model, **stream}
        if isinstance(case.body, dict) and "input_file_id" in case.body:
            case.body = {**BATCH, "input_file_id": self._file()}

    def _file(self) -> str:
        files = {"file": ("in.jsonl", jsonl([line("a", model=self.model)]))}
        return str(self._client.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"])

    def _batch(self) -> str:
        return str(self._client.post("/v1/batches", json={**BATCH, "input_file_id": self._file()}).json()["id"])


BATCH = {"endpoint": "/v1/chat/completions", "completion_window": "1h"}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
    RESPONSES: {"input": "hi"},
    "/v1/inference": {"client_id": "c", "input": "hi"},
}


@pytest.fixture(scope="module")
def things(served: tuple[str, str]) -> Iterator[Things]:
    with httpx.Client(base_url=served[0], headers={"Authorization": f"Bearer {served[1]}"}, timeout=60) as client:
        yield Things(client)


def described(home: Path) -> dict[str, Any]:
    """The description of the whole service."""
    return dict(front_door_alone(ApiSettings(home, "store", f"sqlite:///{home}/api.db")).inner.openapi())


OPERATIONS = [
    f"{method} {path}"
    for method, path in [
        ("POST", "/v1/files"),
        ("GET", "/v1/files"),
        ("GET", "/v1/files/{file_id}"),
        ("DELETE", "/v1/files/{file_id}"),
        ("GET", "/v1/files/{file_id}/content"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches"),
        ("GET", "/v1/batches/{batch_id}"),
        ("POST", "/v1/batches/{batch_id}/cancel"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{model}"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/organization/usage/completions"),
        ("GET", "/v1/organization/usage/embeddings"),
        ("GET", "/v1/organization/costs"),
        ("POST", "/v1/inference"),
        ("GET", "/v1/result/{task_id}"),
        ("GET", "/v1/dead_letters"),
        ("POST", "/v1/dead_letters/redrive"),
    ]
]


def test_every_operation_is_tried_and_declares_its_answer_and_errors(tmp_path: Path) -> None:
    found = described(tmp_path)
    there = {f"{method.upper()} {path}" for path, operations in found["paths"].items() for method in operations}
    assert there == set(OPERATIONS)
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            assert {"400", "401", "403", "404", "429", "503"} <= set(responses), (method, path)
            (answer,) = [response for status, response in responses.items() if status < "300"]
            assert "422" not in responses and answer["content"], (method, path)
            for status, response in responses.items():
                if status >= "300":
                    assert response["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
    assert set(found["components"]["securitySchemes"]) == {"bearer"}


# The service's threads draw from the same `random` while Hypothesis looks whether a strategy does.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_answers_are_as_described(
    api_schema: schemathesis.BaseSchema,
    served: tuple[str, str],
    things: Things,
    operation: str,
    mode: GenerationMode,
) -> None:
    method, path = operation.split()
    found = api_schema[path][method]

    @seed(20261123)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=found.as_strategy(generation_mode=mode))
    def tried(case: schemathesis.Case) -> None:
        if isinstance(case.query, dict):
            case.query.pop("wait", None)  # up to a minute
        if mode is GenerationMode.POSITIVE:
            things.put_into(case)
        response = case.call(headers={"Authorization": f"Bearer {served[1]}"}, timeout=20 * PATIENCE)
        seen.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    seen: set[int] = set()
    try:
        tried()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "there is a valid request"  # without parameters nothing can be wrong
    assert mode is GenerationMode.NEGATIVE or path == RESPONSES or seen & {200, 202}, seen


@pytest.mark.slow
def test_an_answer_that_is_not_as_described_is_found(
    api_schema: schemathesis.BaseSchema, served: tuple[str, str]
) -> None:
    """What holds the answers to the description can fail."""
    headers = {"Authorization": f"Bearer {served[1]}"}
    raw = copy.deepcopy(api_schema.raw_schema)
    case = api_schema["/v1/models"]["GET"].Case()
    case.validate_response(case.call(headers=headers), checks=CHECKS)
    raw["components"]["schemas"]["Model"]["required"].append("price")
    other = schemathesis.openapi.from_dict(raw)
    other.config.update(base_url=served[0])
    case = other["/v1/models"]["GET"].Case()
    with pytest.raises(FailureGroup, match="price"):
        case.validate_response(case.call(headers=headers), checks=CHECKS)


def test_the_page_of_docs_has_every_call_and_loads_nothing(tmp_path: Path) -> None:
    page = docs_page.page(described(tmp_path))
    for operation in OPERATIONS:
        method, path = operation.split()
        assert f"{method}</span><code>{path}</code>" in page
    assert "<script" not in page and "http://" not in page and "https://" not in page
    names = set(re.findall(r"href='#(\w+)'", page))
    assert names and all(f"<details id='{name}'>" in page for name in names)


def test_the_page_of_docs_shows_names_as_text() -> None:
    evil = "<img src=x>"
    operation = {"summary": evil, "description": evil, "responses": {"200": {"description": evil}}, "tags": [evil]}
    found = {
        "info": {"title": evil, "summary": evil},
        "paths": {f"/{evil}": {"get": operation}},
        "components": {
            "securitySchemes": {"bearer": {"description": evil}},
            "schemas": {"A": {"properties": {evil: {"description": evil, "enum": [evil]}}, "description": evil}},
        },
    }
    assert evil not in docs_page.page(found) and "&lt;img" in docs_page.page(found)
