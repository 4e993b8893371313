"""The simulated cloud: markets that move, faults as ordered, machines that are taken away, and an exact meter."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from support.machines import H100, ORDER, ended_machines, eventually, first_offer, get, processes, simulated_cloud
from support.market_offers import speed_of
from support.timing import PATIENCE

from gpu_runner.offers.gpus import find_sheet
from gpu_runner.offers.offer import Offer, rank, screen
from gpu_runner.offers.speed import LengthMix, Speed, Throughput, estimate_speed
from gpu_runner.providers.base import EngineOrder, NoCapacity, ProviderError, ProviderUnclear
from gpu_runner.providers.engine_process import EngineStartError
from gpu_runner.providers.simulated import config as config_module
from gpu_runner.providers.simulated.cloud import SimulatedCloud
from gpu_runner.providers.simulated.config import FaultRule, SimulatedCloudConfig, SimulatedModel
from gpu_runner.providers.simulated.default import default_cloud
from gpu_runner.providers.simulated.meter import CloudMeter
from gpu_runner.providers.simulated.offers_at import offers_at, taken_at
from gpu_runner.providers.simulated.provider import engine_command

SPOT = {**H100, "instance_type": "h100-spot", "spot": True, "price_per_hour": 1.8}
MODEL = SimulatedModel().facts("tiny")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose machines end with the test."""
    with ended_machines(tmp_path):
        yield tmp_path


# The market


def test_prices_and_capacity_change_with_the_clouds_time_and_only_for_new_machines():
    changes = [
        {"at": 100, "offer": "h100", "price_per_hour": 1.2},
        {"at": 200, "offer": "h100", "capacity": 0},
        {"at": 300, "offer": "h100", "price_per_hour": 36.0, "capacity": 5},
    ]
    given = {"name": "sim-a", "offers": [H100, SPOT], "changes": changes}
    config = config_module.SimulatedProviderConfig.model_validate(given)
    seen = [
        [(one.price_per_hour, one.capacity) for one in offers_at(config, None, [], 0.0, at)]
        for at in (99, 100, 250, 300)
    ]
    spot = (1.8, None)
    assert seen == [[(3.6, None), spot], [(1.2, None), spot], [(1.2, 0), spot], [(36.0, 5), spot]]


@pytest.mark.slow
def test_a_running_machine_keeps_its_price_and_an_old_offer_is_refused(home: Path):
    cloud = simulated_cloud(home)
    provider = cloud.providers["sim-a"]
    offer = first_offer(provider)
    provider.create(offer, "ba-1", ORDER)
    cloud.change("sim-a", "h100", price_per_hour=1.2)
    again = simulated_cloud(home).providers["sim-a"]
    assert first_offer(again).price_per_hour == 1.2
    with pytest.raises(ProviderError, match=r"the price is 1\.2 \$/h now, not 3\.6"):
        again.create(offer, "ba-2", ORDER)
    assert again.create(offer, "ba-1", ORDER) == get(again, "ba-1").id
    again.create(first_offer(again), "ba-3", ORDER)
    assert [bill.price_per_hour for bill in cloud.meter().bills()] == [3.6, 1.2]
    cloud.change("sim-a", "h100", capacity=2)
    with pytest.raises(NoCapacity, match="all 2 are taken"):
        again.create(first_offer(again), "ba-4", ORDER)


def test_a_price_history_plays_as_further_offers(home: Path):
    asked_at: list[float] = []

    def prices(now: float) -> list[Offer]:
        asked_at.append(now)
        return [Offer("aws", "eu", "p4d", "A100", 8, 40.0, True, 9.5, 600, 0.9, 0.0, "history")]

    config = SimulatedCloudConfig.model_validate({"providers": [{"name": "sim-aws"}]})
    provider = SimulatedCloud(home, config, {"sim-aws": prices}).providers["sim-aws"]
    (offer,) = provider.offers()
    assert (offer.provider, offer.region, offer.price_per_hour) == ("sim-aws", "eu", 9.5)
    assert abs(asked_at[0] - time.time()) < 5
    assert offer.observed_at == asked_at[0]
    unknown = replace(offer, gpu="H900")
    with pytest.raises(ProviderError, match="no datasheet for H900"):
        provider.create(unknown, "ba-1", ORDER)


