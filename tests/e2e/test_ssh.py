"""A dataset on hosts that are reached by SSH: one is cut off, another loses its power, and the table is complete."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import pytest
from support.ssh_hosts import Hosts, missing, ssh_hosts
from support.timing import PATIENCE

from e2e.harness import Platform, eventually, platform
from gpu_runner.fleet_database.reporting.reports import Instance

pytestmark = [
    pytest.mark.soak("providers"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]

ROWS = 4000
SEEN_SECONDS = 15.0
ORPHAN_SECONDS = 15


def dataset() -> dict[str, object]:
    """Questions of 16 batches."""
    words = [f"word {number}" for number in range(ROWS // 20)]
    return {
        "name": "rhymes",
        "source": {"grid": {"word": words, "tone": [f"tone {number}" for number in range(20)]}},
        "prompt": {"user": "A rhyme on {{ word }}, {{ tone }}."},
        "sampling": {"temperature": 0.7, "max_tokens": 512},
        "batch_rows": ROWS // 16,
    }


def instances(site: Platform) -> list[Instance]:
    """Every instance there ever was, oldest first."""
    with contextlib.closing(site.fleet_db()) as fleet_db:
        return fleet_db.fleet(ended=True)


def held(site: Platform) -> Instance | None:
    """The instance that a run holds, or of which it awaits its last answers, and whose engine has answered."""
    found = (one for one in instances(site) if one.lease is not None or one.draining)
    return next((one for one in found if one.state == "ready"), None)


def answers(folder: Path, name: str) -> int:
    """Rows that the engine of an instance wrote to the end, by its own log."""
    file = folder / f"{name}.jsonl"
    lines = (
        [line for line in file.read_text(errors="replace").splitlines() if line.endswith("}")] if file.exists() else []
    )
    return sum(json.loads(line).get("outcome") in ("stop", "length") for line in lines)


def lose(site: Platform, hosts: Hosts, folder: Path, how: str, rows: int) -> tuple[int, float]:
    """Cut off or kill the host in use when it has answered so many rows; returns it, and when the run had left it."""

    def at_work() -> Instance | None:
        """A busy machine may make a run leave a host that is well: whichever it holds then will do."""
        one = held(site)
        return one if one is not None and answers(folder, one.name) >= rows else None

    one = eventually(at_work, 150, f"an instance that a run holds, with {rows} answers", every=0.1)
    number = int(one.region.removeprefix("host"))
    hosts.do(how, number)
    at = time.monotonic()

    def left() -> bool:
        return all(found.name != one.name or not (found.lease or found.draining) for found in instances(site))

    eventually(left, 60, f"the run to leave {one.name}", every=0.1)
    return number, time.monotonic() - at


def test_a_host_that_is_cut_off_and_one_without_power_cost_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    with ssh_hosts(tmp_path, 3) as hosts:
        config = hosts.config(orphan_seconds=ORPHAN_SECONDS, host={"boot_seconds": 1.0}).model_dump(mode="json")
        config["command"] += ["--request-log", f"{logs}/{{name}}.jsonl", "--output-tokens", "fixed:256", "--speed", "2"]
        fleet = {"ssh": [config], "idle_minutes": 0.05, "move_seconds": 600}
        with platform(tmp_path, monkeypatch, dataset(), simulator=None, fleet=fleet) as site:
            site.launch_job("rhymes_refresh")
            cut, seen_cut = lose(site, hosts, logs, "cut", 300)
            killed, seen_killed = lose(site, hosts, logs, "kill", 300)
            eventually(lambda: site.store.current_published(), 150, "the published table")
            table = site.published_rows()
            used = instances(site)
            done = {one.name: answers(logs, one.name) for one in used}
            print(f"\ncut seen after {seen_cut:.1f} s, power-off after {seen_killed:.1f} s; answers {done}")
            assert len(table) == len({line["row_id"] for line in table}) == ROWS
            assert not [line for line in table if line["error"] is not None]
            assert len({one.region for one in used}) == 3 and cut != killed
            assert max(seen_cut, seen_killed) < SEEN_SECONDS * PATIENCE
            eventually(lambda: not hosts.processes(), 60, "the end of all engines, that of the host cut off too")
            hosts.do("heal", cut)
            hosts.do("boot", killed)
            eventually(lambda: all(one.state == "ended" for one in instances(site)), 90, "books without an instance")
