"""Two replicas on one fleet answer interactive requests of a model with one engine, also when one of them is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from support.fleet_databases import postgres_url
from support.machines import ended_machines
from support.timing import PATIENCE

from batch_assets.local_dagster.local_fleet import fleet_of
from gpu_runner.fleet_database.database import FleetDatabase, Instance
from gpu_runner.providers.engine_process import free_port

pytestmark = [pytest.mark.soak("online"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
OFFER = {"instance_type": "one.l40s", "gpu": "L40S", "price_per_hour": 0.6, "capacity": 4}
SIMULATED = {"clock": 60.0, "providers": [{"name": "sim-one", "boot_seconds": 60.0, "offers": [OFFER]}]}
DATASET = {"source": {"grid": {"a": ["b"]}}, "prompt": {"user": "{{ a }}"}, "model": MODEL, "name": "d"}


class Replica:
    """One `batch-assets serve` that the test may kill."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", str(port)]
        with (home / f"{port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ready(self) -> bool:
        """Whether it has started."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.address}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def ask(self) -> int:
        """Status of a chat; 0: nobody answers there."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self.address}/v1/chat/completions", json.dumps(CHAT).encode(), headers=headers
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


@contextlib.contextmanager
def replicas(folder: Path, server: str) -> Iterator[tuple[list[Replica], FleetDatabase]]:
    """Two over one Postgres, one store and one fleet, with the machines of one computer."""
    home, declared = folder / "home", folder / "defs" / "d"
    home.mkdir()
    declared.mkdir(parents=True)
    component = {"type": "batch_assets.GeneratedDataset", "attributes": DATASET}
    (declared / "defs.yaml").write_text(yaml.safe_dump(component))
    (home / "fleet.yaml").write_text(yaml.safe_dump({"simulated": SIMULATED}))
    with postgres_url(server) as database, ended_machines(home):
        environment = {**os.environ, "DAGSTER_HOME": str(home), "BATCH_ASSETS_STORE": str(folder / "store")}
        environment |= {"BATCH_ASSETS_API_DB": database, "BATCH_ASSETS_FLEET_DB": database}
        environment |= {"BATCH_ASSETS_DEFS": str(folder / "defs")}
        found = [Replica(home, environment) for _ in range(2)]
        fleet = fleet_of(home, database)
        try:
            with fleet.open_database() as fleet_db:
                yield found, fleet_db
        finally:
            for one in found:
                one.process.kill()
                one.process.wait()


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds * PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


def test_replicas_share_the_engine_of_a_model_and_one_goes_on_when_the_other_is_killed(
    tmp_path: Path, server: str
) -> None:
    with replicas(tmp_path, server) as ((first, second), fleet_db):

        def engine() -> Instance:
            (found,) = fleet_db.fleet(ended=True)
            return found

        def holder() -> int | None:
            """Process that holds the engine."""
            lease = engine().lease
            beat = None if lease is None else fleet_db.run_beat(lease.run_id)
            return None if beat is None else beat.pid

        until(second.ready)
        until(lambda: first.ask() == 200)
        assert second.ask() == 200, "the first of its requests finds the engine of the other replica"
        assert [first.ask(), second.ask()] == [200, 200]
        assert holder() in (first.process.pid, second.process.pid)
        killed, alive = (first, second) if holder() == first.process.pid else (second, first)
        killed.process.send_signal(signal.SIGKILL)
        until(lambda: holder() == alive.process.pid or alive.ask() != 200)
        assert holder() == alive.process.pid, "it was not answered until the engine was its own"
        assert alive.ask() == 200
        assert engine().state == "ready" and engine().epoch == 2, "one engine, and no other was rented"
