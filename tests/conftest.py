"""Stores for tests (a folder, a bucket of moto's S3 server on loopback) and databases of fleets (SQLite, Postgres).

Heavy packages are imported in functions: the process that only hands out tests to pytest-xdist's workers needs none.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
from collections.abc import Generator, Iterator
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from support.soak import GROUPS, group_of
from support.timing import PATIENCE
from support.whole_modules import MARKS, mark_of
from support.worker_shares import in_shares

if TYPE_CHECKING:
    import dagster as dg
    from alembic.config import Config
    from support.fleet_databases import Clock

    from gpu_runner.fleet_database.database import FleetDatabase
    from resources.objects.opening import Objects

# Almost nothing of what is imported and collected is garbage: looking for it took a fifth of a collection's CPU.
gc.disable()

LONG_SECONDS = 300.0  # a module with such a time-out has long tests
SLOW_SECONDS = 400.0  # after which a slow test without a time-out of its own is held to hang
# Modules of the engine contract that ask the same servers, which live as long as the process that runs the tests.
SHARED_SERVERS = ("tests/contract/test_engine_client_contract.py", "tests/contract/test_engine_contract.py")
CLUSTER_MODULES = ("support.kubernetes_cluster", "support.kubernetes_platform")
UMASK = os.umask(0o022)
os.umask(UMASK)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Settings of the processes that run tests."""
    worker = hasattr(config, "workerinput")
    if config.getoption("dist", "no") != "no" and not worker:
        return
    from hypothesis import settings

    # Hypothesis would fail an example that takes 0.2 s of wall-clock time.
    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")
    for kind in ("BetaWarning", "PreviewWarning", "SupersessionWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::dagster.{kind}")
    if worker:
        atexit.register(os._exit, 0)  # all is reported: to take a million objects apart takes seconds of CPU


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--group`: of the tests marked `soak`, those of one subject."""
    parser.addoption("--group", choices=sorted(GROUPS), help="Of the soak tests, those of this group.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules that are slow as a whole are not imported where no slow test runs: theirs are the dearest imports.

    Single tests of a slow module may be soak tests. An expression with `or` ("slow or not slow") may choose anything.
    """
    chosen = config.getoption("markexpr")
    if collection_path.suffix != ".py" or " or " in chosen:
        return None
    left_out = [mark for mark in MARKS if f"not {mark}" in chosen]
    return True if mark_of(collection_path) in left_out else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`: modules that share servers go to one worker, which starts each server once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return SHARED_SERVERS[0] if file in SHARED_SERVERS else file

    return ByServer(config, log)


@functools.cache
def uses_cluster(module: ModuleType) -> bool:
    """Whether its tests use the real Kubernetes, of which there is one on a machine."""
    return any(getattr(value, "__module__", None) in CLUSTER_MODULES for value in vars(module).values())


def needs_cluster(item: pytest.Item) -> bool:
    """Whether the test may wait for the cluster's lock."""
    module = item.getparent(pytest.Module)
    return module is not None and uses_cluster(module.obj)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of pytest-xdist does not know by itself how the tests are handed out."""
    node.workerinput["dist"] = node.config.getoption("dist")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose a group. A test that hangs ends after `PATIENCE` times what its mark says, or --timeout.

    Tests that need the cluster come first. Of several workers the first one then has them all, one after the other;
    elsewhere in the order two workers would meet at the cluster's lock, and one of them wait. Modules with time-outs of
    their own follow, the longest first: when a long test is begun last, all other workers wait for its end. Where
    workers take tests from each other, each begins with its share of the long ones.
    """
    longest: dict[Path, float] = {}
    for item in items:
        longest[item.path] = max(longest.get(item.path, 0.0), marked_seconds(item) or 0.0)
    items.sort(key=lambda item: (not needs_cluster(item), -longest[item.path]))
    if wanted := config.getoption("group"):
        config.hook.pytest_deselected(items=[item for item in items if group_of(item) != wanted])
        items[:] = [item for item in items if group_of(item) == wanted]
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if worker.get("dist") == "worksteal":
        long = [item for item in items if needs_cluster(item) or longest[item.path] >= LONG_SECONDS]
        by_module = [list(found) for _, found in groupby(long, lambda item: needs_cluster(item) or item.path)]
        items[:] = in_shares(by_module, items[len(long) :], int(worker["workercount"]))
    if config.getoption("timeout") is not None:
        return
    for item in items:
        usual = SLOW_SECONDS if set(MARKS).intersection(item.keywords) else float(config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(PATIENCE * (marked_seconds(item) or usual)), append=False)


