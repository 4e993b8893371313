"""Whether the webserver has loaded the definitions, and what is wrong when it has not."""

from __future__ import annotations

import enum
import http.client
import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batch_assets.local_dagster.home import (
    ANSWER_BYTES,
    LOGS,
    StackError,
)
from batch_assets.webserver import token as web_token
from gpu_runner.bounded_http.addresses import direct
from gpu_runner.bounded_http.small_pages import read_page


class LocationStatus(enum.Enum):
    """What the webserver says of the definitions."""

    UNREACHABLE = "unreachable"  # the webserver or its code server does not answer
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LocationState:
    """`error`: what the code server says of definitions that have FAILED."""

    status: LocationStatus
    error: str = ""


def wait_loaded(url: str, home: Path, seconds: float, healthy: Callable[[], bool]) -> None:
    """Until the definitions are loaded. Raises StackError when they cannot be, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and healthy():
        found = location_state(url, home)
        if found.status is LocationStatus.LOADED:
            return
        if found.status is LocationStatus.FAILED:
            raise StackError(f"the definitions do not load:\n{found.error}")
        time.sleep(0.2)
    raise StackError(f"Dagster on {home} did not answer in time at {url}; its logs: {home / LOGS}")


def location_state(url: str, home: Path) -> LocationState:
    """What the webserver at this address says of its definitions now."""
    from batch_assets.dagster_internals.code_server import is_unreachable

    query = (
        "{ workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError { __typename "
        "... on PythonError { message className } } } } } }"
    )
    request = urllib.request.Request(
        f"{url}/graphql",
        json.dumps({"query": query}).encode(),
        {"Content-Type": "application/json", **web_token.headers(home)},
    )
    try:
        with direct.open(request, timeout=10) as answer:
            entries = json.loads(read_page(answer, ANSWER_BYTES, 10))["data"]["workspaceOrError"]["locationEntries"]
    except (OSError, http.client.HTTPException, KeyError, TypeError, ValueError):
        return LocationState(LocationStatus.UNREACHABLE)
    if not entries or any(entry["loadStatus"] != "LOADED" for entry in entries):
        return LocationState(LocationStatus.LOADING)
    for entry in entries:
        found = entry["locationOrLoadError"]
        if found and found["__typename"] == "PythonError":
            if is_unreachable(found["className"]):
                return LocationState(LocationStatus.UNREACHABLE)
            return LocationState(LocationStatus.FAILED, str(found["message"]))
    return LocationState(LocationStatus.LOADED)
