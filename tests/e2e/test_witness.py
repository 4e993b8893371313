"""What the tests of faults rest on: the plan of the faults, and what the witness sees of the database and the store."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
from pathlib import Path

import pytest

from e2e import nemesis
from e2e.witness import ObjectWatch, fence_broken, watch_fence
from gpu_runner.fleet_database.database import FleetDatabase

pytestmark = pytest.mark.slow


def test_a_plan_has_every_kind_and_follows_its_seed() -> None:
    for faults in (25, 300):
        found = nemesis.plan(faults, random.Random(1))
        assert len(found) == faults
        assert set(found) == set(nemesis.KINDS)
        assert found == nemesis.plan(faults, random.Random(1)) != nemesis.plan(faults, random.Random(2))


def test_the_witness_sees_what_the_fence_should_have_refused(tmp_path: Path) -> None:
    database = tmp_path / "fleet.db"
    watch_fence(database)
    with contextlib.closing(FleetDatabase(f"sqlite:///{database}")) as fleet_db:
        lease = fleet_db.try_lease("one", "run", "set", 10)
        assert lease is not None
        assert fleet_db.renew(lease, 10) and fleet_db.drain(lease) and fleet_db.release(lease)
        assert fleet_db.try_lease("one", "other", "set", 10) is not None
    assert fence_broken(database) == []
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE leases SET rows = 1 WHERE epoch = 1")
        connection.execute("UPDATE leases SET renewed_at = expires_at + 1 WHERE epoch = 2")
        line = "'one', 3, 'third', 'set', acquired_at, expires_at FROM leases WHERE epoch = 2"
        connection.execute(
            f"INSERT INTO leases (instance, epoch, run_id, dataset, acquired_at, expires_at) SELECT {line}"
        )
    assert fence_broken(database) == [
        "one epoch 1: written to after its end",
        "one epoch 2: renewed after it had lapsed",
        "one epoch 3: leased while another lease was live",
    ]


def test_the_witness_sees_an_object_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr("e2e.witness.BatchFooter.model_validate_json", lambda data: type("Footer", (), {"run_id": "r"}))
    (tmp_path / "00000").mkdir()
    file = tmp_path / "00000" / "a-g0.parquet"
    pq.write_table(pa.table({"row_id": ["r"]}).replace_schema_metadata({b"batch_assets": b"{}"}), file)
    watch = ObjectWatch(tmp_path)
    watch.look(whole=True)
    assert watch.wrong == [] and watch.written("00000", "00000", 0) and not watch.written("00001", "00002", 0)
    data, found = file.read_bytes(), file.stat()
    file.write_bytes(data.replace(b"PAR1", b"PAR2"))
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    watch.look(whole=True)
    assert watch.wrong == ["00000/a-g0.parquet holds other bytes"]
    file.unlink()
    watch.look()
    assert watch.wrong[1:] == ["00000/a-g0.parquet is gone"]