def test_the_default_cloud_has_believable_competing_offers(home: Path):
    cloud = SimulatedCloud(home, default_cloud())
    offers = [offer for provider in cloud.providers.values() for offer in provider.offers()]
    assert len({offer.provider for offer in offers}) == 3
    assert all(provider.startswith("sim-") for provider in cloud.providers)
    kept, refused = screen(offers, time.time())
    assert not refused
    speed = speed_of(Throughput(), MODEL, LengthMix(500, 200))
    small, large = (rank(kept, tokens, speed).ranked for tokens in (1e6, 1e9))
    assert len(small) == len([offer for offer in offers if not offer.spot])
    assert small[0].offer.provider != large[0].offer.provider  # a short boot against a low price


def test_the_config_reads_as_documented_and_mistakes_are_named():
    text = (config_module.__doc__ or "").split("\n\n")[1]
    config = SimulatedCloudConfig.model_validate(yaml.safe_load(text))
    assert config.providers[0].offers[0].gpu_memory_gib == 80
    assert config.facts("org/70b")[0].weight_bytes == 1.4e11
    assert config.facts("other")[0].weight_bytes == 1.6e10
    offer = {"instance_type": "a", "gpu": "H100", "price_per_hour": 1}
    for wrong, said in (
        ({"offers": [{**offer, "gpu": "H900"}]}, "expected a GPU with a datasheet"),
        ({"offers": [{**offer, "gpu": "A100"}]}, "with gpu_memory_gib where it has several sizes"),
        ({"offers": [{**offer, "price_per_hour": 0}]}, "greater than 0"),
        ({"offers": [offer, offer]}, "each instance_type once, found twice: a"),
        ({"offers": [offer], "changes": [{"at": 0, "offer": "b"}]}, r"expected offers among \['a'\], found b"),
        ({"faults": [{"kind": "eror"}]}, "faults.0.kind"),
        ({"ofers": []}, "ofers"),
    ):
        with pytest.raises(ValidationError, match=said):
            SimulatedCloudConfig.model_validate({"providers": [{"name": "sim-a", **wrong}]})


# The engine


def test_a_simulated_gpu_is_as_fast_as_its_estimate():
    """The step model of the engine against `estimate_speed` in steady state, by its own formula."""
    for gpu, memory, gpus in (("H100", 80.0, 1), ("L40S", 48.0, 1), ("H100", 80.0, 4)):
        offer = Offer("sim", "", "x", gpu, gpus, memory, False, 1.0, 0, 1, 0, "")
        words = engine_command(offer, EngineOrder("tiny", "chat"), MODEL, 4096, 60)
        option = {word: words[index + 1] for index, word in enumerate(words) if word.startswith("--")}
        mix = LengthMix(400, 100)
        running = min(int(option["--max-num-seqs"]), int(option["--kv-tokens"]) / (400 + 50))
        tokens = min(running * 5, 8192)
        running = tokens / 5
        step = float(option["--overhead-ms"]) / 1e3 + running * 450 * float(option["--context-ns"]) / 1e9
        step += max(float(option["--weights-ms"]) / 1e3, tokens * float(option["--token-us"]) / 1e6)
        sheet = find_sheet(gpu, memory)
        assert sheet is not None
        expected = estimate_speed(replace(MODEL, tensor_parallel=(gpus,)), sheet, memory, gpus, mix)
        assert isinstance(expected, Speed)
        assert tokens / step == pytest.approx(expected.tokens_per_second, rel=0.02)
        assert option["--speed"] == "60"


def test_a_model_that_does_not_fit_fails_at_its_boot(home: Path):
    given = {
        "model": {"weight_bytes": 1.4e11, "active_parameters": 7e10},
        "providers": [{"name": "sim-a", "boot_seconds": 0, "offers": [H100]}],
    }
    provider = SimulatedCloud(home, SimulatedCloudConfig.model_validate(given)).providers["sim-a"]
    provider.create(first_offer(provider), "ba-1", ORDER)
    with pytest.raises(EngineStartError, match="has ended: boot failed"):
        provider.wait_ready("ba-1", 20 * PATIENCE, time.sleep)
    assert "does not fit a KV cache" in (home / "machines" / "sim-a.ba-1.log").read_text()


