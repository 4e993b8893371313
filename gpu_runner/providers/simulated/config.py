"""What a simulated cloud is made of, as written in fleet.yaml.

    clock: 60                       # simulated seconds per real second
    seed: 0                         # same seed, same faults
    orphan_seconds: 120             # real seconds without a living fleet until machines end themselves
    model: {weight_bytes: 1.6e10, active_parameters: 8.0e9, kv_bytes_per_token: 131072}
    models: {"org/70b": {weight_bytes: 1.4e11, active_parameters: 7.0e10, kv_bytes_per_token: 327680}}
    arguments: ["--output-tokens", "fixed:64"]      # further words for every engine; {name}, {home} are filled in
    providers:
      - name: sim-north
        region: north-1
        boot_seconds: 240           # simulated
        offers:
          - {instance_type: h100, gpu: H100, price_per_hour: 2.5, capacity: 4}
          - {instance_type: h100-spot, gpu: H100, price_per_hour: 1.6, spot: true}
        plays: {provider: lambdalabs, since: 2023-06-01}   # what `prices` recorded of it
        changes:                    # `at`: simulated seconds since the cloud began
          - {at: 3600, offer: h100, price_per_hour: 1.2}
          - {at: 7200, offer: h100, capacity: 0}
        list_lag_seconds: 3         # real
        interruptions_per_hour: 0.2 # of each spot machine, per simulated hour
        notice_seconds: 20          # real; leave out: without notice
        interruptions: [{at: 5400, offer: h100-spot}]
        faults:                     # see FaultRule
          - {kind: lost_reply, calls: [create], rate: 0.05}
          - {kind: boot_fails, times: 1}

Prices and work run on the simulated clock. What our own processes must react to (notice, lag, time-outs) is in real
seconds, because they do not run faster.
"""

from __future__ import annotations

import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gpu_runner.offers.gpus import find_sheet, spell_gpu
from gpu_runner.offers.speed import ModelFacts

ApiCall = Literal["offers", "create", "list", "terminate"]
FaultKind = Literal[
    "error", "time_out", "lost_reply", "no_capacity", "empty_list", "deaf_terminate", "boot_fails", "boot_hangs"
]
_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SimulatedModel(_Strict):
    """The size of a model. Default: Llama-3.1-8B in bf16 (config.json: 32 layers, 8 KV heads of 128)."""

    weight_bytes: float = Field(default=16.06e9, gt=0, description="bytes of all weights")
    active_parameters: float = Field(default=8.03e9, gt=0, description="parameters that one token passes")
    kv_bytes_per_token: float = Field(default=131072, gt=0, description="bytes of KV cache per token, all layers")
    max_model_len: int = Field(default=4096, ge=16, description="most tokens of a row")
    tensor_parallel: tuple[int, ...] = Field(
        default=(1, 2, 4, 8), description="over how many GPUs one engine may be split"
    )
    fp8: bool = Field(default=False, description="whether weights and activations are FP8")

    def facts(self, model: str) -> ModelFacts:
        """As the sizing formulas take it."""
        return ModelFacts(
            model,
            self.weight_bytes,
            self.active_parameters,
            self.kv_bytes_per_token,
            self.tensor_parallel,
            self.fp8,
        )


class FaultRule(_Strict):
    """What goes wrong, how often, and how many times.

    error: ProviderError, nothing done. time_out: no answer, nothing done. lost_reply: no answer, but it was done.
    no_capacity: of creates, whatever the offer says. empty_list: `list` answers, with nothing in it. deaf_terminate:
    accepted, but the machine runs and bills on. boot_fails: the provider gives up after the boot time and bills no
    more. boot_hangs: never ready, billed until terminated. `calls` counts for the first three; empty: every call.
    `rate`: share of the calls (of the boots) that it hits. `times`: the first so many hits. `delay_seconds`: real
    seconds until the fault shows.
    """

    kind: FaultKind = Field(description="what goes wrong")
    calls: tuple[ApiCall, ...] = Field(default=(), description="which calls `error`, `time_out`, `lost_reply` hit")
    rate: float = Field(default=1.0, gt=0, le=1, description="share of the calls, or of the boots, that it hits")
    times: int | None = Field(default=None, ge=1, description="only the first so many hits")
    delay_seconds: float = Field(default=0.0, ge=0, le=5, description="real seconds until the fault shows")

    def concerns(self, call: str) -> bool:
        """Whether the rule is about this call, or about the boot of a machine (`boot`)."""
        of_one = {"no_capacity": "create", "empty_list": "list", "deaf_terminate": "terminate"}
        if self.kind in of_one:
            return call == of_one[self.kind]
        if self.kind in ("boot_fails", "boot_hangs"):
            return call == "boot"
        return call != "boot" and (not self.calls or call in self.calls)


