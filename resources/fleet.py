"""The fleet as a Dagster resource: a run asks for an engine that serves its model, and gives it back.

What there is to lease stands in `fleet.yaml` (`FleetConfig`). Without one there is a single embedded engine: the
simulator, as a child process of the run, so that everything works on a machine without a GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import dagster as dg
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gpu_runner.fleet import FleetBook, Lease
from gpu_runner.heart import Heart
from gpu_runner.providers.local import EngineProcess, EngineStartError, wait_reachable
from gpu_runner.rows import Task

__all__ = [
    "EngineConfig",
    "EngineStartError",
    "FleetConfig",
    "FleetConfigError",
    "GpuFleet",
    "LeasedEngine",
    "Requirement",
]

ENDPOINT_SECONDS = 600.0
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
    """What fleet.yaml holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    engines: list[EngineConfig] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> FleetConfig:
        names = [engine.name for engine in self.engines]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"engines: expected a name of its own for each, found twice: {', '.join(twice)}")
        return self

    @classmethod
    def embedded(cls) -> FleetConfig:
        """One simulated engine: what a newcomer has."""
        engine = EngineConfig(
            name="embedded", kind="simulated", max_num_seqs=256, provider="simulated", instance_type="simulated-h200"
        )
        return cls(engines=[engine])

    @classmethod
    def load(cls, path: Path) -> FleetConfig:
        """Read fleet.yaml. Raises FleetConfigError naming file, key, expected and found."""
        if not path.exists():
            if os.environ.get("BATCH_ASSETS_FLEET") == str(path):
                raise FleetConfigError(f"{path}: expected the file that BATCH_ASSETS_FLEET names, found none")
            return cls.embedded()
        try:
            return cls.model_validate(yaml.safe_load(path.read_text()))
        except ValidationError as error:
            problems = "; ".join(_problem(found["loc"], found["msg"], found["input"]) for found in error.errors())
            raise FleetConfigError(f"{path}: {problems}") from None
        except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
            raise FleetConfigError(f"{path}: expected YAML, found: {error}") from None


