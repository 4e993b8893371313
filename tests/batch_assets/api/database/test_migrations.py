"""Versions of the service's tables: a database of any earlier version is brought to today's and loses nothing."""

from __future__ import annotations

import contextlib
import datetime
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from support.timing import PATIENCE

import batch_assets.api.database.usage_tables  # noqa: F401  # puts its tables onto METADATA
from batch_assets.api.access.api_keys import new_secret
from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.access.rate_limiter import BucketTable
from batch_assets.api.billing.usage import Kind, UsageKey, Used
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.batch_records import BatchRecords
from batch_assets.api.database.file_records import FileRecords
from batch_assets.api.database.migrations import HEAD, VERSION_TABLE, RecordsTooNew, upgrade, version_of
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.states import BatchStatus
from batch_assets.api.database.tables import METADATA

DUMP = Path(__file__).parents[3] / "fixtures" / "api_database_before_versions.sql"
NOW = 1_790_000_020.0


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A database as the code left it before its tables had versions."""
    path = tmp_path / "api.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(DUMP.read_text())
    return path


@contextlib.contextmanager
def opened(url: str) -> Iterator[Records]:
    with contextlib.closing(Records(url)) as records:
        yield records


def differences(engine: sa.Engine) -> list[object]:
    """What Alembic finds different between the database and the tables of today's code."""
    with engine.connect() as connection:
        options = {"include_object": lambda item, name, kind, *_: name != VERSION_TABLE, "compare_type": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), METADATA))


Rows = dict[str, list[dict[str, object]]]


def rows(path: Path, of: Rows | None = None) -> Rows:
    """Every row of the tables that the file had, by column; with `of`, the columns that were there then."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        names = ("api_batches", "api_files", "api_keys", "api_rate_buckets")
        found = {name: connection.execute(f"SELECT * FROM {name} ORDER BY 1").fetchall() for name in names}
    columns = {name: (of[name][0].keys() if of else None) for name in names}
    return {name: [{key: row[key] for key in columns[name] or row.keys()} for row in found[name]] for name in names}


def test_a_new_database_has_the_tables_of_the_code(url: str) -> None:
    with opened(url) as records:
        assert differences(records.engine) == []
        with records.reading() as connection:
            assert version_of(connection) == HEAD


def test_a_database_from_before_versions_is_upgraded_and_keeps_every_row(earlier: Path) -> None:
    before = rows(earlier)
    assert [len(found) for found in before.values()] == [2, 3, 2, 1]
    with opened(f"sqlite:///{earlier}") as records:
        assert differences(records.engine) == []
        done = BatchRecords(records).get("acme", "batch_a")
        assert (
            done is not None and done.state is BatchStatus.COMPLETED and done.metadata_values() == {"priority": "high"}
        )
        assert [batch.id for batch in BatchRecords(records).open_batches()] == ["batch_b"]
        assert FileRecords(records).get("zeta", "file-z", NOW) is not None
        assert FileRecords(records).get("acme", "file-z", NOW) is None
        decision, _ = BucketTable(records, lambda: NOW).take(("acme", "requests"), 1000, 1, 1)
        assert decision.remaining == 999  # full again after 20 s
    assert {**rows(earlier, before), "api_rate_buckets": before["api_rate_buckets"]} == before


def test_its_keys_let_the_same_tenants_in(earlier: Path) -> None:
    with contextlib.closing(KeyStore(f"sqlite:///{earlier}", lambda: NOW)) as keys:
        found = keys.find(new_secret(lambda count: b"\x01" * count))
        revoked = keys.find(new_secret(lambda count: b"\x03" * count))
    assert found is not None and (found.tenant, found.usable(NOW)) == ("acme", True)
    assert revoked is not None and (revoked.tenant, revoked.usable(NOW)) == ("zeta", False)


def test_a_file_that_has_only_some_of_the_tables_gets_the_others(earlier: Path) -> None:
    with contextlib.closing(sqlite3.connect(earlier)) as connection:  # only `keys` had opened it
        connection.executescript("DROP TABLE api_batches; DROP TABLE api_files; DROP TABLE api_rate_buckets")
    with opened(f"sqlite:///{earlier}") as records:
        assert differences(records.engine) == []


def test_a_process_of_the_version_before_goes_on_after_the_upgrade(earlier: Path) -> None:
    with opened(f"sqlite:///{earlier}") as records:
        with contextlib.closing(sqlite3.connect(earlier)) as old:  # the statements of its code
            old.execute(
                "INSERT INTO api_batches (id, tenant, endpoint, status, input_file_id, completion_window, "
                "created_at, expires_at, digest) VALUES "
                "('batch_c', 'acme', '/v1/embeddings', 'validating', 'file-a', '1h', 1, 2, 'd')"
            )
            old.execute("UPDATE api_batches SET completed = 1 WHERE id = 'batch_b'")
            old.commit()
        batches = BatchRecords(records)
        assert {batch.id for batch in batches.open_batches()} == {"batch_b", "batch_c"}
        went_on = batches.get("acme", "batch_b")
        assert went_on is not None and went_on.completed == 1


def test_a_database_of_a_later_version_is_refused_and_left_alone(earlier: Path) -> None:
    Records(f"sqlite:///{earlier}").close()
    with contextlib.closing(sqlite3.connect(earlier)) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        connection.commit()
    before = rows(earlier)
    with pytest.raises(RecordsTooNew, match=f"expected version {HEAD} or an earlier one, found 9999"):
        Records(f"sqlite:///{earlier}")
    assert rows(earlier) == before


_BATCH = (
    "INSERT INTO api_batches (id, tenant, endpoint, status, input_file_id, completion_window, created_at, expires_at, "
    "digest, reported, contents_deleted_at) VALUES ('{id}', 'acme', '/v1/embeddings', 'completed', 'f', '1h', 1, 2, "
    "'d', {true}, {deleted})"
)
_PART = "INSERT INTO api_usage_parts (batch_id, part, requests, amount) VALUES ('{id}', '00000', 1, 7)"
_USED = (
    "INSERT INTO api_usage (day, tenant, service_class, model, kind, requests, amount) VALUES "
    "('2027-03-01', 'acme', 'batch', 'm', 'completions', 1, {amount})"
)
_ADDED = (
    " ON CONFLICT (day, tenant, service_class, model, kind) DO UPDATE SET requests = api_usage.requests + "
    "excluded.requests, amount = api_usage.amount + excluded.amount"
)


def test_amounts_of_the_version_before_are_kept_and_go_on(url: str) -> None:
    """A line of nearly 2^63 picodollars, to which a replica of 0005 adds beside one of today's."""
    large, key = (1 << 63) - 10, UsageKey(datetime.date(2027, 3, 1), "acme", "batch", "m", Kind.COMPLETIONS)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        upgrade(connection, "0005")
        for name, deleted in (("batch_gone", "5"), ("batch_kept", "NULL")):
            true = "true" if engine.dialect.name == "postgresql" else "1"
            connection.exec_driver_sql(_BATCH.format(id=name, deleted=deleted, true=true))
            connection.exec_driver_sql(_PART.format(id=name))
        connection.exec_driver_sql(_USED.format(amount=large))
    with opened(url) as records:
        ledger = UsageLedger(records)
        assert ledger.totals().used == Used(requests=1, amount=large)
        assert (ledger.batch_usage("batch_gone"), ledger.batch_usage("batch_kept").amount) == (Used(), 7)
        assert ledger.apply("j", 0, 1, {key: Used(requests=1, amount=1000)})
        with engine.begin() as old:
            old.exec_driver_sql(_USED.format(amount=5) + _ADDED)
        (line,) = ledger.lines()
        assert line.used == Used(requests=3, amount=large + 1005)
    engine.dispose()


