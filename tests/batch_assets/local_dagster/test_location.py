"""What the webserver says of the definitions, told apart by Dagster's types, not by the words of its errors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from dagster._core.errors import DagsterUserCodeUnreachableError
from support.http_server import http_server

from batch_assets.dagster_internals.code_server import is_unreachable
from batch_assets.local_dagster.home import StackError
from batch_assets.local_dagster.location import LocationState, LocationStatus, location_state, wait_loaded


def entry(status: str, error: dict[str, str] | None = None) -> dict[str, object]:
    found = {"__typename": "PythonError", **error} if error else {"__typename": "RepositoryLocation"}
    return {"loadStatus": status, "locationOrLoadError": found}


def asked(home: Path, *entries: dict[str, object]) -> LocationState:
    """The state that a webserver with these entries is found in."""

    async def graphql(request: web.Request) -> web.Response:
        assert "className" in (await request.json())["query"]
        return web.json_response({"data": {"workspaceOrError": {"locationEntries": list(entries)}}})

    async def ask() -> LocationState:
        async with http_server({"/graphql": graphql}) as url:
            return await asyncio.to_thread(location_state, url, home)

    return asyncio.run(ask())


UNREACHABLE = DagsterUserCodeUnreachableError.__name__


@pytest.mark.parametrize(
    ("entries", "state"),
    [
        ([], LocationState(LocationStatus.LOADING)),
        ([entry("LOADING")], LocationState(LocationStatus.LOADING)),
        ([entry("LOADED")], LocationState(LocationStatus.LOADED)),
        ([entry("LOADED", {"message": "gone", "className": UNREACHABLE})], LocationState(LocationStatus.UNREACHABLE)),
        (
            [entry("LOADED", {"message": "SpecError: Could not reach user code server", "className": "SpecError"})],
            LocationState(LocationStatus.FAILED, "SpecError: Could not reach user code server"),
        ),
        ([entry("LOADED", {"message": "loaded", "className": "E"})], LocationState(LocationStatus.FAILED, "loaded")),
    ],
)
def test_the_state_of_the_definitions(entries: list[dict[str, object]], state: LocationState, tmp_path: Path):
    assert asked(tmp_path, *entries) == state


def test_nobody_there_is_unreachable(tmp_path: Path):
    assert location_state("http://127.0.0.1:9", tmp_path) == LocationState(LocationStatus.UNREACHABLE)


def test_who_waits_is_told_what_is_wrong_with_the_definitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failed = LocationState(LocationStatus.FAILED, "loading")
    monkeypatch.setattr("batch_assets.local_dagster.location.location_state", lambda *_: failed)
    with pytest.raises(StackError, match="the definitions do not load:\nloading"):
        wait_loaded("http://127.0.0.1:9", tmp_path, 5.0, lambda: True)


@pytest.mark.slow
def test_dagster_names_the_class_of_an_error():
    from dagster_graphql.schema.errors import GraphenePythonError  # and with it all of GraphQL's schema

    assert "className" in GraphenePythonError._meta.fields
    assert is_unreachable("DagsterUserCodeUnreachableError")
    assert is_unreachable("DagsterUserCodeUnreachableTimeoutError")
    assert not is_unreachable("SpecError") and not is_unreachable(None)
