"""What stands in fleet.yaml about RunPod. The key stands in the environment.

    - name: runpod
      api_key_env: RUNPOD_API_KEY
      gpus:
        - {gpu_type: NVIDIA H100 80GB HBM3, gpu: H100, gpu_memory_gib: 80, price_per_hour: 2.99}
      engine_image: vllm/vllm-openai@sha256:...

Spot pods are not rented: version 1 of the API takes no bid, so that nobody could say what an hour may cost.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gpu_runner.bounded_http.addresses import engine_url
from gpu_runner.offers.offer import Offer
from gpu_runner.providers.cloud.engine_container import WORDS
from gpu_runner.providers.sglang_server import SGLANG_IMAGE

API = "https://rest.runpod.io/v1"
NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunPodGpuConfig(_Strict):
    """What is rented. `gpu_type` is RunPod's own id of the GPU; an offer is named after it."""

    gpu_type: str = Field(min_length=1, max_length=80, description="RunPod's id, e.g. NVIDIA H100 80GB HBM3")
    gpu: str = Field(description="spelled as in `gpu_runner/offers/gpus.py`")
    gpus: int = Field(default=1, ge=1, le=8, description="GPUs of one pod")
    gpu_memory_gib: float = Field(gt=0, description="GiB per GPU")
    price_per_hour: float | None = Field(
        default=None, gt=0, description="most that a pod may cost; without it: of the price sources under `prices`"
    )

    @property
    def instance_type(self) -> str:
        """Name of the offer: RunPod's id, and how many where there are several."""
        return self.gpu_type if self.gpus == 1 else f"{self.gpus}x {self.gpu_type}"


class RunPodConfig(_Strict):
    """One account."""

    name: str = Field(default="runpod", pattern=NAME, description="the provider's name, as price lists call it")
    api_key_env: str = Field(
        default="RUNPOD_API_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="variable that holds the API key"
    )
    api: str = Field(default=API, description="address of the API")
    gpus: tuple[RunPodGpuConfig, ...] = Field(min_length=1, description="what is rented")
    cloud: Literal["SECURE", "COMMUNITY"] = Field(default="SECURE", description="RunPod's own data centres, or others'")
    data_centers: tuple[str, ...] = Field(default=(), description="RunPod's ids of data centres; empty: any")
    engine_image: str = Field(
        min_length=1, pattern=r"^[A-Za-z0-9][\w./:@-]*$", description="container image of vLLM, by digest"
    )
    sglang_image: str | None = Field(
        default=None,
        pattern=SGLANG_IMAGE,
        description="container image of SGLang, by digest, for datasets with `engine.server: sglang`",
    )
    engine_command: tuple[str, ...] = Field(
        default=("vllm", "serve"),
        min_length=1,
        description="what `engine_words` are given to, instead of the image's own",
    )
    orphan_minutes: float = Field(
        default=60,
        ge=5,
        description="a pod ends itself when its engine was asked nothing for so long, a boot included; its image needs "
        "`python3`",
    )
    engine_words: tuple[str, ...] = Field(
        default=WORDS, description="command line of the container; `{model}` and `{port}` are filled in"
    )
    environment: dict[str, str] = Field(default={}, description="further environment variables of the engine")
    environment_from: tuple[str, ...] = Field(
        default=(), description="names of our environment variables that the engine gets too, such as HF_TOKEN"
    )
    reach: Literal["proxy", "tcp"] = Field(
        default="proxy",
        description="`proxy`: HTTPS, which cuts each request after 100 s. `tcp`: a public port without encryption",
    )
    disk_gib: int = Field(default=200, ge=20, le=4096, description="GiB of the container's disk")
    boot_seconds: float = Field(default=300.0, ge=0, description="what ranking assumes of a start")
    reliability: float = Field(default=0.98, ge=0, le=1, description="as stated in its offers, for `min_reliability`")

    @field_validator("api")
    @classmethod
    def _api_is_encrypted(cls, api: str) -> str:
        url = api.rstrip("/")
        local = url.startswith(("http://127.0.0.1:", "http://localhost:"))
        if not (url.startswith("https://") or local):
            raise ValueError("api: expected an address that begins with https://, as the key is sent to it")
        engine_url(url.removesuffix("/v1"))
        return url

    @field_validator("gpus")
    @classmethod
    def _gpus_differ(cls, gpus: tuple[RunPodGpuConfig, ...]) -> tuple[RunPodGpuConfig, ...]:
        names = [one.instance_type for one in gpus]
        if len(set(names)) < len(names):
            raise ValueError(f"gpus: expected each gpu_type and count once, found {', '.join(names)}")
        return gpus


def lines_for(offer: Offer) -> str | None:
    """What under `runpod` of fleet.yaml makes an offer of a price list one that can be rented; None for spot."""
    if offer.spot:
        return None
    count = f", gpus: {offer.gpus}" if offer.gpus > 1 else ""
    return (
        f"runpod: [{{gpus: [{{gpu_type: {offer.instance_type or '…'}, gpu: {offer.gpu}{count}, "
        f"gpu_memory_gib: {offer.gpu_memory_gib:g}, price_per_hour: {offer.price_per_hour:g}}}], engine_image: …}}]"
    )
