"""Serves the page behind the guard of Dagster's webserver, on loopback, until SIGTERM or SIGINT.

The same rules: the Host header must name us, other users of the machine are refused, and whatever asks for rows shows
the cookie that the page has set, or the token of DAGSTER_HOME.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from batch_assets.viewer.app import Viewer
from batch_assets.viewer.tables import Tables
from batch_assets.webserver.guard import WebGuard
from batch_assets.webserver.peers import own_connection
from batch_assets.webserver.server import LOOPBACK, access
from gpu_runner.errors import ExitStatus, UserFacingError
from resources.objects.opening import temporary_folder

END_SECONDS = 2


class PortTaken(UserFacingError):
    """Somebody else listens there."""

    exit_status = ExitStatus.WRONG_REQUEST


def guarded(app: Starlette, home: Path, port: int) -> WebGuard:
    """The application behind the guard, with the token of this home."""
    return WebGuard(app, access(home, port), own_connection)


def serve(root: str, names: Collection[str], home: Path, port: int, told: Callable[[int], None]) -> None:
    """Serve the tables of a store; `told` the port once it listens. `port` 0: any that is free. Raises PortTaken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener, temporary_folder() as folder:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            raise PortTaken(f"port {port} on {LOOPBACK} is taken: name another with --port, or 0 for any") from None
        listener.listen(64)
        port = listener.getsockname()[1]
        tables = Tables(root, names, folder)
        try:
            config = uvicorn.Config(
                guarded(Viewer(tables, folder).app(), home, port),
                log_level="warning",
                proxy_headers=False,  # who connects is asked of the kernel, not of a header
                server_header=False,
                ws="none",
                lifespan="off",
                timeout_graceful_shutdown=END_SECONDS,
            )
            told(port)
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            tables.close()
