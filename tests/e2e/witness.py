"""What a test of faults believes: the cloud's own bill, the engines' own logs, the objects in the store.

Of our books it reads leases, to know when each machine had a holder, and it asks the database itself, by triggers,
whether a write was accepted that the fence should have refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil
import pyarrow.parquet as pq
from support.processes import command_line, environment, runs

from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.machine_host.registry import MARK, MachineRegistry
from gpu_runner.providers.simulated.meter import Bill, CloudMeter
from gpu_runner.simulator.generated_text import prompt_digest, request_key, words
from resources.store.dataset_store import BatchFooter, DatasetStore

ANSWERED = ("stop", "length")


# objects


@dataclass(frozen=True)
class DatasetObservation:
    """A batch object as it was first seen."""

    inode: int
    modified_ns: int
    size: int
    sha256: str
    run_id: str

    @property
    def written_at(self) -> float:
        """Unix seconds."""
        return self.modified_ns / 1e9


@dataclass
class ObjectWatch:
    """Remembers every batch object since it was first seen, and notices when one changes or goes."""

    folder: Path
    seen: dict[str, DatasetObservation] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def look(self, *, whole: bool = False) -> None:
        """Compare all objects with what they were. `whole`: their bytes too."""
        there = set()
        for file in self.folder.glob("*/*.parquet"):
            name = f"{file.parent.name}/{file.name}"
            there.add(name)
            found, known = file.stat(), self.seen.get(name)
            if known is None:
                self.seen[name] = _sight(file)
            elif (found.st_ino, found.st_mtime_ns, found.st_size) != (known.inode, known.modified_ns, known.size):
                self.wrong.append(f"{name} was overwritten")
            elif whole and hashlib.sha256(file.read_bytes()).hexdigest() != known.sha256:
                self.wrong.append(f"{name} holds other bytes")
        self.wrong += [f"{name} is gone" for name in self.seen.keys() - there]

    def written(self, first: str, last: str, since: float, *, not_by: str | None = None) -> bool:
        """Whether an object of these batches was written since then, by another run than `not_by`."""
        return any(
            first <= name.partition("/")[0] <= last and sight.written_at > since and sight.run_id != not_by
            for name, sight in self.seen.items()
        )


def _sight(file: Path) -> DatasetObservation:
    found, data = file.stat(), file.read_bytes()
    footer = BatchFooter.model_validate_json(pq.read_metadata(file).metadata[b"batch_assets"])
    return DatasetObservation(
        found.st_ino, found.st_mtime_ns, found.st_size, hashlib.sha256(data).hexdigest(), footer.run_id
    )


# leases

_HOLDERS_WRITE = " OR ".join(
    f"NEW.{column} IS NOT OLD.{column}"
    for column in (
        *("expires_at", "renewed_at", "draining_at", "released_at", "useful_seconds", "wasted_seconds", "rows"),
        *("prompt_tokens", "completion_tokens"),
    )
)
_LIVE = "instance = NEW.{} AND released_at IS NULL AND expires_at > "
_OTHERS = "instance = NEW.instance AND epoch <> NEW.epoch"
_NOW = "(julianday('now') - 2440587.5) * 86400.0"

# Rules on the transaction's own time, which it writes down: how long it took to commit plays no part.
_RULES = {
    "UPDATE ON leases": {
        "written to after its end": f"OLD.released_at IS NOT NULL AND ({_HOLDERS_WRITE})",
        "renewed after it had lapsed": "NEW.renewed_at IS NOT OLD.renewed_at AND NEW.renewed_at >= OLD.expires_at",
        "drained after it had lapsed": "NEW.draining_at IS NOT OLD.draining_at AND NEW.draining_at >= OLD.expires_at",
    },
    "INSERT ON leases": {
        "epoch did not grow": f"NEW.epoch <= (SELECT coalesce(max(epoch), 0) FROM leases WHERE {_OTHERS})",
        "leased while another lease was live": (
            f"EXISTS (SELECT 1 FROM leases WHERE {_OTHERS} AND released_at IS NULL AND draining_at IS NULL "
            "AND expires_at > NEW.acquired_at)"
        ),
    },
    "UPDATE OF state ON instances": {
        "came back after its end": "OLD.state IN ('ending', 'ended') AND NEW.state IN ('intent', 'booting', 'ready')",
        "ready without a lease": (
            "NEW.state = 'ready' AND OLD.state <> 'ready' AND NOT EXISTS "
            f"(SELECT 1 FROM leases WHERE {_LIVE.format('name')} NEW.ready_at)"
        ),
        "booting without a lease": (
            "NEW.state = 'booting' AND OLD.state = 'intent' AND NOT EXISTS "
            f"(SELECT 1 FROM leases WHERE {_LIVE.format('name')} {_NOW} - 1)"
        ),
        "ended under a lease": (
            "NEW.state = 'ending' AND OLD.state <> 'ended' AND EXISTS "
            f"(SELECT 1 FROM leases WHERE {_LIVE.format('name')} NEW.ending_at)"
        ),
    },
}


def watch_fence(database: Path) -> None:
    """Have the database itself write down every accepted change that the fence should have refused."""
    with contextlib.closing(FleetDatabase(f"sqlite:///{database}")), sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE witness (at REAL, what TEXT, instance TEXT, epoch INTEGER)")
        for number, (event, wrong, condition) in enumerate(
            (event, wrong, condition) for event, rules in _RULES.items() for wrong, condition in rules.items()
        ):
            who = "NEW.name, NULL" if event.endswith("instances") else "NEW.instance, NEW.epoch"
            connection.execute(
                f"CREATE TRIGGER witness_{number} AFTER {event} WHEN {condition} BEGIN "
                f"INSERT INTO witness VALUES ({_NOW}, '{wrong}', {who}); END"
            )
    connection.close()


def fence_broken(database: Path) -> list[str]:
    """What `watch_fence` found."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        lines = connection.execute("SELECT what, instance, epoch FROM witness ORDER BY at").fetchall()
    return [f"{instance} epoch {epoch}: {what}" for what, instance, epoch in lines]


