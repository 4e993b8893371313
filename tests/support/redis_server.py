"""A real redis-server on a free port of loopback, with its append-only file: started, killed, started again."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpu_runner.providers.engine_process import free_port
from support.timing import PATIENCE

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")


@dataclass
class RedisServer:
    """`settings`: words of its command line. `program`: redis-server or valkey-server. It keeps nothing but its
    append-only file.
    """

    folder: Path
    settings: tuple[str, ...] = ALWAYS
    port: int = field(default_factory=free_port)
    program: str = "redis-server"
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--daemonize", "no", "--logfile", str(self.folder / "redis.log"), *self.settings]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20 * PATIENCE
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < deadline, f"{self.program} did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        return False


@contextlib.contextmanager
def redis_server(folder: Path, *settings: str, program: str = "redis-server") -> Iterator[RedisServer]:
    """A running server, killed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisServer(folder, settings or ALWAYS, program=program)
    server.start()
    try:
        yield server
    finally:
        server.kill()