def test_boot_takes_its_time_on_the_clouds_clock_and_arguments_reach_the_engine(home: Path):
    given = {
        "clock": 100,
        "arguments": ["--request-log", "{home}/{name}.log"],
        "providers": [{"name": "sim-a", "boot_seconds": 150, "offers": [H100]}],
    }
    provider = SimulatedCloud(home, SimulatedCloudConfig.model_validate(given)).providers["sim-a"]
    began = time.monotonic()
    provider.create(first_offer(provider), "ba-1", replace(ORDER, arguments=("--seed", "7")))
    machine = provider.wait_ready("ba-1", 20 * PATIENCE, time.sleep)
    assert time.monotonic() - began >= 1.5
    (engine,) = [one.cmdline() for one in processes(machine.id) if "gpu_runner.simulator" in one.cmdline()[:3]]
    assert engine[-4:] == ["--request-log", f"{home}/ba-1.log", "--seed", "7"]


# Faults of the API


def test_errors_and_time_outs_change_nothing_and_a_lost_reply_hides_what_was_done(home: Path):
    cloud = simulated_cloud(home)
    provider = cloud.providers["sim-a"]
    offer = first_offer(provider)
    for kind, raised in (("error", ProviderError), ("time_out", ProviderUnclear)):
        cloud.inject(FaultRule(kind=kind, calls=("create",), times=1))
        with pytest.raises(raised):
            provider.create(offer, "ba-1", ORDER)
        assert not provider.list("")
    cloud.inject(FaultRule(kind="lost_reply", calls=("create", "terminate"), times=2), "sim-a")
    with pytest.raises(ProviderUnclear):
        provider.create(offer, "ba-1", ORDER)
    machine = get(provider, "ba-1")
    with pytest.raises(ProviderUnclear):
        provider.terminate("ba-1")
    assert get(provider, "ba-1").state == "ended"
    assert provider.create(offer, "ba-1", ORDER) == machine.id
    assert len(cloud.meter().bills()) == 1
    results = [call.result for call in cloud.calls("create")]
    assert [result.split(":")[0] for result in results if result] == [
        "ProviderError",
        "ProviderUnclear",
        "ProviderUnclear",
        "ok",
    ]


def test_no_capacity_empty_lists_and_deaf_terminates_come_as_ordered(home: Path):
    rules = [{"kind": kind, "times": 1} for kind in ("no_capacity", "empty_list", "deaf_terminate")]
    cloud = simulated_cloud(home, faults=rules)
    provider = cloud.providers["sim-a"]
    offer = first_offer(provider)
    with pytest.raises(NoCapacity):
        provider.create(offer, "ba-1", ORDER)
    machine_id = provider.create(offer, "ba-1", ORDER)
    assert provider.list("ba-") == []
    assert len(provider.list("ba-")) == 1
    provider.terminate("ba-1")
    assert get(provider, "ba-1").state == "booting"
    assert cloud.meter().bills()[0].ended_at is None
    provider.terminate("ba-1")
    assert get(provider, "ba-1").state == "ended"
    eventually(lambda: not processes(machine_id))


def test_the_same_seed_gives_the_same_faults_whatever_the_names_are(tmp_path: Path):
    def story(home: Path, seed: int) -> list[str]:
        rules = [{"kind": "error", "rate": 0.3}, {"kind": "time_out", "calls": ["terminate"], "rate": 0.5}]
        provider = simulated_cloud(home, seed=seed, faults=rules).providers["sim-a"]
        told = []
        for _ in range(60):
            try:
                provider.terminate(f"ba-{random.random()}")
                told.append("ok")
            except (ProviderError, ProviderUnclear) as error:
                told.append(type(error).__name__)
        return told

    first = story(tmp_path / "a", 1)
    assert first == story(tmp_path / "b", 1) != story(tmp_path / "c", 2)
    assert 8 <= first.count("ProviderError") <= 28
    assert 10 <= first.count("ProviderUnclear") <= 32


