"""A PostgreSQL server of its own for one benchmark or test, from the distribution's binaries, on loopback.

PostgreSQL refuses to run as root: under root it runs as the user `postgres`, which the distribution's package creates.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_runner.providers.engine_process import free_port

START_SECONDS = 30.0
USER = "postgres"
NOT_DURABLE = ["fsync", "synchronous_commit", "full_page_writes", "autovacuum"]


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running server; its folder is gone when it ends."""

    port: int
    password: str
    pid: int
    folder: Path

    def url(self, database: str = "postgres") -> str:
        """SQLAlchemy URL, with the driver that dagster-postgres installs."""
        return f"postgresql+psycopg2://{USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def dagster_storage(self, database: str = "postgres") -> dict[str, Any]:
        """The `storage` block of dagster.yaml."""
        return {"postgres": {"postgres_url": self.url(database)}}


def binaries() -> Path | None:
    """Folder of the newest installed server, or None."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if on_path := shutil.which("postgres"):
        found.append(Path(on_path).resolve().parent)
    return max(found, key=_version, default=None)


def why_not() -> str:
    """Why no server can be started here, or ""."""
    if binaries() is None:
        return "needs PostgreSQL: apt-get install postgresql"
    if os.geteuid() == 0 and _system_user() is None:
        return f"needs the system user {USER!r}: PostgreSQL does not run as root"
    return ""


@contextlib.contextmanager
def postgres(*, durable: bool = True, settings: Sequence[str] = ()) -> Iterator[PostgresServer]:
    """A server for as long as the body runs. Not `durable`: without what survives a power cut, for tests. `settings`:
    further ones, `name=value`.

    Tests connect thousands of times, so a password is proved to theirs by MD5: by SCRAM that takes 5 ms of CPU.
    """
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # short: a socket's path holds 107 characters
    process: subprocess.Popen[bytes] | None = None
    try:
        password, port = secrets.token_hex(16), free_port()
        create(folder, password, authentication="scram-sha-256" if durable else "md5")
        off = [] if durable else [f"{setting}=off" for setting in NOT_DURABLE]
        process = start(folder, port, *off, *settings)
        yield PostgresServer(port, password, process.pid, folder)
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)  # fast shutdown: open connections are closed
            process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def start(folder: Path, port: int, *settings: str) -> subprocess.Popen[bytes]:
    """Start the server of a folder that `create` has filled, and wait until it answers. `settings`: `name=value`."""
    options = ["-D", str(folder / "data"), "-p", str(port)]
    for setting in ("listen_addresses=127.0.0.1", f"unix_socket_directories={folder}", *settings):
        options += ["-c", setting]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(_as_user("postgres", *options), cwd=folder, stdout=log, stderr=log)
    _wait_ready(process, folder, port)
    return process


def create(folder: Path, password: str, authentication: str = "scram-sha-256") -> None:
    """Make the files of a server in an empty folder."""
    secret = folder / "password"
    secret.touch(mode=0o600)
    secret.write_text(password)
    if os.geteuid() == 0:
        user = _system_user()
        assert user is not None
        for path in (folder, secret):
            os.chown(path, user.pw_uid, user.pw_gid)
    options = ["-D", str(folder / "data"), "-U", USER, "-A", authentication, f"--pwfile={secret}"]
    command = _as_user("initdb", *options, "-E", "UTF8", "--locale=C.UTF-8", "--no-sync")
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    secret.unlink()


def _as_user(program: str, *options: str) -> list[str]:
    """The command, as the server's own user when we are root, and ended by SIGINT when we are killed."""
    folder = binaries()
    assert folder is not None, why_not()
    user = _system_user() if os.geteuid() == 0 else None
    identity = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"] if user else []
    return ["setpriv", "--pdeathsig=INT", *identity, str(folder / program), *options]


def _wait_ready(process: subprocess.Popen[bytes], folder: Path, port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    ready = _as_user("pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port))
    while subprocess.run(ready, cwd=folder).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL did not start: {(folder / 'log').read_text()[-2000:]}")
        time.sleep(0.05)


def _system_user() -> pwd.struct_passwd | None:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(USER)
    return None


def _version(folder: Path) -> tuple[int, ...]:
    """Of `/usr/lib/postgresql/15/bin`: (15,). Of another folder: ()."""
    name = folder.parent.name
    return tuple(int(part) for part in name.split(".")) if name.replace(".", "").isdigit() else ()
