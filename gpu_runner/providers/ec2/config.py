"""What stands in fleet.yaml about EC2. No key stands there: boto3 finds credentials as it always does.

    - name: aws
      regions:
        - region: eu-central-1
          image: ami-0123456789abcdef0
          subnets: [subnet-0a, subnet-0b]       # a zone each, tried in this order
          security_groups: [sg-01]
      instance_types:
        - {instance_type: g6e.xlarge, price_per_hour: 2.24, spot: true, max_spot_price: 1.4}
      engine_image: vllm/vllm-openai@sha256:...

The image (AMI) needs the NVIDIA driver, Docker with NVIDIA's runtime, systemd, OpenSSH and cloud-init, as Deep Learning
Base AMIs have them. The security group must let port 22 in from where runs are.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.cloud.engine_container import WORDS
from gpu_runner.providers.sglang_server import SGLANG_IMAGE

NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"

# As `GpuInfo` of EC2's DescribeInstanceTypes has them; a test compares with moto's copy.
GPUS_OF: dict[str, tuple[str, int, float]] = {}  # instance type: GPU, how many, GiB of each as marketed


def _add_family(family: str, gpu: str, memory: float, counts: dict[str, int]) -> None:
    GPUS_OF.update({f"{family}.{size}": (gpu, gpus, memory) for size, gpus in counts.items()})


_ONE_TO_EIGHT = {
    "xlarge": 1,
    "2xlarge": 1,
    "4xlarge": 1,
    "8xlarge": 1,
    "16xlarge": 1,
    "12xlarge": 4,
    "24xlarge": 4,
    "48xlarge": 8,
}
_add_family("g4dn", "T4", 16, {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1, "12xlarge": 4})
_add_family("g5", "A10G", 24, _ONE_TO_EIGHT)
_add_family("g6", "L4", 24, _ONE_TO_EIGHT)
_add_family("g6e", "L40S", 48, _ONE_TO_EIGHT)
_add_family("p4d", "A100", 40, {"24xlarge": 8})
_add_family("p4de", "A100", 80, {"24xlarge": 8})
_add_family("p5", "H100", 80, {"4xlarge": 1, "48xlarge": 8})
_add_family("p5e", "H200", 141, {"48xlarge": 8})
_add_family("p5en", "H200", 141, {"48xlarge": 8})


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Ec2RegionConfig(_Strict):
    """Where VMs are started. A zone is a subnet; they are tried in their order when one has no capacity."""

    region: str = Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$", description="name of the region, e.g. eu-central-1")
    image: str = Field(pattern=r"^ami-[0-9a-f]{8,17}$", description="AMI with NVIDIA driver, Docker and cloud-init")
    subnets: tuple[str, ...] = Field(
        default=(), description="tried in this order when there is no capacity; empty: EC2 picks a zone"
    )
    security_groups: tuple[str, ...] = Field(min_length=1, description="they let port 22 in from where runs are")


class Ec2InstanceTypeConfig(_Strict):
    """An instance type. What is left out comes from a built-in table, and prices from `prices` of fleet.yaml."""

    instance_type: str = Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$", description="e.g. g6e.xlarge")
    gpu: str | None = Field(default=None, description="without it: of the built-in table")
    gpus: int | None = Field(default=None, ge=1, description="without it: of the built-in table")
    gpu_memory_gib: float | None = Field(default=None, gt=0, description="GiB per GPU; without it: of the table")
    price_per_hour: float | None = Field(
        default=None, gt=0, description="on demand, in every region; without it: of the price sources under `prices`"
    )
    on_demand: bool = Field(default=True, description="whether it is rented on demand")
    spot: bool = Field(default=False, description="whether it is rented as spot, too, at the price that EC2 says")
    max_spot_price: float | None = Field(
        default=None, gt=0.001, description="most that an hour of spot may cost; VMs are taken away above it"
    )

    @model_validator(mode="after")
    def _hardware_is_known(self) -> Ec2InstanceTypeConfig:
        if self.instance_type not in GPUS_OF and None in (self.gpu, self.gpus, self.gpu_memory_gib):
            raise ValueError(
                f"instance_type: expected gpu, gpus and gpu_memory_gib beside {self.instance_type}: the built-in table "
                "has no such type"
            )
        if not (self.on_demand or self.spot):
            raise ValueError("on_demand, spot: expected at least one of them")
        return self

    @property
    def ways(self) -> tuple[bool, ...]:
        """How it is rented: False on demand, True as spot."""
        return (*((False,) if self.on_demand else ()), *((True,) if self.spot else ()))

    @property
    def hardware(self) -> tuple[str, int, float]:
        """GPU, how many, GiB of each."""
        gpu, gpus, memory = GPUS_OF.get(self.instance_type, ("", 0, 0.0))
        return self.gpu or gpu, self.gpus or gpus, self.gpu_memory_gib or memory


class Ec2ProviderConfig(_Strict):
    """One account. Several entries with a `name` of their own may share it."""

    name: str = Field(default="aws", pattern=NAME, description="the provider's name, as price lists call it")
    profile: str | None = Field(default=None, description="profile of AWS's own configuration files")
    regions: tuple[Ec2RegionConfig, ...] = Field(min_length=1, description="where VMs are started")
    instance_types: tuple[Ec2InstanceTypeConfig, ...] = Field(min_length=1, description="what is rented")
    engine_image: str = Field(
        min_length=1, pattern=r"^[A-Za-z0-9][\w./:@-]*$", description="container image of vLLM, by digest"
    )
    sglang_image: str | None = Field(
        default=None,
        pattern=SGLANG_IMAGE,
        description="container image of SGLang, by digest, for datasets with `engine.server: sglang`",
    )
    environment: dict[str, str] = Field(default={}, description="further environment variables of the engine")
    environment_from: tuple[str, ...] = Field(
        default=(), description="names of our environment variables that the engine gets too, such as HF_TOKEN"
    )
    address: Literal["public", "private"] = Field(default="public", description="which address of a VM runs connect to")
    engine_words: tuple[str, ...] = Field(
        default=WORDS, description="command line of the container; `{model}` and `{port}` are filled in"
    )
    root_device: str = Field(
        default="/dev/sda1", pattern=r"^/dev/[a-z0-9]+$", description="device name of the AMI's root volume"
    )
    disk_gib: int = Field(default=200, ge=20, le=16_384, description="GiB of the VM's root volume")
    boot_seconds: float = Field(default=480.0, ge=0, description="what ranking assumes of a start")
    reliability: float = Field(default=0.99, ge=0, le=1, description="of a VM on demand, for `min_reliability`")
    spot_reliability: float = Field(default=0.9, ge=0, le=1, description="of a spot VM, for `min_reliability`")
    orphan_minutes: float = Field(
        default=30, ge=5, description="a VM ends itself when no run held a tunnel to it for so long"
    )
    tags: dict[str, str] = Field(default={}, description="further tags of VMs and their volumes")

    @field_validator("regions")
    @classmethod
    def _regions_differ(cls, regions: tuple[Ec2RegionConfig, ...]) -> tuple[Ec2RegionConfig, ...]:
        names = [one.region for one in regions]
        if len(set(names)) < len(names):
            raise ValueError(f"regions: expected each once, found {', '.join(names)}")
        return regions

    @field_validator("instance_types")
    @classmethod
    def _types_differ(cls, types: tuple[Ec2InstanceTypeConfig, ...]) -> tuple[Ec2InstanceTypeConfig, ...]:
        names = [one.instance_type for one in types]
        if len(set(names)) < len(names):
            raise ValueError(f"instance_types: expected each once, found {', '.join(names)}")
        return types

    @field_validator("tags")
    @classmethod
    def _tags_are_not_ours(cls, tags: dict[str, str]) -> dict[str, str]:
        if ours := sorted(key for key in tags if key == "Name" or key.startswith(("batch-assets:", "aws:"))):
            raise ValueError(f"tags: expected none that the fleet or AWS sets, found {', '.join(ours)}")
        return tags

    def region(self, name: str) -> Ec2RegionConfig | None:
        """The region of this name."""
        return next((one for one in self.regions if one.region == name), None)

    def instance_type(self, name: str) -> Ec2InstanceTypeConfig | None:
        """The instance type of this name."""
        return next((one for one in self.instance_types if one.instance_type == name), None)


def lines_for(offer: Offer) -> str:
    """What under `ec2` of fleet.yaml makes an offer of a price list one that can be rented."""
    hardware = "" if offer.instance_type in GPUS_OF else f", gpu: {offer.gpu}, gpus: {offer.gpus}, "
    hardware += f"gpu_memory_gib: {offer.gpu_memory_gib:g}" if hardware else ""
    spot = ", spot: true" if offer.spot else ""
    return (
        f"ec2: [{{regions: [{{region: {offer.region}, image: ami-…, security_groups: [sg-…]}}], "
        f"instance_types: [{{instance_type: {offer.instance_type}{hardware}{spot}}}], engine_image: …}}]"
    )
