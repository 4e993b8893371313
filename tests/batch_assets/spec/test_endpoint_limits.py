"""Limits of an endpoint: options of a command, tags of its runs, keys of fleet.yaml, and what a leased engine has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from support.plain_engine import plain_engine
from support.sensor_dataset import SensorDataset

from batch_assets.cli.arguments import check_limits
from batch_assets.cli.dataset_commands.run import Request
from batch_assets.cli.user_errors import CommandError
from batch_assets.spec.endpoint_limits import LIMIT_TAGS, endpoint_limits, limit_tags
from batch_assets.spec.request_options import InvalidTag
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.request_limits import NO_LIMITS, RequestLimits
from resources.fleet.fleet_config import FleetConfig, FleetConfigError
from resources.fleet.leased_engine import Requirement
from resources.fleet.resource import GpuFleet

LIMITS = RequestLimits(90.5, 4, 60, 100_000)
TAGS = dict(zip(LIMIT_TAGS, ("90.5", "4", "60", "100000"), strict=True))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    with contextlib.ExitStack() as stack:
        yield SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack)


def test_tags_say_what_the_options_said() -> None:
    assert Request("d", limits=LIMITS).tags() == limit_tags(LIMITS) == TAGS
    assert endpoint_limits(TAGS) == LIMITS
    assert endpoint_limits({}) == NO_LIMITS and limit_tags(NO_LIMITS) == {}


@pytest.mark.parametrize("tag", LIMIT_TAGS)
@pytest.mark.parametrize("text", ["0", "-1", "many", "", "nan", "inf", "٣", "9" * 13])
def test_a_tag_that_is_no_limit_is_refused(tag: str, text: str) -> None:
    if tag == "batch/timeout" and text == "٣":
        return  # three seconds, as Python reads it
    with pytest.raises(InvalidTag, match=f"tag {tag}: expected .* found"):
        endpoint_limits({tag: text})


def test_options_without_an_endpoint_are_refused() -> None:
    check_limits(NO_LIMITS, None)
    check_limits(LIMITS, "http://h")
    with pytest.raises(CommandError, match="expected with --endpoint or BATCH_ASSETS_ENDPOINT"):
        check_limits(RequestLimits(timeout=5), None)


def test_the_launcher_hands_them_to_the_runs_of_a_request(site: SensorDataset) -> None:
    site.snapshot()
    site.request(**TAGS)
    assert all(TAGS.items() <= launch.tags.items() for launch in site.launches())


def fleet_of(folder: Path, text: str) -> GpuFleet:
    (folder / "fleet.yaml").write_text(text)
    return GpuFleet(
        database=f"sqlite:///{folder}/fleet.db", home=str(folder / "home"), config_path=str(folder / "fleet.yaml")
    )


def test_a_leased_endpoint_has_the_limits_of_fleet_yaml_unless_the_run_has_others(tmp_path: Path) -> None:
    with plain_engine("m") as served, contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db:
        keys = "timeout: 60, concurrency: 2, requests_per_minute: 30, tokens_per_minute: 9000"
        fleet = fleet_of(tmp_path, f"engines:\n  - {{name: lab, kind: endpoint, url: '{served.url}', {keys}}}\n")
        fleet_db.begin_run("run", "d", "00000", "00001")
        found = []
        for limits in (NO_LIMITS, RequestLimits(timeout=5, requests_per_minute=7)):
            need = Requirement("d", "m", "chat", limits=limits)
            with fleet.lease(need, fleet_db, Heartbeat(fleet_db, "run", ttl=60)) as engine:
                found.append(engine.limits)
    assert found == [RequestLimits(60, 2, 30, 9000), RequestLimits(5, 2, 7, 9000)]


@pytest.mark.parametrize("key", ["concurrency", "requests_per_minute", "tokens_per_minute"])
def test_engines_that_a_run_starts_have_a_time_out_and_no_other_limit(tmp_path: Path, key: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("engines:\n  - {name: gpu, kind: process, timeout: 20}\n")
    (engine,) = FleetConfig.load(file).engines
    assert engine.limits == RequestLimits(timeout=20)
    file.write_text(f"engines:\n  - {{name: gpu, kind: process, {key}: 2}}\n")
    with pytest.raises(FleetConfigError, match="expected for kind endpoint only"):
        FleetConfig.load(file)
