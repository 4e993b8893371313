"""Dagster's webserver on 127.0.0.1 behind our guard: `python -m batch_assets.webserver --port N --workspace FILE`.

The stock app, as `dagster-webserver` builds it (dagster_webserver/cli.py), without its upload of usage statistics. The
only place that uses Dagster's private workspace classes: there is no public way to serve the app inside another.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from pathlib import Path

from batch_assets import settings
from batch_assets.web_guard import MOST_MESSAGE_BYTES, WebGuard
from batch_assets.web_peers import own_connection
from batch_assets.web_requests import Access
from batch_assets.web_token import cookie_value, web_token

STATEMENT_MILLISECONDS, RECYCLE_SECONDS, MORE_CONNECTIONS = 15_000, 3600, 20  # as `dagster-webserver`
POLL_MILLISECONDS = 2000
END_SECONDS = 2


def access(home: Path, port: int) -> Access:
    """Who is let in, by the token of this home and BATCH_ASSETS_UI_HOSTS (names with ports, by commas)."""
    token = web_token(home)
    named = os.environ.get("BATCH_ASSETS_UI_HOSTS", "").split(",")
    hosts = frozenset(name.strip().lower() for name in named if name.strip())
    return Access(port, token, cookie_value(token, port), hosts)


def serve(home: Path, port: int, workspace: Path) -> None:
    """Serve until SIGTERM or SIGINT."""
    import dagster as dg
    import uvicorn
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster_webserver.app import create_app_from_workspace_process_context
    from dagster_webserver.version import __version__

    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.optimize_for_webserver(STATEMENT_MILLISECONDS, RECYCLE_SECONDS, MORE_CONNECTIONS)
        target = WorkspaceFileTarget([str(workspace)])
        with WorkspaceProcessContext(instance, target, version=__version__) as context:
            app = create_app_from_workspace_process_context(context, "", POLL_MILLISECONDS)
            uvicorn.run(
                WebGuard(app, access(home, port), own_connection),
                host="127.0.0.1",
                port=port,
                log_level="warning",
                proxy_headers=False,  # who connects is asked of the kernel, not of a header
                server_header=False,
                ws_max_size=MOST_MESSAGE_BYTES,
                timeout_graceful_shutdown=END_SECONDS,
            )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m batch_assets.webserver")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workspace", type=Path, required=True)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    warnings.simplefilter("ignore")  # Dagster's own notes on previews and betas, for whoever writes code
    serve(settings.dagster_home(), asked.port, asked.workspace)


if __name__ == "__main__":
    main()
