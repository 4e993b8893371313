"""How a VM is asked for: the parameters of RunInstances. Pure."""

from __future__ import annotations

from typing import Any

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.ec2.config import Ec2ProviderConfig, Ec2RegionConfig

NAME_TAG, PROVIDER_TAG, READY_TAG = "batch-assets:name", "batch-assets:provider", "batch-assets:ready"
SLOTS_TAG = "batch-assets:max-num-seqs"


def zones(region: Ec2RegionConfig) -> tuple[str | None, ...]:
    """Subnets in the order in which they are tried; None: EC2 picks."""
    return region.subnets or (None,)


def run_instances(
    config: Ec2ProviderConfig,
    region: Ec2RegionConfig,
    subnet: str | None,
    offer: Offer,
    name: str,
    user_data: str,
    max_num_seqs: int | None = None,
) -> dict[str, Any]:
    """Parameters of RunInstances. The token is the machine's name: a second order of it gives the same VM."""
    interface: dict[str, Any] = {
        "DeviceIndex": 0,
        "Groups": list(region.security_groups),
        "AssociatePublicIpAddress": config.address == "public",
        "DeleteOnTermination": True,
    }
    if subnet is not None:
        interface["SubnetId"] = subnet
    request: dict[str, Any] = {
        "ClientToken": name,
        "MinCount": 1,
        "MaxCount": 1,
        "ImageId": region.image,
        "InstanceType": offer.instance_type,
        "UserData": user_data,
        "InstanceInitiatedShutdownBehavior": "terminate",
        # A hop limit of 1: what runs in a container cannot read the user data, where the VM's keys are.
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
        "NetworkInterfaces": [interface],
        "BlockDeviceMappings": [_disk(config)],
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": tags(config, name, max_num_seqs)} for kind in _tagged(offer.spot)
        ],
    }
    if offer.spot:
        request["InstanceMarketOptions"] = _spot(config, offer)
    return request


def tags(config: Ec2ProviderConfig, name: str, max_num_seqs: int | None) -> list[dict[str, str]]:
    """`batch-assets:name` is what machines are found by; `batch-assets:provider` keeps entries of one account apart."""
    every = {**config.tags, "Name": name, NAME_TAG: name, PROVIDER_TAG: config.name}
    if max_num_seqs is not None:
        every[SLOTS_TAG] = str(max_num_seqs)
    return [{"Key": key, "Value": value} for key, value in every.items()]


def _tagged(spot: bool) -> tuple[str, ...]:
    return ("instance", "volume", "spot-instances-request") if spot else ("instance", "volume")


def _disk(config: Ec2ProviderConfig) -> dict[str, Any]:
    volume = {"VolumeSize": config.disk_gib, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    return {"DeviceName": config.root_device, "Ebs": volume}


def _spot(config: Ec2ProviderConfig, offer: Offer) -> dict[str, Any]:
    """A one-time request. A highest price is set only where fleet.yaml has one: it makes interruptions likelier."""
    options: dict[str, Any] = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    kind = config.instance_type(offer.instance_type)
    if kind is not None and kind.max_spot_price is not None:
        options["MaxPrice"] = f"{kind.max_spot_price:.5f}"
    return {"MarketType": "spot", "SpotOptions": options}
