"""Names under which models can be asked for, and engines that are kept for them: `models.yaml` in DAGSTER_HOME."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpu_runner.errors import ExitStatus, UserFacingError
from resources.yaml_files import read_settings

FILE = "models.yaml"
MOST_ENTRIES = 10_000

Name = Annotated[str, Field(min_length=1, max_length=256)]


class ModelSettingsError(UserFacingError):
    """The file of models cannot be used."""

    exit_status = ExitStatus.WRONG_REQUEST


class ModelSettings(BaseModel):
    """`aliases`: the model behind a name. `reserve`: engines of a model that stay leased, also without work."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    aliases: dict[Name, Name] = Field(default={}, max_length=MOST_ENTRIES)
    reserve: dict[Name, Annotated[int, Field(ge=0, le=1000, strict=True)]] = Field(default={}, max_length=MOST_ENTRIES)

    @model_validator(mode="after")
    def _one_step(self) -> ModelSettings:
        for alias, model in self.aliases.items():
            if model in self.aliases:
                raise ValueError(f"aliases.{alias[:80]}: expected a model, found the alias {model[:80]!r}")
        for model in self.reserve:
            if model in self.aliases:
                raise ValueError(f"reserve.{model[:80]}: expected a model, found an alias")
        return self

    def resolve(self, name: str) -> str:
        """The model behind a name; a name that is no alias stands for itself."""
        return self.aliases.get(name, name)


def read_model_settings(path: Path) -> ModelSettings:
    """The settings of a file, none where there is no file. Raises ModelSettingsError."""
    return read_settings(path, ModelSettings, ModelSettingsError)