class SimulatedOffer(_Strict):
    """An instance type. `gpu_memory_gib`: from the datasheet where the name leaves no choice."""

    instance_type: str = Field(min_length=1, max_length=100, description="its name; once per provider")
    gpu: str = Field(description="a GPU that `gpu_runner/offers/gpus.py` has a datasheet of")
    gpus: int = Field(default=1, ge=1, description="GPUs of one instance")
    gpu_memory_gib: float = Field(default=0.0, ge=0, description="GiB per GPU; 0: from the datasheet")
    spot: bool = Field(default=False, description="whether it can be taken away")
    price_per_hour: float = Field(gt=0, description="US dollars for the whole instance")
    capacity: int | None = Field(default=None, ge=0, description="most instances at once; without it no limit")
    boot_seconds: float | None = Field(default=None, ge=0, description="simulated; default: the provider's")

    @model_validator(mode="before")
    @classmethod
    def _known_gpu(cls, given: object) -> object:
        if not isinstance(given, dict) or not isinstance(given.get("gpu"), str):
            return given
        name, memory = spell_gpu(given["gpu"])
        memory = given.get("gpu_memory_gib") or memory
        sheet = find_sheet(name, memory if isinstance(memory, int | float) else None)
        if sheet is None:
            raise ValueError(
                f"gpu: expected a GPU with a datasheet in gpu_runner/offers/gpus.py, with gpu_memory_gib where it has "
                f"several sizes, found {given['gpu']!r} with {memory or 'no'} GiB"
            )
        return {**given, "gpu": name, "gpu_memory_gib": memory or sheet.memory}


class OfferChange(_Strict):
    """From `at` on, a new price or capacity of an instance type. Machines that run keep their price."""

    at: float = Field(ge=0, description="simulated seconds since the cloud began")
    offer: str = Field(description="the instance type")
    price_per_hour: float | None = Field(default=None, gt=0, description="the new price; without it the old one")
    capacity: int | None = Field(default=None, ge=0, description="the new capacity; without it the old one")


class Interruption(_Strict):
    """All machines of an instance type (None: all spot machines) that run at `at` are taken away."""

    at: float = Field(ge=0, description="simulated seconds since the cloud began")
    offer: str | None = Field(default=None, description="the instance type; without it all spot instances")
    notice_seconds: float | None = Field(default=None, ge=0, description="real; default: the provider's")


class ReplayConfig(_Strict):
    """Whose prices a provider plays, from the fleet's price sources."""

    provider: str = Field(min_length=1, description="name in the price sources, e.g. lambdalabs")
    since: datetime.datetime | None = Field(
        default=None, description="play the recorded history from this moment on; without it, today's prices"
    )


class SimulatedProviderConfig(_Strict):
    """One provider of the cloud."""

    name: str = Field(pattern=_NAME, description="name in offers, rows and bills")
    region: str = Field(default="", description="region of its offers")
    boot_seconds: float = Field(default=180.0, ge=0, description="simulated, from the order to the first answer")
    reliability: float = Field(default=0.99, ge=0, le=1, description="as stated in its offers, for `min_reliability`")
    offers: tuple[SimulatedOffer, ...] = Field(default=(), description="what it rents out")
    plays: ReplayConfig | None = Field(default=None, description="further offers: those of a provider in `prices`")
    changes: tuple[OfferChange, ...] = Field(default=(), description="later prices and capacities")
    list_lag_seconds: float = Field(default=0.0, ge=0, description="real; how late its list shows starts and ends")
    interruptions_per_hour: float = Field(
        default=0.0, ge=0, description="how often a spot instance is taken away, per simulated hour"
    )
    taken_after_seconds: float | None = Field(
        default=None, ge=0, description="every spot instance is taken away so long after its boot, simulated"
    )
    notice_seconds: float | None = Field(default=None, ge=0, description="real; notice before that, none without it")
    interruptions: tuple[Interruption, ...] = Field(default=(), description="instances taken away at set moments")
    faults: tuple[FaultRule, ...] = Field(default=(), description="what goes wrong; the first rule that hits counts")

    @model_validator(mode="after")
    def _offers_are_named_once(self) -> SimulatedProviderConfig:
        types = [offer.instance_type for offer in self.offers]
        if twice := sorted({one for one in types if types.count(one) > 1}):
            raise ValueError(f"offers: expected each instance_type once, found twice: {', '.join(twice)}")
        named = [*(change.offer for change in self.changes), *(one.offer for one in self.interruptions if one.offer)]
        if types and (unknown := sorted(set(named) - set(types))):
            raise ValueError(f"changes, interruptions: expected offers among {types}, found {', '.join(unknown)}")
        return self


class SimulatedCloudConfig(_Strict):
    """All simulated providers of a home."""

    clock: float = Field(default=60.0, gt=0, le=100_000, description="simulated seconds per real second")
    seed: int = Field(default=0, description="same seed, same faults and interruptions")
    orphan_seconds: float = Field(
        default=120.0,
        gt=0,
        description="real; without a sign of life of the fleet for so long, instances end themselves",
    )
    model: SimulatedModel = Field(
        default=SimulatedModel(), description="size of a model of which nothing else is known"
    )
    models: dict[str, SimulatedModel] = Field(default={}, description="sizes of models by name; keys as in `model`")
    arguments: tuple[str, ...] = Field(
        default=(), description="further words for every engine simulator; `{name}` and `{home}` are filled in"
    )
    providers: tuple[SimulatedProviderConfig, ...] = Field(min_length=1, description="the providers that compete")

    @field_validator("providers")
    @classmethod
    def _names_differ(cls, providers: tuple[SimulatedProviderConfig, ...]) -> tuple[SimulatedProviderConfig, ...]:
        names = [provider.name for provider in providers]
        if len(set(names)) < len(names):
            raise ValueError(f"providers: expected a name of its own for each, found {', '.join(names)}")
        return providers

    def facts(self, model: str) -> tuple[ModelFacts, int]:
        """What is taken for true of a model, and its context in tokens."""
        found = self.models.get(model, self.model)
        return found.facts(model), found.max_model_len
