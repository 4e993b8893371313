"""The clock of the machine is set in mid-run, for all processes of a stack at once: the work and the bill go on."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from e2e.command_line import BATCHES, NAME, ROWS, SPEC, CommandProject, site
from e2e.harness import eventually

COMPILER = shutil.which("cc")
pytestmark = [
    pytest.mark.soak("losses"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="needs Linux and a C compiler"),
]

HOUR = 3600
OFTEN = ("launcher", "publisher", "watchdog")  # sensors that tick every five seconds
CLOCK, PRICE = 2.0, 3.6  # seconds of the providers in a real one; US dollars an hour of theirs


@dataclass
class WallClock:
    """What `time.time()` says in every process with this environment, beside the real one."""

    environment: dict[str, str]
    page: mmap.mmap

    def set_by(self, seconds: int) -> None:
        struct.pack_into("q", self.page, 0, struct.unpack_from("q", self.page)[0] + seconds)


@pytest.fixture
def wall_clock(tmp_path: Path) -> Iterator[WallClock]:
    library, shift = tmp_path / "shifted_clock.so", tmp_path / "shift"
    source = Path(__file__).with_name("shifted_clock.c")
    subprocess.run([COMPILER or "cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    shift.write_bytes(bytes(8))
    with shift.open("r+b") as file, mmap.mmap(file.fileno(), 8) as page:
        yield WallClock({"LD_PRELOAD": str(library), "SHIFTED_CLOCK_FILE": str(shift)}, page)


def rented(here: CommandProject, seconds: int) -> None:
    """One simulated provider, whose engine needs about so many seconds for the dataset."""
    offer = {"instance_type": "l40s", "gpu": "L40S", "price_per_hour": PRICE}
    tokens = ["--output-tokens", f"fixed:{seconds * 12}"]
    provider = {"name": "cloud", "boot_seconds": 4.0, "offers": [offer]}
    fleet = {"simulated": {"clock": CLOCK, "arguments": tokens, "providers": [provider]}, "idle_minutes": 1}
    (here.folder / "fleet.yaml").write_text(yaml.safe_dump(fleet))
    here.declare({**SPEC, "model": "Qwen/Qwen3-8B", "sampling": {"temperature": 0.7, "max_tokens": 2048}})


def ticks(here: CommandProject) -> dict[str, int]:
    """How many ticks each sensor has had."""
    with here.instance() as instance:
        states = instance.all_instigator_state()
        return {
            state.instigator_name: len(instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=500))
            for state in states
        }


@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
def test_a_stack_whose_clock_is_set_by_an_hour_goes_on_and_bills_what_passed(
    tmp_path: Path, wall_clock: WallClock, seconds: int
):
    with site(tmp_path) as here:
        rented(here, 25)
        here.environment |= wall_clock.environment
        began = time.monotonic()
        command = here.start("run", NAME)
        here.working(command, 3)
        before = ticks(here)
        wall_clock.set_by(seconds)
        now = subprocess.check_output(["date", "+%s"], env={**os.environ, **wall_clock.environment})
        assert abs(int(now) - time.time() - seconds) < HOUR / 2
        assert len(here.store.objects_by_batch()) < BATCHES

        def ticked() -> bool:
            now = ticks(here)
            return all(now[name] >= before[name] + 3 for name in OFTEN)

        eventually(ticked, 60, "three more ticks of the sensors", every=1.0)
        status, _ = command.end(120)
        assert status == 0, command.said()
        status, text = here.ask("fleet", "--json")
        passed = time.monotonic() - began
        assert status == 0
        found = json.loads(text)
        (cost,) = found["costs"]
        print(f"{passed:.0f} s passed, billed {cost['usd']:.4f} $ for {cost['instances']} instances")
        assert 0 < cost["usd"] <= cost["instances"] * passed * CLOCK * PRICE / 3600
        said = here.status()
        assert (said["ok"], said["dead"], said["table_current"]) == (ROWS, 0, True)
