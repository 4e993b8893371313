"""The section `hardware` of a dataset's YAML: which offers may be rented for it. It changes no row and no batch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from batch_assets.spec.fields import Flag, Strict
from gpu_runner.offers.offer import OfferFilter
from gpu_runner.offers.speed import GIB, ModelFacts
from resources.pricing.model_catalog import DeclaredModel

Word = Annotated[str, Field(min_length=1, max_length=255)]
Words = Annotated[list[Word], Field(min_length=1)]


class ModelFactsSpec(Strict):
    """Facts of a model whose config.json cannot be had or is of an unknown architecture. They count before all else."""

    weights_gib: float = Field(gt=0, le=1e6, description="GiB of all weights as they lie in GPU memory.")
    active_billions: float = Field(
        gt=0, le=1e6, description="Billions of parameters that one token passes: 8.2 for Qwen3-8B."
    )
    kv_bytes_per_token: float = Field(
        ge=0, le=1e12, description="Bytes of KV cache per token, all layers; 0 for encoders, which keep none."
    )
    context: int | None = Field(default=None, ge=1, le=1 << 31, description="Most tokens of a row.")
    tensor_parallel: Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1)] = Field(
        default=[1, 2, 4, 8], description="Over how many GPUs one engine may be split."
    )
    fp8: Flag = Field(default=False, description="Whether weights and activations are FP8.")

    def declared(self, model: str) -> DeclaredModel:
        """The facts of the model of this name."""
        facts = ModelFacts(
            model=model,
            weight_bytes=self.weights_gib * GIB,
            active_parameters=self.active_billions * 1e9,
            kv_bytes_per_token=self.kv_bytes_per_token,
            tensor_parallel=tuple(sorted(set(self.tensor_parallel))),
            fp8=self.fp8,
        )
        return DeclaredModel(facts, self.context)


class HardwareSpec(Strict):
    """Which offers may be rented. What is left out is not restricted. Changing it regenerates nothing."""

    providers: Words | None = Field(default=None, description="Only offers of these providers.")
    regions: Words | None = Field(default=None, description="Only offers in these regions.")
    gpus: Words | None = Field(
        default=None, description="Only these GPUs, e.g. H100 or RTX 4090; only letters and digits count."
    )
    spot: Flag = Field(default=False, description="Whether instances that can be taken away may be rented.")
    max_price_per_hour: float | None = Field(default=None, gt=0, description="Most US dollars per hour and instance.")
    min_reliability: float = Field(
        default=0.0, ge=0, le=1, description="Least chance that an instance starts and stays for an hour."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=16,
        le=1 << 31,
        description="Most tokens of a row, prompt and output. Default: the model's own, or what fits.",
    )
    model_facts: ModelFactsSpec | None = Field(
        default=None, description="What is known of a model whose files cannot be read."
    )

    def accept(self) -> OfferFilter:
        """The filter that offers must pass."""
        return OfferFilter(
            providers=_set(self.providers),
            regions=_set(self.regions),
            gpus=_set(self.gpus),
            spot=self.spot,
            max_price_per_hour=self.max_price_per_hour,
            min_reliability=self.min_reliability,
        )

    def declared(self, model: str) -> DeclaredModel | None:
        """The facts stated of the model, if any."""
        return self.model_facts.declared(model) if self.model_facts else None


def _set(words: list[str] | None) -> frozenset[str] | None:
    return frozenset(words) if words is not None else None
