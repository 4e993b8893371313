"""States of sensors in an instance, as the daemon writes them."""

from __future__ import annotations

from dagster._core.remote_origin import (
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    InstigatorType,
    SensorInstigatorData,
)
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin


def state_of(name: str, **data: object) -> InstigatorState:
    location = ManagedGrpcPythonEnvCodeLocationOrigin(LoadableTargetOrigin(module_name="m"))
    origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(location, "r"), name)
    return InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.RUNNING, SensorInstigatorData(**data))  # type: ignore[arg-type]