def test_the_list_is_late_for_new_and_for_ended_machines(home: Path):
    provider = simulated_cloud(home, list_lag_seconds=2.0, boot_seconds=6000).providers["sim-a"]
    provider.create(first_offer(provider), "ba-1", ORDER)
    assert provider.list("ba-") == []
    eventually(lambda: provider.list("ba-"))
    assert get(provider, "ba-1").state == "booting"
    provider.terminate("ba-1")
    late = get(provider, "ba-1")
    assert (late.state, late.ended_seconds, late.reason) == ("booting", None, None)
    eventually(lambda: get(provider, "ba-1").state != "booting")
    seen = get(provider, "ba-1")
    assert (seen.state, seen.reason) == ("ended", "terminated")
    assert seen.ended_seconds is not None and seen.ended_seconds >= 2.0


# Machines that fail or are taken away


@pytest.mark.slow
def test_a_boot_fails_or_hangs_as_ordered(home: Path):
    rules = [{"kind": "boot_fails", "times": 1}, {"kind": "boot_hangs", "times": 1}]
    cloud = simulated_cloud(home, boot_seconds=120, faults=rules)
    provider = cloud.providers["sim-a"]
    offer = first_offer(provider)
    for name in ("ba-fails", "ba-hangs", "ba-works"):
        provider.create(offer, name, ORDER)
    with pytest.raises(EngineStartError, match="boot failed"):
        provider.wait_ready("ba-fails", 20 * PATIENCE, time.sleep)
    assert provider.wait_ready("ba-works", 20 * PATIENCE, time.sleep).endpoint
    assert get(provider, "ba-hangs").state == "booting"
    failed, hangs, _ = cloud.meter().bills()
    assert 120 <= failed.seconds < 1200
    assert (failed.reason, hangs.ended_at) == ("boot failed", None)
    provider.terminate("ba-hangs")
    eventually(lambda: not processes(hangs.id))


@pytest.mark.slow
def test_a_machine_is_taken_away_after_its_notice_or_without_one(home: Path):
    cloud = simulated_cloud(home)
    provider = cloud.providers["sim-a"]
    offer = first_offer(provider)
    for name in ("ba-told", "ba-untold"):
        provider.create(offer, name, ORDER)
    for name in ("ba-told", "ba-untold"):
        provider.wait_ready(name, 20 * PATIENCE, time.sleep)
    assert get(provider, "ba-told").notice_seconds is None
    assert cloud.interrupt("sim-a", "ba-told", notice_seconds=3)
    assert cloud.interrupt("sim-a", "ba-untold")
    told_at = time.time()
    told = get(provider, "ba-told")
    assert told.state == "running" and told.notice_seconds is not None and 0 < told.notice_seconds <= 3
    eventually(lambda: get(provider, "ba-untold").state == "ended")
    assert get(provider, "ba-untold").notice_seconds is None
    eventually(lambda: get(provider, "ba-told").state == "ended")
    assert time.time() - told_at > 2.8
    bills = cloud.meter().bills()
    assert [bill.reason for bill in bills] == ["interrupted", "interrupted"]
    assert bills[0].ended_at is not None and bills[0].ended_at - told_at > 2.8
    eventually(lambda: not any(processes(bill.id) for bill in bills))
    assert not cloud.interrupt("sim-a", "ba-told")
    assert not cloud.interrupt("sim-a", "ba-never")


@pytest.mark.soak("providers")
def test_scheduled_interruptions_take_what_runs_then(home: Path):
    # After 15 s, announced after 7 s: both machines are ordered before, on a busy computer too.
    scheduled = [{"at": 9000, "offer": "h100-spot", "notice_seconds": 8.0}]
    cloud = simulated_cloud(home, offers=[SPOT, H100], interruptions=scheduled, boot_seconds=0)
    provider = cloud.providers["sim-a"]
    spot, sure = provider.offers()
    provider.create(spot, "ba-spot", ORDER)
    provider.create(sure, "ba-sure", ORDER)
    eventually(lambda: get(provider, "ba-spot").notice_seconds is not None)
    eventually(lambda: get(provider, "ba-spot").state == "ended")
    bill = cloud.meter().bills()[0]
    assert bill.ended_at is not None
    assert 15 <= bill.ended_at - cloud.started_at < 15 + 2 * PATIENCE
    assert get(provider, "ba-sure").state != "ended"
    provider.create(spot, "ba-after", ORDER)
    time.sleep(0.3)
    assert get(provider, "ba-after").state != "ended"