def marked_seconds(item: pytest.Item) -> float | None:
    """What the test's mark allows it."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Our command line sets the umask of its process; a test that calls it in ours leaves it to none of the others."""
    os.umask(UMASK)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Also in the process that only hands out tests, where nothing is collected."""
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What is there before the first test stays: looking through it for garbage took a tenth of all CPU."""
    gc.freeze()  # with 10 MB of garbage: to look for it takes longer than to keep it
    gc.set_threshold(10_000, 10, 50)
    atexit.register(gc.unfreeze)  # DuckDB complains at the end of a process of what was not collected


@pytest.fixture(scope="session", autouse=True)
def databases_are_prepared() -> Iterator[None]:
    """See `prepared_databases`."""
    from support.prepared_databases import prepared_databases

    with prepared_databases():
        yield


@pytest.fixture(scope="session", autouse=True)
def dagsters_migrations_are_read_once() -> Iterator[None]:
    """Each Dagster instance stamps four databases, and reads all of Dagster's migrations for each: 0.1 s of CPU."""
    from alembic.script import ScriptDirectory

    read: dict[str | None, ScriptDirectory] = {}
    from_config = ScriptDirectory.from_config

    def cached(config: Config) -> ScriptDirectory:
        place = config.get_alembic_option("script_location")
        if place not in read:
            read[place] = from_config(config)
        return read[place]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", cached)
        yield


@pytest.fixture(scope="session", autouse=True)
def the_command_line_is_built_once() -> Iterator[None]:
    """Typer makes all commands anew for each call of one: 15 ms of CPU. They keep nothing between calls."""
    from typer import testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", functools.cache(testing._get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """No test cuts the power, and on a busy disk thousands of `fsync` take minutes."""
    from support.prepared_databases import unsynced_databases

    with unsynced_databases(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Address of an S3 server that lives as long as the tests; its bucket is `bucket`."""
    from support.local_s3 import local_s3

    with local_s3() as address:
        yield address


@pytest.fixture
def local_objects(tmp_path: Path) -> Objects:
    """An empty store in a folder."""
    from resources.objects.opening import open_objects

    return open_objects(str(tmp_path / "store"))


@pytest.fixture
def s3_objects(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """An empty store below a prefix of its own in the S3 server's bucket."""
    import boto3

    from resources.objects.opening import open_objects

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
    """Of an empty database for a fleet's database: on SQLite, then on Postgres."""
    from support.fleet_databases import postgres_url, sqlite_url

    sqlite = request.param == "sqlite"
    with sqlite_url(tmp_path) if sqlite else postgres_url(request.getfixturevalue("server")) as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def stored_instance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """Dagster's instance of a folder, its storage on SQLite, then on Postgres."""
    import dagster as dg
    from support.fleet_databases import postgres_url

    with contextlib.ExitStack() as stack:
        storage = ""
        if request.param == "postgres":
            url = stack.enter_context(postgres_url(request.getfixturevalue("server")))
            storage = f"storage: {{postgres: {{postgres_url: '{url}'}}}}"
        (tmp_path / "dagster.yaml").write_text(storage)
        yield stack.enter_context(dg.DagsterInstance.from_config(str(tmp_path)))


@pytest.fixture
def clock() -> Clock:
    """What the fleet's database takes for the database's clock."""
    from support.fleet_databases import Clock

    return Clock()


@pytest.fixture
def fleet_db(url: str, clock: Clock) -> Iterator[FleetDatabase]:
    """An empty book on each kind of database."""
    from gpu_runner.fleet_database.database import FleetDatabase

    with contextlib.closing(FleetDatabase(url, now=clock)) as fleet_db:
        yield fleet_db
