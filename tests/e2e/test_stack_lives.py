"""The stack starts again what dies, and the work goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import dagster as dg
import psutil
import pytest
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus
from support.timing import PATIENCE, SOAK

from batch_assets.local_dagster import first_server
from batch_assets.local_dagster.home import LOGS
from batch_assets.local_dagster.worker_template import TEMPLATE, WORKER
from batch_assets.orchestration.broken_files import CHECK, broken_key
from e2e.command_line import BATCHES, NAME, ROWS, SPEC, Command, site
from e2e.harness import eventually
from gpu_runner.providers.engine_process import free_port

pytestmark = [pytest.mark.soak("dagster"), pytest.mark.timeout(400)]

FORKED = (first_server.NAME, TEMPLATE, WORKER)  # from the code server, with its command line


def code_servers(command: Command) -> list[psutil.Process]:
    """The living code servers, each the leader of a process group below its guard."""
    found = command.find("batch_assets.local_dagster.code_server", "start")
    servers = []
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "gpu_runner.providers.process_guard" not in process.cmdline() and process.name() not in FORKED:
                servers.append(process)
    return servers


def test_a_killed_code_server_is_started_again_and_its_runs_go_on(tmp_path: Path):
    with site(tmp_path) as here:
        here.engine(speed=0.6)
        command = here.start("run", NAME)
        here.working(command)
        (server,) = code_servers(command)
        os.killpg(server.pid, signal.SIGKILL)
        killed = time.monotonic()

        def again() -> bool:
            return any(found.pid != server.pid for found in code_servers(command))

        eventually(again, 30, "another code server", every=0.1)
        if SOAK:
            assert time.monotonic() - killed < 5 * PATIENCE
        status, _ = command.end(200)
        assert status == 0, command.said()
        assert command.left() == []
        found = here.status()
        assert (found["ok"], found["table_current"]) == (ROWS, True)
        assert all(given_back for _, _, given_back in here.leases())


def test_a_dataset_added_while_dagster_runs_is_loaded_and_can_be_run(tmp_path: Path):
    with site(tmp_path) as here:
        here.engine()
        ui = here.start("ui", "--port", str(free_port()))
        eventually(lambda: "Dagster's UI" in ui.output.read_text(), 60, "the UI")
        here.declare({**SPEC, "name": "sonnets", "source": {"grid": {"word": ["rain"], "tone": ["plain", "glad"]}}})
        log = here.home / LOGS / "definitions.log"
        eventually(
            lambda: log.exists() and "loaded the definitions again: 2 datasets" in log.read_text(), 60, "a reload"
        )
        # At once again: `run` does not wait for the watch, it asks for what Dagster does not know yet.
        here.declare({**SPEC, "name": "odes", "source": {"grid": {"word": ["rain"], "tone": ["plain", "glad"]}}})
        command = here.start("run", "odes", "--json")
        status, output = command.end()
        assert status == 0, command.said()
        assert json.loads(output)["ok"] == 2
        ui.interrupt()
        ui.end(60)


def test_a_file_that_is_broken_in_mid_run_stops_neither_its_own_dataset_nor_another(tmp_path: Path):
    """Its later runs are started by what was last known of it: the definitions have been loaded again before."""
    attributes = {**SPEC, "batches_per_run": 4}
    with site(tmp_path) as here:
        here.declare(attributes)
        here.engine(speed=0.6)
        ui = here.start("ui", "--port", str(free_port()))
        eventually(lambda: "Dagster's UI" in ui.output.read_text(), 60, "the UI")
        command = here.start("run", NAME)
        here.working(command)
        here.declare({key: value for key, value in attributes.items() if key != "source"})
        here.declare({**SPEC, "name": "odes", "source": {"grid": {"word": ["rain"], "tone": ["plain", "glad"]}}})
        log = here.home / LOGS / "definitions.log"
        eventually(lambda: log.exists() and "source: expected a value" in log.read_text(), 60, "a reload")
        done = len(here.store.objects_by_batch())
        assert done < BATCHES, "the file was broken too late for this test"

        with here.instance() as instance:
            key = dg.AssetCheckKey(broken_key(NAME), CHECK)

            def failed() -> bool:
                found = instance.event_log_storage.get_latest_asset_check_execution_by_key([key]).get(key)
                return found is not None and found.status == AssetCheckExecutionRecordStatus.FAILED

            eventually(failed, 60, "the failed check")
        other = here.start("run", "odes", "--json")
        status, output = other.end()
        assert status == 0, other.said()
        assert json.loads(output)["ok"] == 2
        status, _ = command.end(200)
        assert status == 0, command.said()
        assert len(here.store.objects_by_batch()) == BATCHES
        assert here.ask("status", NAME)[0] == 2
        ui.interrupt()
        ui.end(60)
