"""Dagster's webserver behind our guard: `python -m batch_assets.webserver.server --port N --workspace FILE`.

The stock app, as `dagster-webserver` builds it (dagster_webserver/cli.py), without its upload of usage statistics.
It listens on loopback, or with `--host` for a proxy on another machine or in another container: whoever connects from
there has to show the token, because the kernel here does not know that user (peers.py).
Dagster's private workspace classes are used: there is no public way to serve the app inside another.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from pathlib import Path

from batch_assets import settings
from batch_assets.dagster_internals.process_end import run_process
from batch_assets.webserver.guard import MOST_MESSAGE_BYTES, WebGuard
from batch_assets.webserver.guarded_requests import Access
from batch_assets.webserver.peers import own_connection
from batch_assets.webserver.token import cookie_value, web_token

STATEMENT_MILLISECONDS, RECYCLE_SECONDS, MORE_CONNECTIONS = 15_000, 3600, 20  # as `dagster-webserver`
POLL_MILLISECONDS = 2000
END_SECONDS = 2
LOOPBACK = "127.0.0.1"


def access(home: Path, port: int) -> Access:
    """The access rules, from the token of this home and BATCH_ASSETS_UI_HOSTS (names with ports, by commas)."""
    token = web_token(home)
    named = os.environ.get("BATCH_ASSETS_UI_HOSTS", "").split(",")
    hosts = frozenset(name.strip().lower() for name in named if name.strip())
    return Access(port, token, cookie_value(token, port), hosts)


def serve(home: Path, port: int, workspace: Path, host: str = LOOPBACK) -> None:
    """Serve at this address of this machine until SIGTERM or SIGINT."""
    import dagster as dg
    import uvicorn
    from dagster_webserver.app import create_app_from_workspace_process_context
    from dagster_webserver.version import __version__

    from batch_assets.dagster_internals import workspace_of
    from batch_assets.dagster_internals.event_batches import write_together
    from batch_assets.dagster_internals.server_ids import ask_seldom

    ask_seldom()
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.optimize_for_webserver(STATEMENT_MILLISECONDS, RECYCLE_SECONDS, MORE_CONNECTIONS)
        write_together(instance)
        with workspace_of(instance, workspace, __version__) as context:
            app = create_app_from_workspace_process_context(context, "", POLL_MILLISECONDS)
            uvicorn.run(
                WebGuard(app, access(home, port), own_connection),
                host=host,
                port=port,
                log_level="warning",
                proxy_headers=False,  # who connects is asked of the kernel, not of a header
                server_header=False,
                ws_max_size=MOST_MESSAGE_BYTES,
                timeout_graceful_shutdown=END_SECONDS,
            )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m batch_assets.webserver.server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--host", default=LOOPBACK)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    warnings.simplefilter("ignore")  # Dagster's own notes on previews and betas, for whoever writes code
    serve(settings.dagster_home(), asked.port, asked.workspace, asked.host)


if __name__ == "__main__":
    run_process(main)