def _problem(keys: tuple[int | str, ...], said: str, found: object) -> str:
    """Key, expected and found. Of a part or a setting of an engine's environment only the type: it may be a secret."""
    plain = isinstance(found, str | int | float | bool) and "environment" not in keys
    shown = f"{found!r:.80}" if plain else type(found).__name__
    where = ".".join(map(str, keys))
    text = f"{said[0].lower()}{said[1:]}".removeprefix("value error, ")
    return f"{where + ': ' if where else ''}{text}" + (
        "" if text.startswith(("url", "engines")) else f", found {shown}"
    )


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a run needs: an engine that serves `model` for `task`, or exactly the one at `endpoint`."""

    dataset: str
    model: str
    task: Task
    endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class LeasedEngine:
    """An engine that is ours now. `epoch` fences everything written in its name."""

    name: str
    endpoint: str
    api_key: str | None
    max_num_seqs: int | None
    provider: str
    instance_type: str
    spot: bool
    epoch: int
    request_seconds: float = 1800


class GpuFleet(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Leases engines. `database` is a SQLAlchemy URL; `home` keeps engine logs."""

    database: str
    home: str
    config_path: str
    ttl: float = 10.0
    beat: float = 2.0

    @contextlib.contextmanager
    def open_book(self) -> Iterator[FleetBook]:
        """The fleet's tables, for as long as the body runs."""
        book = FleetBook(self.database)
        try:
            yield book
        finally:
            book.close()

    def heart(self, book: FleetBook, run_id: str) -> Heart:
        """The heartbeat of one run."""
        return Heart(book, run_id, ttl=self.ttl, interval=self.beat)

    @contextlib.contextmanager
    def alive(self, run_id: str, dataset: str, doing: str) -> Iterator[FleetBook]:
        """Beat for a run that leases nothing, so that the watchdog finds it too when its worker is gone."""
        with self.open_book() as book:
            heart = self.heart(book, run_id)
            heart.note = doing
            with heart.beating(dataset, "", ""):
                yield book

    def engines(self, need: Requirement) -> list[EngineConfig]:
        """Engines that may serve the requirement. Raises FleetConfigError when there is none."""
        if need.endpoint:
            key = "BATCH_ASSETS_API_KEY" if os.environ.get("BATCH_ASSETS_API_KEY") else None
            address = re.sub(r"[^a-z0-9._-]+", "-", need.endpoint.split("://")[-1].lower()).strip("-._")
            own = EngineConfig(name=address[:63] or "endpoint", kind="endpoint", url=need.endpoint, api_key_env=key)
            return [own.model_copy(update={"provider": "endpoint", "instance_type": "endpoint"})]
        engines = FleetConfig.load(Path(self.config_path)).engines
        fitting = [engine for engine in engines if not engine.models or need.model in engine.models]
        if not fitting:
            raise FleetConfigError(
                f"{self.config_path}: expected an engine that serves {need.model}, found engines for "
                f"{', '.join(sorted({model for engine in engines for model in engine.models}))}"
            )
        return fitting

    @contextlib.contextmanager
    def lease(
        self,
        need: Requirement,
        book: FleetBook,
        heart: Heart,
        *,
        say: Callable[[str], None] = lambda _: None,
        pause: Callable[[float], None] = time.sleep,
    ) -> Iterator[LeasedEngine]:
        """Wait, visibly, for a free engine; hold it while the body runs; give it back once.

        `say` hears what is waited for, once per reason. Calls `pause` in steps of at most half a second. Raises
        FleetConfigError, EngineStartError when an engine does not come up, and RunEnded for a run declared dead.
        """
        engines = self.engines(need)

        def note(text: str) -> None:
            if text != heart.note:
                heart.note = text
                say(text)

        while True:
            asked_at = heart.now()
            held, waits_for = self._try_engines(engines, need, book, heart.run_id)
            if held is not None:
                break
            note(waits_for)
            pause(0.5)
        engine, lease = held
        try:
            heart.hold(lease, asked_at)
            note(f"starting {engine.name}" if engine.url is None else f"waiting for {engine.url}")
            with self._running(engine, need, heart.run_id, pause) as endpoint:
                heart.note = f"on {engine.name}"
                yield _leased(engine, endpoint, lease.epoch)
        finally:
            heart.let_go()
            book.release(lease)

    def _try_engines(
        self, engines: Sequence[EngineConfig], need: Requirement, book: FleetBook, run_id: str
    ) -> tuple[tuple[EngineConfig, Lease] | None, str]:
        """The first engine that is free, with its lease; or None, and what stands in the way."""
        limit = max(1, book.instances(need.dataset))
        for engine in engines:
            if lease := book.try_lease(engine.name, run_id, need.dataset, self.ttl, limit=limit):
                return (engine, lease), ""
        if book.leases_of(need.dataset) >= limit:
            return None, f"waiting: {need.dataset} already holds all instances it may lease"
        notes = [f"{engine.name} is held by run {book.holder(engine.name)}" for engine in engines]
        return None, "waiting: " + ", ".join(notes)

    @contextlib.contextmanager
    def _running(
        self, engine: EngineConfig, need: Requirement, run_id: str, pause: Callable[[float], None]
    ) -> Iterator[str]:
        if engine.kind == "endpoint":
            assert engine.url is not None
            wait_reachable(engine.url, min(engine.start_seconds, ENDPOINT_SECONDS), pause)
            yield engine.url
            return
        process = EngineProcess(
            _simulator_command(engine) if engine.kind == "simulated" else engine.command,
            model=need.model,
            log=Path(self.home) / "engines" / f"{engine.name}-{run_id[:8]}.log",
            environment={"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120", **engine.environment},
        )
        with contextlib.closing(process):
            process.wait_ready(engine.start_seconds, pause)
            yield process.endpoint


def _simulator_command(engine: EngineConfig) -> list[str]:
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "{model}", "--port", "{port}"]
    command += ["--max-num-seqs", str(engine.max_num_seqs or 256), "--speed", str(engine.speed)]
    return command + engine.arguments


def _leased(engine: EngineConfig, endpoint: str, epoch: int) -> LeasedEngine:
    return LeasedEngine(
        name=engine.name,
        endpoint=endpoint,
        api_key=os.environ.get(engine.api_key_env) if engine.api_key_env else None,
        max_num_seqs=engine.max_num_seqs,
        provider=engine.provider,
        instance_type=engine.instance_type,
        spot=False,
        epoch=epoch,
        request_seconds=engine.request_seconds,
    )
