"""The pictures of docs/images, taken of what `make demo` left: `PYTHONPATH=tests python -m e2e.demo_pictures FOLDER`.

DAGSTER_HOME and BATCH_ASSETS_STORE are those of the demo. Starts the UI, and ends it. No test: the pictures of each run
differ. Those of a chain are taken by `BATCH_ASSETS_SCREENSHOTS=FOLDER pytest -m soak tests/e2e/test_real_chain.py -k
accepted_rows_by_a_person`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from batch_assets.cli.demos.demo import SMALL_EXAMPLE
from batch_assets.local_dagster.home import prepare_home
from batch_assets.local_dagster.stack import Stack
from e2e.browser import Browser, browser
from e2e.harness import eventually
from e2e.test_pages import open_markdown

BATCH = "00002"


def by_day(ui: Browser) -> None:
    """Lineage, a batch, sample rows."""
    ui.open_lineage()
    eventually(lambda: "100% filled" in ui.nodes().get("rows", ""), 60, "a green lineage")
    ui.shot("lineage")
    ui.open_asset("rows", "partitions", partition=BATCH)
    eventually(lambda: ui.metadata().get("run"), 30, "the batch's metadata")
    ui.shot("batch")
    ui.open_asset("dataset")
    eventually(lambda: "sample_rows" in ui.text(), 30, "the metadata of the table")
    open_markdown(ui, "sample_rows")
    ui.shot("sample-rows")


def by_night(ui: Browser) -> None:
    """The dataset's page, and its histograms."""
    ui.open_asset("dataset")
    eventually(lambda: "sample_rows" in ui.text(), 30, "the metadata of the table")
    ui.shot("dataset")
    open_markdown(ui, "histograms")
    eventually(lambda: ui.page.locator(".dagster-markdown img").count() == 3, 30, "three pictures")
    ui.shot("histograms")


def main() -> None:
    """Take them."""
    folder = Path(sys.argv[1])
    os.environ["BATCH_ASSETS_SCREENSHOTS"] = str(folder)
    with Stack(prepare_home()) as stack:
        stack.wait_ready()
        for theme, look in (("Light", by_day), ("Dark", by_night)):
            with browser(stack.url, SMALL_EXAMPLE, folder) as ui:
                ui.theme(theme)
                look(ui)


if __name__ == "__main__":
    main()
