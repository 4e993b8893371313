"""The server that loads the definitions: `python -m batch_assets.local_dagster.definitions_server api grpc …`.

Dagster's own (`python -m dagster api grpc`), but its run workers are forked from a template (worker_template.py). It
opens the storage of DAGSTER_HOME as it starts, while the process that started it may be creating that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from batch_assets.dagster_internals.code_server import serve_definitions, start_workers_from
from batch_assets.local_dagster import worker_template


def main() -> None:
    """Serve until the end."""
    folder = Path(sys.argv[sys.argv.index("--socket") + 1]).parent  # only our user may enter it
    try:
        worker_template.import_modules()
        start_workers_from(worker_template.start(folder / f"template-{os.getpid()}"))
    except worker_template.TemplateError as error:
        sys.stderr.write(f"run workers are started as Dagster starts them: {error}\n")
    if home := os.environ.get("DAGSTER_HOME"):
        from batch_assets.local_dagster.home import ensure_storage  # not in the template, which holds nothing of ours

        ensure_storage(Path(home))
    serve_definitions()


if __name__ == "__main__":
    main()
