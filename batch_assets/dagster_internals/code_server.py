"""Dagster's code server: how it starts the server that loads the definitions and its workers, and runs a job on it."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import dagster as dg

if TYPE_CHECKING:
    from dagster.components.core.component_tree import ComponentTree


class LocationError(Exception):
    """The code location is not loaded; says why, in the words of the code server where it has answered."""


class NotReached(LocationError):
    """The code server does not answer yet, or not any more."""


class WaitingServer(Protocol):
    """A process that is there already and waits for its arguments; otherwise like `subprocess.Popen`."""

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Let it serve. False when it cannot: another one is started then."""
        ...


def serve_definitions_by(module: str, first: WaitingServer | None) -> None:
    """Let the code server of this process start `python -m MODULE` in place of `python -m dagster` as the server that
    loads the definitions. It gets the same arguments. The first time, `first` gets them, if there is one."""
    from dagster._grpc import server

    start = vars(server)["open_ipc_subprocess"]

    def start_server(parts: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
        prefix = [sys.executable, "-m", module]
        if first and [*parts[:3]] == prefix and options == {"cwd": None} and first.begin(parts[3:], env):
            return first
        return start(parts, env=env, **options)

    _replace(server, "open_ipc_subprocess", start_server)

    def entry_point(executable: str) -> list[str]:
        return [executable or sys.executable, "-m", module]

    _replace(server, "get_python_environment_entry_point", entry_point)


def start_workers_from(context: BaseContext) -> None:
    """Let the server of this process start its run workers by this context of `multiprocessing`, not by "spawn"."""
    from dagster._grpc.server import DagsterApiServer

    original = DagsterApiServer.__init__

    @functools.wraps(original)
    def begin(server: DagsterApiServer, *arguments: Any, **options: Any) -> None:
        original(server, *arguments, **options)
        _replace(server, "_mp_ctx", context)

    DagsterApiServer.__init__ = begin  # type: ignore[assignment,method-assign]


_types_left_out = False


def leave_out_component_types() -> None:
    """Let this process load a folder of definitions without describing every component type that is installed.

    Dagster imports them all for that, boto3 with those of dagster-aws, and writes JSON schemas and examples, each time
    that the definitions are loaded: nine tenths of the time. Ours is not among them. It imports them once more to name
    the components that are in use: of these, the modules are imported already.
    """
    global _types_left_out
    if _types_left_out:
        return
    _types_left_out = True
    from dagster.components.core import load_defs, package_entry

    found = package_entry.get_plugin_entry_points

    def imported() -> Sequence[EntryPoint]:
        return [entry for entry in found() if entry.module in sys.modules]

    def without(tree: ComponentTree | None) -> dg.Definitions:
        return dg.Definitions(component_tree=tree)

    _replace(load_defs, "get_library_json_enriched_defs", without)
    _replace(package_entry, "get_plugin_entry_points", imported)


def answers(socket: Path) -> bool:
    """Whether the code server at this socket has loaded its code, or has failed to."""
    from dagster._core.errors import DagsterUserCodeUnreachableError
    from dagster._grpc.client import DagsterGrpcClient

    if not socket.exists():
        return False
    try:
        DagsterGrpcClient(socket=str(socket)).ping("")
    except DagsterUserCodeUnreachableError:
        return False
    return True


def is_unreachable(class_name: str | None) -> bool:
    """Whether an error that Dagster has written down says that the code server does not answer, by its class's name.

    Dagster keeps of an error only its class's name, its text and its stack (dagster_shared/error.py).
    """
    from dagster._core.errors import DagsterUserCodeUnreachableError, DagsterUserCodeUnreachableTimeoutError

    return class_name in (DagsterUserCodeUnreachableError.__name__, DagsterUserCodeUnreachableTimeoutError.__name__)


def launch(
    instance: dg.DagsterInstance,
    workspace: Path,
    names: tuple[str, str],
    job: str,
    tags: Mapping[str, str],
    run_config: Mapping[str, Any],
) -> str:
    """Queue a run of a job, as `dagster job launch` does, and return its run id: no webserver is needed.

    `names`: of the code location and of its repository. Raises NotReached and LocationError.
    """
    from dagster._cli.job import _create_run
    from dagster._core.errors import DagsterUserCodeUnreachableError
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget

    with warnings.catch_warnings(), contextlib.ExitStack() as opened:
        warnings.simplefilter("ignore")  # that the location could not be loaded: it is an error of ours
        process = opened.enter_context(WorkspaceProcessContext(instance, WorkspaceFileTarget([str(workspace)])))
        context = process.create_request_context()
        entry = context.get_location_entry(names[0])
        if entry is None or entry.code_location is None:
            failed = entry.load_error if entry is not None else None
            if failed is not None and is_unreachable(failed.cls_name):
                raise NotReached(failed.message)
            raise LocationError(failed.message if failed is not None else "it is not in the workspace")
        repository = entry.code_location.get_repository(names[1])
        found = repository.get_full_job(job)
        try:
            run = _create_run(instance, entry.code_location, repository, found, run_config, tags, None, None)
        except DagsterUserCodeUnreachableError as error:
            raise NotReached(str(error)) from None
        return instance.submit_run(run.run_id, context).run_id


def _replace(owner: object, name: str, value: object) -> None:
    """Set an attribute that is there. Raises AttributeError when Dagster calls it otherwise now."""
    getattr(owner, name)
    setattr(owner, name, value)


def serve_definitions() -> None:
    """What `python -m dagster` does with the arguments of this process."""
    from dagster._cli import main

    main()  # type: ignore[no-untyped-call]
