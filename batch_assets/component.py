"""The component `batch_assets.GeneratedDataset`: a defs.yaml becomes a dataset's assets, checks, jobs and schedule."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import dagster as dg
from pydantic import BaseModel, ConfigDict, Field

from batch_assets.catalog import ledger
from batch_assets.catalog.publications import publish_job
from batch_assets.dagster_internals import UnresolvedAssetJobDefinition
from batch_assets.orchestration.assets import (
    dead_letters_asset,
    export_asset,
    judged_asset,
    passed_asset,
    prompts_asset,
    rows_asset,
    table_asset,
)
from batch_assets.orchestration.automation import refresh_automation
from batch_assets.orchestration.source_assets import source_asset
from batch_assets.spec.chain import ChainError, steps_to
from batch_assets.spec.defs_files import file_in
from batch_assets.spec.discovery import external_defs, spec_in
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import GeneratedDatasetSpec, OutputSpec, load_spec
from batch_assets.spec.scaffold import chain_attributes, document_text, first_attributes
from batch_assets.tags import REDRIVE_TAG, REFRESH_TAG, UPSTREAM_TAG
from gpu_runner.rows import POOLED


class Attributes(BaseModel):
    """The `attributes:` of a defs.yaml. Its JSON schema is the spec's; `load_spec` checks it, with errors of ours."""

    model_config = ConfigDict(extra="allow")

    @classmethod
    def model_json_schema(cls, *_: Any, **__: Any) -> dict[str, Any]:
        """What `dg check yaml` and an editor check a defs.yaml against."""
        schema: dict[str, Any] = without_null(GeneratedDatasetSpec.model_json_schema())
        schema["required"] = ["name", "model"]  # `judge` stands for a source and a prompt
        return schema


