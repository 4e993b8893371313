"""Stores for tests (a folder, a bucket of moto's S3 server on loopback) and books of fleets (SQLite, Postgres)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_books import Clock, postgres_url, sqlite_url
from pace import PATIENCE

from gpu_runner.fleet import FleetBook
from resources.objects import Objects, open_objects


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each test's time limit is `PATIENCE` times what its mark says, unless --timeout says one."""
    if config.getoption("timeout") is not None:
        return
    usual = float(config.getini("timeout"))
    for item in items:
        mark = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout(PATIENCE * (mark.args[0] if mark else usual)), append=False)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Address of an S3 server that lives as long as the tests; its bucket is `bucket`."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def local_objects(tmp_path: Path) -> Objects:
    """An empty store in a folder."""
    return open_objects(str(tmp_path / "store"))


@pytest.fixture
def s3_objects(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """An empty store below a prefix of its own in the S3 server's bucket."""
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    boto3.client("s3").create_bucket(Bucket="bucket")
    return open_objects(f"s3://bucket/{tmp_path.name}")


@pytest.fixture(params=["local", "s3"])
def any_objects(request: pytest.FixtureRequest) -> Objects:
    """The same test on a folder and on S3."""
    objects: Objects = request.getfixturevalue(f"{request.param}_objects")
    return objects


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """URL of a Postgres server that lives as long as the tests."""
    from benchmarks.postgres import postgres, why_not

    if reason := why_not():
        pytest.skip(reason)
    with postgres(durable=False) as server:
        yield server.url()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of an empty database for a fleet's book: on SQLite, then on Postgres."""
    sqlite = request.param == "sqlite"
    with sqlite_url(tmp_path) if sqlite else postgres_url(request.getfixturevalue("server")) as url:
        yield url


@pytest.fixture
def clock() -> Clock:
    """What the book takes for the database's clock."""
    return Clock()


@pytest.fixture
def book(url: str, clock: Clock) -> Iterator[FleetBook]:
    """An empty book on each kind of database."""
    with contextlib.closing(FleetBook(url, now=clock)) as book:
        yield book