def test_spot_machines_live_exponentially_long_and_others_for_ever():
    given = {"name": "sim-a", "offers": [H100, SPOT], "interruptions_per_hour": 2.0, "notice_seconds": 9}
    config = config_module.SimulatedProviderConfig.model_validate(given)
    sure, spot = offers_at(config, None, [], 0.0, 0.0)
    assert taken_at(config, sure, 0.0, 0.5) is None
    rng = random.Random(1)
    lives = [taken for _ in range(4000) if (taken := taken_at(config, spot, 0.0, rng.random()))]
    assert {notice for _, notice in lives} == {9}
    assert statistics.mean(seconds for seconds, _ in lives) == pytest.approx(1800, rel=0.06)
    assert statistics.median(seconds for seconds, _ in lives) == pytest.approx(1800 * 0.693, rel=0.06)


def test_spot_machines_may_be_taken_away_so_long_after_their_boot():
    given = {
        "name": "sim-a",
        "offers": [H100, SPOT],
        "taken_after_seconds": 60,
        "notice_seconds": 4,
        "boot_seconds": 100,
    }
    config = config_module.SimulatedProviderConfig.model_validate(given)
    sure, spot = offers_at(config, None, [], 0.0, 0.0)
    assert taken_at(config, sure, 0.0, 0.5) is None
    assert taken_at(config, spot, 500.0, 0.5) == (160, 4)


# The meter


@pytest.mark.slow
def test_the_meter_is_exact_and_reads_nothing_but_the_clouds_records(home: Path):
    cloud = simulated_cloud(home, clock=3600, offers=[H100, SPOT], boot_seconds=36_000)
    provider = cloud.providers["sim-a"]
    spans = []
    for name, offer in zip(("ba-1", "ba-2"), provider.offers(), strict=True):
        provider.create(offer, name, ORDER)
        time.sleep(0.2)
        provider.terminate(name)
        (record,) = cloud._register.machines("sim-a", name)
        assert record.ended_at is not None
        spans.append(record.ended_at - record.created_at)
    # An hour a second: 3.6 $ and 1.8 $ a second.
    assert [bill.usd for bill in CloudMeter(home).bills()] == pytest.approx([3.6 * spans[0], 1.8 * spans[1]], abs=1e-9)
    assert CloudMeter(home).usd("sim-a") == pytest.approx(3.6 * spans[0] + 1.8 * spans[1])
    assert CloudMeter(home).usd(tag="ba-2") == pytest.approx(1.8 * spans[1])
    assert CloudMeter(home).usd("sim-other") == 0
    provider.create(provider.offers()[0], "ba-3", ORDER)
    began = time.time()
    first = CloudMeter(home).usd(tag="ba-3")
    time.sleep(0.2)
    more = CloudMeter(home).usd(tag="ba-3") - first
    assert 0.2 * 3.6 * 0.99 <= more <= (time.time() - began) * 3.6


@pytest.mark.slow
def test_many_processes_open_a_new_cloud_at_once(home: Path):
    code = (
        "import sys; from pathlib import Path\n"
        "from gpu_runner.providers.machine_host.registry import MachineRegistry\n"
        "register = MachineRegistry(Path(sys.argv[1]))\n"
        "for _ in range(20):\n"
        "    with register.transaction() as connection:\n"
        "        connection.execute(\"INSERT INTO counters VALUES ('n', 1) \"\n"
        "            'ON CONFLICT (key) DO UPDATE SET value = value + 1')\n"
    )
    crowd = [subprocess.Popen([sys.executable, "-c", code, str(home / "new")]) for _ in range(8)]
    assert [process.wait(timeout=30) for process in crowd] == [0] * 8
    cloud = simulated_cloud(home / "new")
    with cloud._register.transaction() as connection:
        assert connection.execute("SELECT value FROM counters").fetchall() == [(160,)]
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
