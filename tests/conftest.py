"""Stores for tests: a folder, and a bucket of moto's S3 server on loopback."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from resources.objects import Objects, open_objects


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
