"""`batch-assets view`: the page on which rows are looked at, until Ctrl-C."""

from __future__ import annotations

import sys
from urllib.parse import urlencode

from batch_assets import settings
from batch_assets.local_dagster.home import prepare_home
from batch_assets.spec.discovery import known_datasets
from batch_assets.table_access.opened_table import check_name, find_table
from batch_assets.viewer.server import serve
from batch_assets.viewer.unfinished_table import UNFINISHED, is_unfinished
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore


def serve_view(name: str | None, version: str | None, port: int, part: str | None) -> None:
    """Serve the tables of the store, and name the address of this one; of a dataset without a table that of the one
    that is being made. Raises TableError, PortTaken."""
    root, asked = settings.store_root(), {}
    names = set(known_datasets())
    if name is not None:
        check_name(name)
        objects = open_objects(root)
        store = DatasetStore(objects, name)
        if (part, version) == (None, None) and store.current_published() is None and is_unfinished(store):
            part = UNFINISHED
        asked = (
            {"dataset": name}
            if part == UNFINISHED
            else {"dataset": name, "version": find_table(objects, name, version, part).version}
        )
        asked |= {"part": part} if part else {}
        names.add(name)

    def told(port: int) -> None:
        sys.stdout.write(
            f"Rows: http://127.0.0.1:{port}/{f'?{urlencode(asked)}' if asked else ''}   (Ctrl-C ends it)\n"
        )
        sys.stdout.flush()

    serve(root, names, prepare_home(), port, told)
