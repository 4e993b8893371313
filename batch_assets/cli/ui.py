"""`batch-assets ui`: Dagster's processes on this machine until Ctrl-C, with the front door beside them if asked for."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from batch_assets.cli.interrupts import EXIT_STATUS, Interrupted, Signals
from batch_assets.cli.user_errors import CommandError
from batch_assets.local_dagster.home import prepare_home, running_stack
from batch_assets.local_dagster.stack import Stack, port_taken
from batch_assets.settings import viewer_url
from batch_assets.spec.discovery import declarations


def serve_ui(port: int, api_port: int | None) -> None:
    """Serve Dagster's UI on `port` of 127.0.0.1, and OpenAI's Batch API on `api_port`. Raises CommandError, Exit."""
    for one in declarations().broken:
        sys.stderr.write(f"{one.error}\n")
    viewer_url()  # what is wrong with it is said here, not on the page of a table
    home = prepare_home()
    if found := running_stack(home):
        raise CommandError(f"Dagster already runs on {home}: {found.url} (process {found.pid})")
    if port_taken(port):
        raise CommandError(f"port {port} on 127.0.0.1 is taken: name another with --port")
    service: list[str] = []
    if api_port is not None:
        _check_front_door(api_port, port)
        service = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", str(api_port)]
    with Signals() as signals:
        try:
            _serve(home, port, api_port, service, signals)
        except Interrupted:
            raise typer.Exit(EXIT_STATUS) from None


def _check_front_door(api_port: int, port: int) -> None:
    from batch_assets.api.settings import api_settings

    if api_port == port or port_taken(api_port):
        raise CommandError(f"port {api_port} on 127.0.0.1 is taken: name another with --api-port")
    api_settings()  # what is wrong with its files is said here, not in a log


def _serve(home: Path, port: int, api_port: int | None, service: Sequence[str], signals: Signals) -> None:
    with Stack(home, port=port, service=service) as own:
        _say(f"Starting Dagster on {home}")
        own.wait_ready()
        _say(f"Dagster's UI: {own.url}   (Ctrl-C ends it)")
        if api_port is not None:
            _say(f"OpenAI's Batch API: http://127.0.0.1:{api_port}/v1")
        sys.stdout.flush()
        with signals.deferred():
            while not signals.asked:
                time.sleep(0.2)
        _say("Ending …")


def _say(text: str) -> None:
    """A line of the result, unwrapped and unstyled."""
    sys.stdout.write(f"{text}\n")
