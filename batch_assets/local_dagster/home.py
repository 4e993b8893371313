"""The home of a Dagster on this machine: its folders, its storage, and the stack that runs there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batch_assets import file_permissions, settings
from batch_assets.local_dagster.loopback import keep_loopback_direct
from gpu_runner.errors import ExitStatus, UserFacingError

if TYPE_CHECKING:
    import dagster as dg


class StackError(UserFacingError):
    """Dagster could not be started, or another stack holds this DAGSTER_HOME."""

    exit_status = ExitStatus.WRONG_REQUEST


@dataclass(frozen=True, slots=True)
class StackAddress:
    """Where a running stack answers."""

    url: str
    port: int
    pid: int


UNFINISHED_RESTORE = "restore.unfinished"  # while the databases of a home are being put back


def refuse_unfinished_restore(home: Path) -> None:
    """Raise StackError when a restore of this home was begun and has not come to its end."""
    with contextlib.suppress(FileNotFoundError):
        backup = (home / UNFINISHED_RESTORE).read_text(errors="replace").strip()
        raise StackError(
            f"{home}: expected whole databases, found that the restore of backup {backup:.60} has not come to its end: "
            f"`batch-assets restore --backup {backup:.60}` does it again"
        )


def prepare_home() -> Path:
    """DAGSTER_HOME with a dagster.yaml in it; a file that is there already is left as it is. Raises AccessError."""
    home = settings.dagster_home()
    file_permissions.make_private(home)
    os.environ["DAGSTER_HOME"] = str(home)
    keep_loopback_direct(os.environ)
    if not (home / "dagster.yaml").exists():
        shutil.copyfile(settings.PROJECT / "deploy" / "local" / "dagster.yaml", home / "dagster.yaml")
    return home


def prepare_store() -> None:
    """The store's folder, for its user or the group only; one that is there already is left as it is, and named.

    Raises StackError.
    """
    scheme, _, path = settings.store_root().rpartition("://")
    if scheme not in ("", "file"):
        return
    folder = Path(path).expanduser().resolve()
    try:
        if not folder.exists():
            file_permissions.make_private(folder)
        elif said := file_permissions.too_wide(folder):
            sys.stderr.write(f"{said}\n")
    except (OSError, file_permissions.AccessError) as error:
        raise StackError(f"the store cannot be made: {error}") from None


def ensure_storage(home: Path) -> None:
    """Create Dagster's tables, once and by one process.

    Processes that open a new home at the same moment leave it unusable ("alembic_version has more than one head").
    """
    refuse_unfinished_restore(home)
    mark = home / "storage.ready"
    with (home / "storage.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.exists():
            return
        import dagster as dg

        from batch_assets.dagster_internals.storages import make_missing_tables

        with _synced_at_the_end(home), dg.DagsterInstance.from_config(str(home)) as instance:
            make_missing_tables(instance)
            instance.get_runs_count()
            instance.all_asset_keys()
            instance.all_instigator_state()
        mark.touch()


@contextlib.contextmanager
def _synced_at_the_end(home: Path) -> Iterator[None]:
    """SQLite files of Dagster that the body makes in this process are written to the disk once, not after every table.

    Other databases of the home are not touched. Closing a file lets all locks go that this process has on it, and a
    database that we have open for something else would be changed beside others' locks
    (https://www.sqlite.org/howtocorrupt.html, section 2.2).
    """
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def do_not_wait(connection: object, _: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", do_not_wait)
    try:
        yield
    finally:
        event.remove(Engine, "connect", do_not_wait)
    made = [home / folder for folder in ("history", "schedules")]
    for file in (path for folder in made for suffix in ("db", "db-wal") for path in folder.rglob(f"*.{suffix}")):
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())


def storage_is_shared(home: Path) -> bool:
    """Whether dagster.yaml names a database server, so that a Dagster on another computer may use the same one."""
    from resources import yaml_files

    try:
        found = yaml_files.load(yaml_files.read_text(home / "dagster.yaml"))
    except (OSError, yaml_files.YamlProblem):
        return False  # Dagster itself says what is wrong with it
    storage = found.get("storage") if isinstance(found, dict) else None
    return isinstance(storage, dict) and "sqlite" not in storage


def dagster_runs(home: Path, instance: dg.DagsterInstance) -> bool:
    """Whether a Dagster works on this home: one of its own, or a daemon elsewhere that shares its database."""
    if running_stack(home) is not None:
        return True
    if not storage_is_shared(home):
        return False
    from batch_assets.dagster_internals.daemon_heartbeats import INTERVAL_SECONDS, last_heartbeat

    beat = last_heartbeat(instance)
    return beat is not None and time.time() - beat < 3 * INTERVAL_SECONDS


def refuse_second_daemon(
    home: Path, *, sleep: Callable[[float], object] = time.sleep, now: Callable[[], float] = time.time
) -> None:
    """Raise StackError when a daemon of another computer or container works on the database of this home.

    Two daemons would launch, retry and publish side by side. A heartbeat that is recent may be the last one of a daemon
    that has ended; so a newer one is awaited, for one interval and a half. For a home with tables in it.
    """
    if not storage_is_shared(home):
        return
    import dagster as dg

    from batch_assets.dagster_internals.daemon_heartbeats import INTERVAL_SECONDS, last_heartbeat

    with dg.DagsterInstance.from_config(str(home)) as instance:
        first = last_heartbeat(instance)
        if first is None or now() - first > 3 * INTERVAL_SECONDS:
            return
        for _ in range(int(1.5 * INTERVAL_SECONDS)):
            sleep(1.0)
            if last_heartbeat(instance) != first:
                raise StackError(
                    f"expected no other Dagster on the database that {home}/dagster.yaml names, found a daemon at work "
                    "there: start datasets in its UI, or end it first"
                )


def running_stack(home: Path) -> StackAddress | None:
    """The stack that holds this home now, or None."""
    path = home / "stack.lock"
    if not path.exists():
        return None
    with path.open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with contextlib.suppress(ValueError, TypeError):
                return StackAddress(**json.loads(lock.read(ANSWER_BYTES)))
            return None
    return None


# Never `logs`: dagster-webserver uploads whatever lies in DAGSTER_HOME/logs, also when telemetry is off
# (dagster_webserver/cli.py, dagster/_core/telemetry_upload.py).
LOGS = "process_logs"
ANSWER_BYTES = 16 << 20
