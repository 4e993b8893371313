"""`batch-assets run`, `verify` and `ui` as a newcomer uses them, interrupts them, and breaks what they stand on."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import psutil
import pytest

from batch_assets.catalog.ledger import rows_key
from batch_assets.tags import REQUEST_TAG
from batch_assets.webserver import token as web_token
from e2e.command_line import BATCHES, NAME, ROWS, SPEC, Command, CommandProject
from e2e.command_line import site as new_site
from e2e.harness import Simulator, eventually
from gpu_runner.providers.engine_process import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

KEYS = ["dataset", "rows", "ok", "dead", "batches", "batches_done", "prompt_tokens", "completion_tokens", "table"]


def dagster(command: Command) -> list[psutil.Process]:
    """Processes of the Dagster that the command has started."""
    return [*command.find("dagster"), *command.find("batch_assets.webserver.server")]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CommandProject]:
    with new_site(tmp_path) as found:
        yield found


@pytest.mark.soak("dagster")
def test_run_ends_with_a_table_that_verify_agrees_with_until_an_object_is_damaged(site: CommandProject):
    command = site.start("run", NAME, "--json")
    status, output = command.end()
    assert status == 0, command.said()
    assert command.left() == []
    found = json.loads(output)
    assert list(found)[: len(KEYS)] == KEYS
    assert (found["rows"], found["ok"], found["dead"]) == (ROWS, ROWS, 0)
    assert (found["batches"], found["batches_done"], found["rows_generated"]) == (BATCHES, BATCHES, ROWS)
    assert found["completion_tokens"] > ROWS
    assert (Path(found["table"]) / "part-00000.parquet").exists()
    assert found["table_current"]
    assert found["simulated"]

    status, output = site.ask("run", NAME)
    assert status == 0
    assert "nothing to generate" in output
    assert found["table"] in output

    assert site.ask("verify", NAME)[0] == 0
    damaged = sorted((site.folder / "store" / NAME / "batches").glob("*/*.parquet"))[3]
    damaged.write_bytes(damaged.read_bytes()[:-10])
    status, output = site.ask("verify", NAME, "--json")
    assert status == 1
    assert [(line["kind"], line["batch"]) for line in json.loads(output)["differences"]] == [
        ("corrupt_object", "00003")
    ]


@pytest.mark.soak("dagster")
def test_run_sees_a_flipped_bit_has_the_batch_made_again_and_ends_with_0_when_verify_does(site: CommandProject):
    assert site.ask("run", NAME)[0] == 0
    damaged = sorted((site.folder / "store" / NAME / "batches").glob("*/*.parquet"))[3]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 3] ^= 1
    damaged.write_bytes(data)
    status, output = site.ask("run", NAME, "--no-verify", "--json")
    assert (status, json.loads(output)["verified"]) == (0, False)
    assert site.ask("verify", NAME)[0] == 1
    command = site.start("run", NAME, "--json")
    status, output = command.end()
    assert status == 0, command.said()
    assert "00003: corrupt object" in command.said()
    found = json.loads(output)
    assert (found["verified"], found["rows_generated"] > 0) == (True, True)
    assert site.ask("verify", NAME)[0] == 0


@pytest.mark.soak("dagster")
def test_the_ledger_is_rebuilt_from_the_store_when_the_home_is_lost(site: CommandProject):
    assert site.ask("run", NAME, "--no-progress")[0] == 0
    site.home.rename(site.folder / "lost")
    assert site.status()["batches_done"] == 0
    status, output = site.ask("rebuild-ledger", NAME)
    assert (status, output) == (0, f"{NAME}: 20 of 20 batches reported again\n")
    assert site.ask("verify", NAME)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak("dagster"))])
def test_an_interrupted_run_is_canceled_and_the_next_one_goes_on_from_there(
    site: CommandProject, number: signal.Signals
):
    site.engine(speed=0.3)
    command = site.start("run", NAME)
    site.working(command)
    command.interrupt(number)
    status, output = command.end(60)
    assert (status, output) == (130, ""), command.said()
    assert command.left() == []
    assert "Canceled." in command.said()
    with site.instance() as instance:
        started = [run for run in instance.get_runs() if REQUEST_TAG in run.tags]
        assert [run.status for run in started] == [dg.DagsterRunStatus.CANCELED]
        reported = instance.get_materialized_partitions(rows_key(NAME))
    assert [given_back for _, _, given_back in site.leases()] == [True]
    kept = site.store.objects_by_batch()  # the last ones may be committed and not reported yet
    assert 0 < len(kept) < BATCHES and reported <= kept.keys()

    site.engine(speed=20.0)
    status, output = site.ask("run", NAME, "--json")
    assert status == 0
    found = json.loads(output)
    assert found["ok"] == ROWS
    assert found["rows_generated"] <= ROWS - len(kept) * ROWS // BATCHES
    assert all(len(objects) == 1 for objects in site.store.objects_by_batch().values())


@pytest.mark.soak("dagster")
def test_a_second_signal_stops_at_once_and_leaves_no_process(site: CommandProject):
    site.engine(speed=0.3)
    command = site.start("run", NAME)
    site.working(command)
    command.interrupt()
    eventually(lambda: "Canceling" in command.said(), 10, "the first signal to be answered", every=0.02)
    command.interrupt()
    status, _ = command.end(20)
    assert status == 130
    assert command.left() == []


@pytest.mark.soak("dagster")
def test_a_signal_while_dagster_starts_leaves_no_process(site: CommandProject):
    command = site.start("run", NAME)
    eventually(lambda: len(command.find("code_server")) >= 2, 30, "the code server to start", every=0.05)
    command.interrupt()
    status, _ = command.end(30)
    assert status == 130
    assert command.left() == []


@pytest.mark.soak("dagster")
def test_a_source_that_cannot_be_used_is_named_with_its_line(site: CommandProject):
    source = site.folder / "questions.jsonl"
    source.write_text('{"q": "one"}\n{"q": \n')
    site.declare({**SPEC, "source": {"path": str(source)}, "prompt": {"user": "{{ q }}"}, "keep_columns": []})
    command = site.start("run", NAME)
    assert command.end() == (1, "")
    assert "questions.jsonl, line 2" in command.said()
    assert "Traceback" not in command.said()
    assert "`batch-assets ui` shows it" in command.said() and "/runs/" not in command.said()


@pytest.mark.soak("dagster")
def test_an_engine_that_does_not_start_fails_the_work_with_its_log(site: CommandProject):
    site.engine(kind="process", command=["false"])
    command = site.start("run", NAME)
    assert command.end()[0] == 1
    assert "failed 3 times: 20 batches" in command.said()
    assert "3 engines in a row did not start" in command.said()
    assert "its log: " in command.said()
    assert all(given_back for _, _, given_back in site.leases())


@pytest.mark.soak("dagster")
def test_any_server_serves_with_its_key_and_says_so_without_it(site: CommandProject):
    simulator = Simulator(site.folder, ["--speed", "30", "--api-key-env", "SIMULATOR_KEY"])
    os.environ["SIMULATOR_KEY"] = "right"
    simulator.start()
    del os.environ["SIMULATOR_KEY"]
    try:
        command = site.start("run", NAME, "--endpoint", simulator.url, BATCH_ASSETS_API_KEY="wrong")
        assert command.end()[0] == 1
        assert "refused by the engine: 20 batches" in command.said()
        assert "401" in command.said() or "key" in command.said()
        assert "wrong" not in command.said()
        command = site.start("run", NAME, "--endpoint", simulator.url, "--json", BATCH_ASSETS_API_KEY="right")
        status, output = command.end()
        assert status == 0, command.said()
        assert json.loads(output)["ok"] == ROWS
        assert sum(simulator.finished().values()) == ROWS
    finally:
        simulator.stop()


@pytest.mark.soak("dagster")
def test_a_proxy_in_the_environment_is_never_asked_for_loopback(site: CommandProject):
    dead = f"http://127.0.0.1:{free_port()}"
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "grpc_proxy"), dead)
    command = site.start("run", NAME, "--json", **proxies, no_proxy="", NO_PROXY="")
    status, output = command.end()
    assert status == 0, command.said()
    assert json.loads(output)["ok"] == ROWS


def test_ui_serves_on_loopback_and_ends_with_everything_it_started(site: CommandProject):
    port = free_port()
    ui = site.start("ui", "--port", str(port))
    eventually(lambda: "Dagster's UI" in ui.output.read_text(), 60, "the UI to be ready")
    eventually(lambda: len(dagster(ui)) >= 6, 20, "all processes")
    ui.note()
    listening = {c.laddr for p in ui.below.values() for c in p.net_connections("tcp") if c.status == "LISTEN"}
    assert {(address.ip, address.port) for address in listening} == {("127.0.0.1", port)}
    assert [file for file in site.home.rglob("*") if file.is_file() and file.stat().st_mode & 0o077] == []
    second = site.start("ui", "--port", str(port))
    assert second.end()[0] == 2
    assert "already runs" in second.said()
    ui.interrupt(signal.SIGTERM)
    status, output = ui.end(30)
    assert status == 0
    assert f"http://127.0.0.1:{port}" in output
    assert ui.left() == []


@pytest.mark.soak("dagster")
def test_run_uses_the_dagster_that_runs_and_goes_on_when_that_ends(site: CommandProject):
    site.engine(speed=1.0)
    port = free_port()
    ui = site.start("ui", "--port", str(port))
    eventually(lambda: "Dagster's UI" in ui.output.read_text(), 60, "the UI to be ready")
    command = site.start("run", NAME, BATCH_ASSETS_API_KEY="key")
    site.working(command)
    assert dagster(command) == []  # it started none of its own
    assert "runs see only the environment" in command.said()
    ui.interrupt(signal.SIGTERM)
    ui.end(30)
    assert ui.left() == []
    status, _ = command.end(200)
    assert status == 0, command.said()
    assert "going on with one of its own" in command.said()
    assert command.left() == []


@pytest.mark.soak("dagster")
def test_canceling_in_the_ui_ends_the_command_with_what_is_missing(site: CommandProject):
    site.engine(speed=0.05)
    command = site.start("run", NAME)
    site.working(command)
    eventually(lambda: "Dagster's UI" in command.said(), 90, "the UI")
    url = next(line.split(": ")[1] for line in command.said().splitlines() if line.startswith("Dagster's UI"))
    with site.instance() as instance:
        (run,) = [run for run in instance.get_runs() if REQUEST_TAG in run.tags]
    mutation = f'mutation {{ terminateRun(runId: "{run.run_id}") {{ __typename }} }}'
    body = json.dumps({"query": mutation}).encode()
    headers = {"Content-Type": "application/json", **web_token.headers(site.home)}
    request = urllib.request.Request(f"{url}/graphql", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert b"TerminateRunSuccess" in answer.read()
    status, _ = command.end(60)
    assert status == 1
    assert "canceled: " in command.said()
    assert "not committed" in command.said()
    assert run.run_id in command.said()
    assert command.left() == []
