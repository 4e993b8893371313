"""What is wrong in a dataset's YAML: one error for all wrong places, each in the words of `resources.yaml_errors`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from gpu_runner.errors import ExitStatus, UserFacingError
from resources.yaml_errors import Problem, Unusable, model_at, near_miss, nearest, problems_of, show

__all__ = ["Problem", "SpecError", "Unusable", "explain", "model_at", "near_miss", "nearest", "show"]

MAX_PROBLEM = 1000


class SpecError(UserFacingError):
    """A dataset's YAML cannot be used as it is. `problems` holds every wrong place."""

    exit_status = ExitStatus.WRONG_REQUEST

    def __init__(self, file: str | Path, problems: Sequence[Problem]) -> None:
        self.file = str(file)
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        texts = [str(problem) for problem in self.problems]
        lines = "\n".join(f"  {text if len(text) <= MAX_PROBLEM else text[:MAX_PROBLEM] + '…'}" for text in texts)
        super().__init__(f"{self.file}: {count} in the attributes of this dataset\n{lines}")


def explain(error: ValidationError, model: type[BaseModel], data: object, file: str | Path) -> SpecError:
    """One SpecError for all that pydantic found wrong in `data`."""
    return SpecError(file, problems_of(error, model, data))
