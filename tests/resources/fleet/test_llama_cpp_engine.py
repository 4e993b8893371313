"""Engine kind `llama_cpp` in fleet.yaml: leased, started, given back; and nobody simulates its model meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support import tiny_gguf
from support.processes import command_line, runs

from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.offers.speed import LengthMix
from gpu_runner.providers.engine_process import answers, served_length
from resources.fleet.resource import FleetConfig, FleetConfigError, GpuFleet, LeasedEngine, Requirement

FLEET = """
engines:
  - {name: laptop, kind: llama_cpp, gguf: weights/llama.gguf, models: [tiny], max_num_seqs: 3, threads: 1}
simulated: default
"""
NEED = Requirement("d", "tiny", "chat")


@pytest.fixture
def fleet(tmp_path: Path) -> GpuFleet:
    (tmp_path / "weights").mkdir()
    tiny_gguf.write_llama(tmp_path / "weights" / "llama.gguf")
    return with_file(tmp_path, FLEET)


def with_file(folder: Path, text: str) -> GpuFleet:
    (folder / "fleet.yaml").write_text(text)
    return GpuFleet(
        database=f"sqlite:///{folder}/fleet.db", home=str(folder / "home"), config_path=str(folder / "fleet.yaml")
    )


@contextlib.contextmanager
def leased(fleet: GpuFleet, need: Requirement = NEED) -> Iterator[LeasedEngine]:
    with contextlib.closing(FleetDatabase(fleet.database)) as fleet_db:
        fleet_db.begin_run("run", need.dataset, "00000", "00001")
        with fleet.lease(need, fleet_db, Heartbeat(fleet_db, "run", ttl=60)) as found:
            yield found


def serves(process: psutil.Process, endpoint: str) -> bool:
    """Whether it is the server there: not its guard, whose command line has the server's, nor what has ended."""
    words = command_line(process)
    server = "gpu_runner.providers.llama_cpp_server" in words and endpoint.split(":")[-1] in words
    return server and "--" not in words


def test_a_run_gets_it_started_with_its_slots_and_context_and_ends_it(fleet: GpuFleet) -> None:
    with leased(fleet) as engine:
        assert (engine.name, engine.max_num_seqs, engine.own) == ("laptop", 3, True)
        assert answers(engine.endpoint) and served_length(engine.endpoint) == 2048
        (process,) = [child for child in psutil.Process().children(recursive=True) if serves(child, engine.endpoint)]
        assert process.cmdline()[-2:] == ["--threads", "1"]
    deadline = time.monotonic() + 10
    while runs(process):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_dataset_may_ask_for_a_longer_context(fleet: GpuFleet) -> None:
    with leased(fleet, Requirement("d", "tiny", "chat", max_model_len=4096)) as engine:
        assert served_length(engine.endpoint) == 4096


@pytest.mark.parametrize(
    ("change", "need", "said"),
    [
        (
            ("weights/", "nowhere/"),
            NEED,
            r"engine laptop: gguf: expected a file, found none at /.*/nowhere/llama\.gguf",
        ),
        (
            ("threads: 1", "context: 512"),
            Requirement("d", "tiny", "chat", max_model_len=1024),
            "engine laptop: context: expected at least 1024 tokens, the dataset's hardware.max_model_len, found 512",
        ),
    ],
)
def test_what_cannot_be_started_is_said_before_it_is(
    fleet: GpuFleet, tmp_path: Path, change: tuple[str, str], need: Requirement, said: str
) -> None:
    other = with_file(tmp_path, FLEET.replace(*change))
    with pytest.raises(FleetConfigError, match=said), leased(other, need):
        pass


def test_simulated_providers_play_every_model_but_that_of_a_real_engine(fleet: GpuFleet) -> None:
    config = fleet.config()
    assert config.simulated == FleetConfig.embedded().simulated
    market = fleet.market(config, fleet.providers(config))
    own, other = (market.ranking(model, "chat", LengthMix(100, 100), 1e6) for model in ("tiny", "Qwen/Qwen3-0.6B"))
    assert other.ranked and not own.ranked
    assert {"fleet.yaml has what really serves tiny; simulated texts would mix with its own"} <= {
        one.reason for one in own.refused
    }
