"""`batch-assets view`: the page on which rows are looked at, until Ctrl-C."""

from __future__ import annotations

import sys
from urllib.parse import urlencode

from batch_assets import settings
from batch_assets.local_dagster.home import prepare_home
from batch_assets.spec.discovery import known_datasets
from batch_assets.table_access.opened_table import find_table
from batch_assets.viewer.server import serve
from resources.objects.opening import open_objects


def serve_view(name: str | None, version: str | None, port: int, part: str | None) -> None:
    """Serve the tables of the store, and name the address of this one. Raises TableError, PortTaken."""
    root, asked = settings.store_root(), {}
    names = set(known_datasets())
    if name is not None:
        found = find_table(open_objects(root), name, version, part)
        asked = {"dataset": name, "version": found.version} | ({"part": part} if part else {})
        names.add(name)

    def told(port: int) -> None:
        sys.stdout.write(
            f"Rows: http://127.0.0.1:{port}/{f'?{urlencode(asked)}' if asked else ''}   (Ctrl-C ends it)\n"
        )
        sys.stdout.flush()

    serve(root, names, prepare_home(), port, told)
