"""A simulated provider that plays recorded prices: what was offered at a moment can be rented at that moment."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from support.machines import ended_machines

from gpu_runner.providers.base import EngineOrder
from resources.fleet.resource import GpuFleet

HISTORY = Path(__file__).parents[2] / "fixtures" / "prices" / "invented.csv"
TWO_DAYS_IN_SECONDS = 2.0


@pytest.fixture
def fleet(tmp_path: Path) -> GpuFleet:
    config = {
        "prices": {"history": str(HISTORY)},
        "simulated": {
            "clock": 2 * 86_400 / TWO_DAYS_IN_SECONDS,
            "providers": [{"name": "sim-alpha", "plays": {"provider": "Alpha", "since": "2026-03-01T09:00:01Z"}}],
        },
    }
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(config))
    return GpuFleet(
        database=f"sqlite:///{tmp_path}/fleet.db", home=str(tmp_path), config_path=str(tmp_path / "fleet.yaml")
    )


def test_prices_change_as_they_were_recorded_and_machines_keep_theirs(fleet: GpuFleet, tmp_path: Path):
    with ended_machines(tmp_path):
        provider = fleet.providers(fleet.config())["sim-alpha"]

        def spot_price() -> float:
            (found,) = [one for one in provider.offers() if one.spot and one.gpu == "A100"]
            assert found.provider == "sim-alpha"
            assert found.source == "simulated: invented.csv"
            return found.price_per_hour

        assert spot_price() == 9.0
        (offer,) = [one for one in provider.offers() if not one.spot and one.gpu == "L4"]
        provider.create(offer, "ba-1", EngineOrder("tiny", "chat"))
        time.sleep(TWO_DAYS_IN_SECONDS)
        assert spot_price() == 6.0
        assert provider.list("ba-")[0].name == "ba-1"
        provider.terminate("ba-1")