# Waits for its turn to begin, so that all processes open the database at the same moment.
OPEN = """
import sys
from batch_assets.api.database.service_database import Records
print("ready", flush=True)
sys.stdin.readline()
records = Records(sys.argv[1])
with records.reading() as connection:
    print(connection.exec_driver_sql("SELECT count(*) FROM api_batches").scalar(), "alembic" in sys.modules)
"""


def started_together(url: str, count: int) -> list[str]:
    """What each of these processes says, which open the database at once."""
    processes = [
        subprocess.Popen([sys.executable, "-c", OPEN, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return [process.communicate()[0].strip() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def opened_together(url: str, count: int) -> list[int]:
    """How many batches each of these threads finds, which open the database at once."""
    begin = threading.Barrier(count)

    def batches(_: int) -> int:
        begin.wait(20 * PATIENCE)
        with opened(url) as records, records.reading() as connection:
            return int(connection.exec_driver_sql("SELECT count(*) FROM api_batches").scalar_one())

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(batches, range(count)))


def test_threads_that_start_at_once_on_a_new_database_all_open_it(url: str) -> None:
    assert opened_together(url, 4) == [0] * 4
    with opened(url) as records:
        assert differences(records.engine) == []


def test_threads_that_start_at_once_upgrade_an_earlier_database_once(earlier: Path) -> None:
    before = rows(earlier)
    assert opened_together(f"sqlite:///{earlier}", 4) == [2] * 4
    assert rows(earlier, before) == before


@pytest.mark.slow
def test_processes_that_start_at_once_on_a_new_database_all_open_it(url: str) -> None:
    assert {said.split()[0] for said in started_together(url, 4)} == {"0"}
    with opened(url) as records:
        assert differences(records.engine) == []


@pytest.mark.slow
def test_processes_that_start_at_once_upgrade_an_earlier_database_once(earlier: Path) -> None:
    before = rows(earlier)
    assert {said.split()[0] for said in started_together(f"sqlite:///{earlier}", 4)} == {"2"}
    assert rows(earlier, before) == before
    assert started_together(f"sqlite:///{earlier}", 1) == ["2 False"]  # found as it should be: Alembic is not loaded
