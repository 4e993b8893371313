"""fleet.yaml: which engines stand somewhere, which providers rent out machines, and how the fleet behaves."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gpu_runner.providers.here import LocalProviderConfig
from gpu_runner.providers.simulated.config import SimulatedCloudConfig
from gpu_runner.providers.simulated.default import default_cloud
from gpu_runner.small_pages import read_file
from resources.alerts import AlertConfig
from resources.pricing import PricingConfig

LARGEST_FILE = 1 << 20
EMBEDDED_IDLE_MINUTES = 0.1  # of a clock 60 times as fast as ours

VLLM_COMMAND = ["vllm", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"]


class FleetConfigError(Exception):
    """fleet.yaml is not what it should be."""


class EngineConfig(BaseModel):
    """One engine that may be leased, by one run at a time.

    `simulated` and `process` engines are started for a lease and ended with it; an `endpoint` runs already.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    kind: Literal["simulated", "process", "endpoint"]
    url: str | None = None
    command: list[str] = VLLM_COMMAND
    environment: dict[str, str] = {}
    api_key_env: str | None = None
    models: list[str] = Field(default=[], description="only for datasets of these models; empty: for all")
    max_num_seqs: int | None = Field(default=None, ge=1)
    start_seconds: float = Field(default=1800, gt=0, description="compiling a large model was seen to take 2,222 s")
    request_seconds: float = Field(default=1800, gt=0, description="longest that one row may take, queueing included")
    speed: float = Field(default=20.0, gt=0, description="simulated only: how much faster than the modelled GPU")
    arguments: list[str] = Field(default=[], description="simulated only: further arguments of gpu_runner.simulator")
    provider: str = "local"
    instance_type: str = "local"

    @model_validator(mode="after")
    def _endpoint_has_url(self) -> EngineConfig:
        if (self.kind == "endpoint") != (self.url is not None):
            raise ValueError("url: expected for kind endpoint, and for no other kind")
        if self.url is not None:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
                raise ValueError("url: expected http://host:port or https://host:port, without a user or password")
        return self


class FleetConfig(BaseModel):
    """What fleet.yaml holds: engines that stand there anyway, and providers of which instances are rented."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    engines: list[EngineConfig] = Field(default=[], description="engines that are taken before anything is rented")
    simulated: SimulatedCloudConfig | None = Field(default=None, description="providers that only play their machines")
    local: list[LocalProviderConfig] = Field(default=[], description="GPUs of this machine, a provider for each entry")
    prices: PricingConfig = Field(default=PricingConfig(), description="price sources, see `docs/pricing.md`")
    alerts: AlertConfig | None = Field(default=None, description="a webhook that hears of deadlines and budgets")
    max_instances: int = Field(default=20, ge=1, description="most instances at once, of all datasets together")
    idle_minutes: float = Field(default=10, ge=0, description="real; how long an instance waits for the next run")
    start_seconds: float = Field(
        default=1800,
        gt=0,
        description="how long a boot may take, by the provider's clock; never less than 60 real seconds or 3 × its "
        "offer's `boot_seconds`",
    )
    move_seconds: float = Field(default=30, gt=0, description="how often a run looks for a cheaper offer")

    @model_validator(mode="before")
    @classmethod
    def _default_cloud(cls, given: object) -> object:
        """A file that names no engine and no provider keeps the embedded simulated ones."""
        if isinstance(given, dict) and given and not given.keys() & {"engines", "simulated", "local"}:
            return {**given, "simulated": default_cloud()}
        return given

    @model_validator(mode="after")
    def _names_differ(self) -> FleetConfig:
        if not self.engines and not self.local and self.simulated is None:
            raise ValueError("engines: expected at least one of engines, simulated and local")
        names = [engine.name for engine in self.engines]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"engines: expected a name of its own for each, found twice: {', '.join(twice)}")
        providers = [one.name for one in self.local]
        providers += [one.name for one in self.simulated.providers] if self.simulated else []
        if twice := sorted({name for name in providers if providers.count(name) > 1}):
            raise ValueError(f"local: expected a name of its own for each provider, found twice: {', '.join(twice)}")
        return self

    @classmethod
    def embedded(cls) -> FleetConfig:
        """Three simulated providers that compete: what a newcomer has."""
        return cls(simulated=default_cloud(), idle_minutes=EMBEDDED_IDLE_MINUTES, move_seconds=2)

    def engines_for(self, model: str, endpoint: str | None) -> Sequence[EngineConfig]:
        """Engines that may serve the model, or the one at this address."""
        if endpoint:
            key = "BATCH_ASSETS_API_KEY" if os.environ.get("BATCH_ASSETS_API_KEY") else None
            address = re.sub(r"[^a-z0-9._-]+", "-", endpoint.split("://")[-1].lower()).strip("-._")
            own = EngineConfig(name=address[:63] or "endpoint", kind="endpoint", url=endpoint, api_key_env=key)
            return [own.model_copy(update={"provider": "endpoint", "instance_type": "endpoint"})]
        fitting = [engine for engine in self.engines if not engine.models or model in engine.models]
        if not fitting and self.simulated is None and not self.local:
            raise FleetConfigError(
                f"fleet.yaml: expected an engine that serves {model}, found engines for "
                f"{', '.join(sorted({model for engine in self.engines for model in engine.models}))}"
            )
        return fitting

    @classmethod
    def load(cls, path: Path) -> FleetConfig:
        """Read fleet.yaml. Raises FleetConfigError naming file, key, expected and found."""
        if not path.exists():
            if os.environ.get("BATCH_ASSETS_FLEET") == str(path):
                raise FleetConfigError(f"{path}: expected the file that BATCH_ASSETS_FLEET names, found none")
            return cls.embedded()
        try:
            found = cls.model_validate(yaml.safe_load(read_file(path, LARGEST_FILE).decode()))
            return found.model_copy(update={"prices": found.prices.below(path.parent)})
        except ValidationError as error:
            problems = "; ".join(_problem(found["loc"], found["msg"], found["input"]) for found in error.errors())
            raise FleetConfigError(f"{path}: {problems}") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)  # never the line itself: it may hold a secret
            where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
            said = getattr(error, "problem", None) or type(error).__name__
            raise FleetConfigError(f"{path}: {where}expected YAML, found: {said}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise FleetConfigError(f"{path}: expected YAML, found: {error}") from None


def _problem(keys: tuple[int | str, ...], said: str, found: object) -> str:
    """Key, expected and found. Of a part or a setting of an engine's environment only the type: it may be a secret."""
    plain = isinstance(found, str | int | float | bool) and not {"environment", "alerts"} & set(keys)
    shown = f"{found!r:.80}" if plain else type(found).__name__
    where = ".".join(map(str, keys))
    text = f"{said[0].lower()}{said[1:]}".removeprefix("value error, ")
    return f"{where + ': ' if where else ''}{text}" + (
        "" if text.startswith(("url", "engines", "local")) else f", found {shown}"
    )