def holders(database: Path) -> dict[str, float]:
    """When each instance last had a holder, in Unix seconds: the end of its last lease."""
    query = "SELECT instance, max(min(coalesce(released_at, expires_at), expires_at)) FROM leases GROUP BY instance"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return dict(connection.execute(query).fetchall())


def became_ready(database: Path) -> set[str]:
    """Instances that were ready once: they may wait, idle, for another run."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM instances WHERE ready_at IS NOT NULL")}


# bills


def overdue(home: Path, bills: list[Bill], idle_seconds: float) -> dict[str, float]:
    """Seconds that each machine was billed after its last holder was gone and its time to wait was over."""
    held, ready = holders(home / "fleet.db"), became_ready(home / "fleet.db")
    found = {}
    for bill in bills:
        assert bill.ended_at is not None, f"{bill.name} is still billed"
        since = max(bill.created_at, held.get(bill.name, bill.created_at))
        found[bill.name] = bill.ended_at - since - (idle_seconds if bill.name in ready else 0.0)
    return found


def ended_under_lease(home: Path, bills: list[Bill], tolerance: float = 0.5) -> list[str]:
    """Machines that were terminated while somebody held them: a terminate that the fence should have kept back."""
    query = "SELECT instance, epoch, acquired_at, min(coalesce(released_at, expires_at), expires_at) FROM leases"
    with contextlib.closing(sqlite3.connect(home / "fleet.db")) as connection:
        leases = connection.execute(query).fetchall()
    ends = {bill.name: bill.ended_at for bill in bills if bill.reason == "terminated" and bill.ended_at is not None}
    return [
        f"{name} epoch {epoch}: terminated {end - ends[name]:.1f} s before its end"
        for name, epoch, began, end in leases
        if name in ends and began < ends[name] < end - tolerance
    ]


def compare_bills(home: Path) -> tuple[float, float, int]:
    """US dollars that the cloud bills, those of our books, and the number of machines."""
    bills = {bill.name: bill.usd for bill in CloudMeter(home).bills()}
    with contextlib.closing(FleetDatabase(f"sqlite:///{home}/fleet.db")) as fleet_db:
        booked = {cost.name: cost.usd.total for cost in fleet_db.costs()}
    assert bills.keys() <= booked.keys(), "a machine that our books do not know"
    for name in sorted(booked, key=lambda name: -abs(booked[name] - bills.get(name, 0.0)))[:3]:
        print(f"  {name}: billed {bills.get(name, 0.0):.5f} $, booked {booked[name]:.5f} $")
    return sum(bills.values()), sum(booked.values()), len(bills)


def left_running(home: Path) -> list[str]:
    """Processes of any machine that this home ever had."""
    ids = {record.id for record in MachineRegistry(home).machines()}
    left = [one for one in psutil.process_iter() if environment(one).get(MARK) in ids and runs(one)]
    return [f"{process.pid} {' '.join(command_line(process))}" for process in left]


# rows


def answered(home: Path) -> Counter[str]:
    """How often engines answered each prompt to its end, by their own logs."""
    done: Counter[str] = Counter()
    for file in home.glob("*.requests"):
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # the last line of a killed engine
                event = json.loads(line)
                if event.get("outcome") in ANSWERED:
                    done[event["prompt"]] += 1
    return done


@dataclass(frozen=True)
class Rows:
    """The current objects against the snapshot: rows, and those without a completion or without an engine's log."""

    rows: int
    dead: list[str]
    unlogged: int
    asked_again: int


def check_rows(store: DatasetStore, home: Path) -> Rows:
    """Every row of the snapshot has one outcome in the current objects, and a completion is the one of its prompt."""
    snapshot = store.current_snapshot()
    assert snapshot is not None
    manifest, entries = store.manifest(snapshot), store.entries(snapshot)
    current, logged = store.current_objects(entries), answered(home)
    digests: set[str] = set()
    dead: list[str] = []
    for entry, rows in store.rows(manifest, entries):
        assert entry.key in current, f"batch {entry.key} has no object"
        table = store.batch_table(current[entry.key]).to_pylist()
        assert Counter(line["row_id"] for line in table) == Counter(row.row_id for row in rows), entry.key
        lines: dict[str, dict[str, Any]] = {line["row_id"]: line for line in table}
        for row in rows:
            line = lines[row.row_id]
            assert line["row_key"] == row.row_key
            assert (line["output"] is None) == (line["error"] is not None)
            if line["error"] is not None:
                dead.append(f"{row.row_id}: {line['error']} {line['error_message']}")
                continue
            digest = prompt_digest(orjson.dumps(orjson.loads(row.prompt)))
            digests.add(digest)
            key = request_key(manifest.settings().model, digest, None)
            assert line["output"] == words(key, line["completion_tokens"] - (line["finish_reason"] == "stop"))
    return Rows(manifest.rows, dead, len(digests - logged.keys()), sum(logged.values()) - len(digests & logged.keys()))
