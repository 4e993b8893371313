"""Whether rows will be a simulator's is asked of the engine, however slowly that answers."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from support.simulated_engine import simulated_engine

from resources.fleet.fleet_config import FleetConfig
from resources.fleet.simulation import is_simulation


def fleet_of(url: str) -> FleetConfig:
    return FleetConfig.model_validate({"engines": [{"name": "one", "kind": "endpoint", "url": url}]})


def test_an_engine_that_is_not_there_counts_as_a_real_one():
    assert not is_simulation(fleet_of("http://127.0.0.1:9"), "tiny", "chat", None)


@pytest.mark.slow
def test_a_simulator_that_answers_after_seconds_is_one():
    with simulated_engine() as engine:
        os.kill(engine.process.pid, signal.SIGSTOP)
        waking = threading.Timer(4.0, os.kill, (engine.process.pid, signal.SIGCONT))
        waking.start()
        try:
            assert is_simulation(fleet_of(engine.url), "tiny", "chat", None)
        finally:
            waking.join()
