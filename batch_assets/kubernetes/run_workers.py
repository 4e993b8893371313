"""What a run worker gets of CPU and memory, by the size of its range: the file that BATCH_ASSETS_RUN_WORKERS names.

- {batches: 40, cpu: 500m, memory: 1Gi}      # ranges of up to 40 batches
- {batches: 400, cpu: "1", memory: 2Gi}
- {cpu: "2", memory: 4Gi}                    # all larger ones

It is read and checked when the definitions are loaded. Dagster would find a mistake only when a run is started: the
run fails, and is retried with the same mistake. Runs get it by the tag `dagster-k8s/config`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from batch_assets.tags import K8S_CONFIG_TAG
from gpu_runner.errors import ExitStatus, UserFacingError
from gpu_runner.providers.kubernetes.config import QUANTITY
from resources.yaml_files import YamlProblem, load, read_text

LARGEST_FILE = 64 << 10
MOST_SIZES = 20


class RunWorkersError(UserFacingError):
    """The file is not what it should be."""

    exit_status = ExitStatus.WRONG_REQUEST


class WorkerSize(BaseModel):
    """A run worker for ranges of up to `batches` batches; None: of any size. Memory is a limit, too."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    batches: int | None = Field(default=None, ge=1)
    cpu: str = Field(pattern=QUANTITY)
    memory: str = Field(pattern=QUANTITY)

    def tags(self) -> dict[str, str]:
        """The tag by which dagster-k8s sets them; merged into what the run launcher is configured with."""
        resources = {"requests": {"cpu": self.cpu, "memory": self.memory}, "limits": {"memory": self.memory}}
        return {K8S_CONFIG_TAG: json.dumps({"container_config": {"resources": resources}}, sort_keys=True)}


@dataclass(frozen=True, slots=True)
class WorkerSizes:
    """Smallest first; without any, a run gets what the run launcher is configured with."""

    sizes: tuple[WorkerSize, ...] = ()

    def tags(self, batches: int) -> dict[str, str]:
        """Tags of a run over so many batches."""
        fitting = (size for size in self.sizes if size.batches is None or batches <= size.batches)
        return found.tags() if (found := next(fitting, None)) is not None else {}


def read_worker_sizes(file: Path | None) -> WorkerSizes:
    """Read the file. Raises RunWorkersError that names the place."""
    if file is None:
        return WorkerSizes()
    expected = "expected a list of {batches, cpu, memory}"
    try:
        found = load(read_text(file, LARGEST_FILE))
        sizes = TypeAdapter(tuple[WorkerSize, ...]).validate_python(tuple(found) if isinstance(found, list) else found)
    except OSError as error:
        raise RunWorkersError(f"{file}: {expected}: {error.strerror or error}") from None
    except YamlProblem as error:
        raise RunWorkersError(f"{file}: {expected}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise RunWorkersError(f"{file}: {where}: {expected}: {first['msg']}") from None
    limits = [size.batches for size in sizes]
    bounds = [limit for limit in limits if limit is not None]
    if not sizes or len(sizes) > MOST_SIZES or limits[-1] is not None or len(bounds) != len(sizes) - 1:
        raise RunWorkersError(f"{file}: expected 1 to {MOST_SIZES} sizes, `batches` in all but the last")
    if bounds != sorted(set(bounds)):
        raise RunWorkersError(f"{file}: expected `batches` to grow from line to line, found {bounds}")
    return WorkerSizes(sizes)
