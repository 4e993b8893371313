"""Rented clouds in fleet.yaml: what is read from it, what is made of it, and what prices say that it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.rentable import lines_to_rent
from resources.fleet.fleet_config import FleetConfig, FleetConfigError
from resources.fleet.resource import GpuFleet
from resources.pricing.market import Market
from resources.pricing.sources import PricingConfig

EC2 = """
ec2:
  - regions: [{region: eu-central-1, image: ami-0123456789abcdef0, security_groups: [sg-1]}]
    instance_types: [{instance_type: g6e.xlarge, price_per_hour: 2.2}, {instance_type: g6.xlarge}]
    engine_image: vllm/vllm-openai
"""
RUNPOD = """
runpod:
  - gpus: [{gpu_type: NVIDIA L40S, gpu: L40S, gpu_memory_gib: 48}]
    engine_image: vllm/vllm-openai
"""
LIST = """
offers:
  - {provider: aws, region: eu-central-1, instance_type: g6.xlarge, gpu: L4, gpus: 1, price_per_hour: 0.9}
  - {provider: runpod, instance_type: NVIDIA L40S, gpu: L40S, gpus: 1, price_per_hour: 0.8}
  - {provider: aws, region: us-east-1, instance_type: p5.48xlarge, gpu: H100, gpus: 8, price_per_hour: 98, spot: true}
"""


def fleet(folder: Path, text: str) -> GpuFleet:
    (folder / "fleet.yaml").write_text(text)
    return GpuFleet(database="", home=str(folder), config_path=str(folder / "fleet.yaml"))


def offer(provider: str, **settings: object) -> Offer:
    given = {
        "provider": provider,
        "region": "us-east-1",
        "instance_type": "p5.48xlarge",
        "gpu": "H100",
        "gpus": 8,
        "gpu_memory_gib": 80.0,
        "spot": False,
        "price_per_hour": 98.0,
        "boot_seconds": 1.0,
        "reliability": 1.0,
        "observed_at": 0.0,
        "source": "gpuhunt",
        **settings,
    }
    return Offer(**given)  # type: ignore[arg-type]


def test_providers_of_fleet_yaml_offer_at_its_prices_and_those_of_lists(tmp_path: Path):
    (tmp_path / "list.yaml").write_text(LIST)
    made = fleet(tmp_path, f"{EC2}{RUNPOD}prices: {{lists: [list.yaml]}}\n")
    providers = made.providers(made.config())
    found = {one.name: one.price_per_hour for provider in providers.values() for one in provider.offers()}
    assert found == {
        "aws/eu-central-1/g6e.xlarge": 2.2,
        "aws/eu-central-1/g6.xlarge": 0.9,
        "runpod/NVIDIA L40S": 0.8,
    }
    assert not made.market(made.config(), providers).trusts("aws")


def test_a_price_list_that_cannot_be_read_leaves_the_prices_of_fleet_yaml(tmp_path: Path):
    made = fleet(tmp_path, f"{EC2}prices: {{lists: [none.yaml]}}\n")
    (found,) = made.providers(made.config())["aws"].offers()
    assert found.price_per_hour == 2.2


def test_a_vm_may_not_take_itself_for_an_orphan_while_it_waits_for_the_next_run(tmp_path: Path):
    with pytest.raises(FleetConfigError, match="expected orphan_minutes of aws above idle_minutes"):
        fleet(tmp_path, f"{EC2}idle_minutes: 30\n").config()


def test_a_pod_of_runpod_may_not_either(tmp_path: Path):
    with pytest.raises(FleetConfigError, match="runpod: expected orphan_minutes of runpod above idle_minutes"):
        fleet(tmp_path, f"{RUNPOD}idle_minutes: 60\n").config()


def test_what_a_listed_offer_lacks_is_named_with_the_lines_that_make_it_rentable(tmp_path: Path):
    (tmp_path / "list.yaml").write_text(LIST)
    there = Market((), PricingConfig(lists=[tmp_path / "list.yaml"]))
    said = {one.offer.instance_type: one.reasons[0] for one in there.stock().refused}
    assert said["p5.48xlarge"] == (
        "no provider configured for aws; fleet.yaml would rent it with ec2: [{regions: [{region: us-east-1, "
        "image: ami-…, security_groups: [sg-…]}], instance_types: [{instance_type: p5.48xlarge, spot: true}], "
        "engine_image: …}]"
    )
    assert said["NVIDIA L40S"].startswith("no provider configured for runpod; fleet.yaml would rent it with runpod: [{")


@pytest.mark.parametrize(
    "listed",
    [
        offer("aws"),
        offer("aws", instance_type="g7x.2xlarge", gpu="NewGPU", gpus=1, gpu_memory_gib=96.0, spot=True),
        offer("runpod", region="", instance_type="NVIDIA H100 80GB HBM3", gpus=2),
    ],
)
def test_the_lines_are_what_fleet_yaml_takes(listed: Offer):
    lines = lines_to_rent(listed)
    assert lines is not None
    for placeholder, real in (("ami-…", "ami-0123456789abcdef0"), ("sg-…", "sg-1"), ("…", "vllm/vllm-openai")):
        lines = lines.replace(placeholder, real)
    made = FleetConfig.model_validate(yaml.safe_load(lines))
    kinds = [one.instance_type for entry in made.ec2 for one in entry.instance_types]
    kinds += [one.gpu_type for entry in made.runpod for one in entry.gpus]
    assert kinds == [listed.instance_type]


def test_what_no_provider_can_rent_has_no_lines():
    assert lines_to_rent(offer("elsewhere")) is None
    assert lines_to_rent(offer("runpod", spot=True)) is None
