"""Everything that leans on Dagster's private modules, and nothing else does (ruff's TID251 refuses it elsewhere).

Dagster may change these without notice; tests/batch_assets/dagster_internals checks what we rely on. Here are names
that others may import. `daemon` runs Dagster's daemons for less processor time, with `kept_connections`,
`event_batches` and `server_ids`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._core.events import EVENT_TYPE_TO_PIPELINE_RUN_STATUS
from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus, PartitionBackfill
from dagster._core.launcher.base import CheckRunHealthResult, WorkerStatus
from dagster._core.scheduler.instigation import InstigatorType, SensorInstigatorData
from dagster._core.storage.event_log.base import EventLogStorage
from dagster._core.storage.event_log.schema import AssetEventTagsTable, AssetKeyTable, SqlEventLogStorageTable
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster._core.storage.tags import REPOSITORY_LABEL_TAG

if TYPE_CHECKING:
    import dagster as dg
    from dagster._core.workspace.context import WorkspaceProcessContext

__all__ = [
    "EVENT_TYPE_TO_PIPELINE_RUN_STATUS",
    "REPOSITORY_LABEL_TAG",
    "AssetEventTagsTable",
    "AssetKeyTable",
    "BulkActionStatus",
    "BulkActionsFilter",
    "CheckRunHealthResult",
    "DagsterUserCodeUnreachableError",
    "EventLogStorage",
    "InstigatorType",
    "PartitionBackfill",
    "SensorInstigatorData",
    "SqlEventLogStorage",
    "SqlEventLogStorageTable",
    "UnresolvedAssetJobDefinition",
    "WorkerStatus",
    "code_server",
    "component_folders",
    "daemon_heartbeats",
    "event_batches",
    "kept_connections",
    "process_end",
    "run_cancellation",
    "run_code_server_command",
    "schedule_times",
    "server_ids",
    "storages",
    "workspace_of",
]


def schedule_times(since: float, cron: str, zone: str) -> Iterator[datetime]:
    """The moments of a cron schedule from a Unix time on, in order, as Dagster's own schedules have them."""
    from dagster._utils.schedules import schedule_execution_time_iterator

    return schedule_execution_time_iterator(since, cron, zone, True)


def workspace_of(instance: dg.DagsterInstance, workspace: Path, version: str) -> WorkspaceProcessContext:
    """The code locations of a workspace file, for a webserver; a context manager."""
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget

    return WorkspaceProcessContext(instance, WorkspaceFileTarget([str(workspace)]), version=version)


def run_code_server_command() -> None:
    """`dagster code-server …` with the arguments of this process. Ends the process."""
    from dagster._cli.code_server import code_server_cli

    code_server_cli()