def without_null(schema: Any) -> Any:
    """A JSON schema in which `anyOf: [X, null]` is X: a validator then names what is wrong inside X."""
    if isinstance(schema, list):
        return [without_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    options = schema.get("anyOf")
    if isinstance(options, list) and {"type": "null"} in options and len(options) == 2:
        inner = next(option for option in options if option != {"type": "null"})
        schema = {**inner, **{key: value for key, value in schema.items() if key != "anyOf"}}
        if schema.get("default", "") is None:
            del schema["default"]
    return {key: without_null(value) for key, value in schema.items()}


class ScaffoldParams(BaseModel):
    """Options of `dg scaffold defs batch_assets.GeneratedDataset NAME`."""

    chain: bool = Field(default=False, description="Three datasets in one file, each of which reads the one before.")


class Scaffolder(dg.Scaffolder[ScaffoldParams]):
    """Writes a defs.yaml that loads. `dg` knows the project's own folder alone."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        if (folder := external_defs()) is not None:
            with contextlib.suppress(OSError):
                Path(request.target_path).rmdir()  # `dg` has made it
            sys.exit(
                f"`dg scaffold` writes into this project, but datasets are read from BATCH_ASSETS_DEFS={folder}: "
                "`batch-assets new NAME` writes there"
            )
        name = "".join(c if c.isalnum() else "_" for c in Path(request.target_path).name.lower())
        if request.params.chain:
            (Path(request.target_path) / "defs.yaml").write_text(document_text(chain_attributes(name)))
        else:
            dg.scaffold_component(request, first_attributes(name))


@dg.scaffold_with(Scaffolder)
class GeneratedDataset(dg.Component):
    """A dataset that an LLM writes: source, 250-row batches, ledger, one published table.

    Declared by `attributes` in a defs.yaml; see docs/datasets.md for every key.
    """

    def __init__(self, spec: GeneratedDatasetSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        return Attributes

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        """The file is read again: Dagster's loader reads words by YAML 1.1, in which `no` is false."""
        place = context.component_path
        folder, number = Path(context.path), place.instance_key if place is not None else None
        if (file := file_in(folder)) is not None and isinstance(number, int):
            return cls(spec_in(file, number), folder)
        written = attributes.model_dump() if attributes is not None else {}
        return cls(load_spec(written, folder / "defs.yaml"), folder)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        return dataset_definitions(self.spec, self.folder)


def dataset_definitions(spec: GeneratedDatasetSpec, folder: Path, broken: SpecError | None = None) -> dg.Definitions:
    """Everything Dagster knows of one dataset, whose defs.yaml lies in `folder`. Touches no store and no database.

    `broken`: what is wrong with that file now, when `spec` is what was last known: then the source is not read again.
    """
    prompts, rows = prompts_asset(spec, spec_version(spec), folder, broken), rows_asset(spec, folder)
    table, dead = table_asset(spec, folder), dead_letters_asset(spec)
    made = [judged_asset(spec)] if spec.judge is not None else []
    made += [passed_asset(spec, folder)] if spec.rules is not None else []
    made += [export_asset(spec, export, folder) for export in spec.exports]
    refresh = dg.define_asset_job(
        f"{spec.name}_refresh",
        selection=dg.AssetSelection.assets(prompts.key),
        tags={REFRESH_TAG: spec.name},
        description="Read the source; what changed is then generated and published by itself.",
    )
    redrive = dg.define_asset_job(
        f"{spec.name}_redrive",
        selection=dg.AssetSelection.assets(dead.key),
        tags={REDRIVE_TAG: spec.name},
        description="List the dead letters; they alone are then tried again, and the table is published anew.",
    )
    publish = dg.define_asset_job(
        publish_job(spec.name),
        selection=dg.AssetSelection.assets(table.key, dead.key, *(one.key for one in made)),
        description="Compact the current batches into the table. The publisher starts it when a snapshot is complete.",
    )
    schedules = []
    if spec.schedule:
        schedules.append(
            dg.ScheduleDefinition(
                name=f"{spec.name}_refresh_schedule",
                job=refresh,
                cron_schedule=spec.schedule,
                execution_timezone=spec.timezone,
                default_status=dg.DefaultScheduleStatus.RUNNING,
                description=f"Refreshes {spec.name}: reads its source; what changed is then generated and published.",
            )
        )
    return dg.Definitions(
        assets=[source_asset(spec, folder), prompts, rows, table, dead, *made],
        jobs=[refresh, redrive, publish],
        schedules=schedules,
        sensors=refresh_automation(spec),
    )


def chain_jobs(specs: Mapping[str, GeneratedDatasetSpec]) -> list[UnresolvedAssetJobDefinition]:
    """For each dataset that reads the table of another one, the job that brings it and all before it up to date.

    `specs`: all datasets; where they read each other in a circle there is none.
    """
    found = []
    for name in sorted(specs):
        try:
            first, *others = steps_to(specs, name)
        except ChainError:
            continue
        if others:
            found.append(
                dg.define_asset_job(
                    f"{name}_refresh_upstream",
                    selection=dg.AssetSelection.assets(ledger.prompts_key(first)),
                    tags={REFRESH_TAG: first, UPSTREAM_TAG: specs[name].accepted_by},
                    description=f"Refresh {', '.join([first, *others])}, one after the other: each when the table that "
                    "it reads is published. The tags `batch/deadline` and `batch/budget_usd` are those of the whole.",
                )
            )
    return found


def spec_version(spec: GeneratedDatasetSpec) -> str:
    """Code version of `prompts`: changes with all that shapes the rows, so that an edited spec shows as stale."""
    shaping = {"source", "task", "prompt", "model", "sampling", "output", "id", "keep_columns", "dedupe", "batch_rows"}
    fields, first = OutputSpec.model_fields, {"json_schema", "repair_tries"}
    unsaid = {name for name in fields.keys() - first if getattr(spec.output, name) == fields[name].default}
    unsaid |= {"columns"}  # of the table, not of the rows
    new = {"system_from", "examples", "messages_from", "turns", "turns_from", "user_model", "images", "audio"}
    new |= {"query", "document", "documents_from"}
    unasked: dict[str, Any] = {name: True for name in new if getattr(spec.prompt, name) is None}
    unasked.setdefault("user_model", {"engine"})  # where it is asked, not what
    columns = {name for name in ("tools_from", "tool_choice_from") if getattr(spec.sampling, name) is None}
    unsaid_keys: dict[str, Any] = {"output": unsaid, "prompt": unasked, "sampling": columns}
    written = spec.model_dump_json(include=shaping, exclude=unsaid_keys)
    if spec.samples > 1:
        written += f"samples: {spec.samples}"
    if spec.task not in POOLED and spec.sampling.limits_tokens and spec.sampling.max_tokens is None:
        written += "max_tokens: null"  # a key that is null looks as one that is left out
    user = spec.prompt.user_model
    if user is not None and user.sampling.limits_tokens and user.sampling.max_tokens is None:
        written += "user_model.sampling.max_tokens: null"
    return hashlib.sha256(written.encode()).hexdigest()[:16]
