"""Two replicas over Postgres and one store: one ends under load, and no call and no line is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.fleet_databases import postgres_url

from benchmarks.front_door_load import Ended, run

pytestmark = pytest.mark.soak("api")


@pytest.mark.parametrize("end", ["kill", "drain"])
def test_nothing_is_lost_when_one_of_two_replicas_ends_under_load(tmp_path: Path, server: str, end: str) -> None:
    with postgres_url(server) as database:
        found = asyncio.run(run(tmp_path, end, database, at_once=6, seconds=4.0))
    assert isinstance(found, Ended)
    assert found.lost == []
    assert found.moved > 0 and min(found.calls[kind] for kind in ("poll", "create", "proxy")) > 0
