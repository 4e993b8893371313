"""The pages that people look at, by day and by night, of a dataset with 1,000 batches.

`BATCH_ASSETS_SCREENSHOTS=FOLDER python -m pytest -m slow tests/e2e/test_pages.py` keeps what the browser saw there. The
pictures of docs/images are of the demo, see demo_pictures.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from batch_assets.settings import PROJECT
from e2e.browser import Browser, browser, needs_chromium
from e2e.harness import Platform, eventually, platform
from e2e.test_losses import published

pytestmark = [pytest.mark.soak("dagster"), pytest.mark.timeout(900), needs_chromium]

BATCHES = 1000
THEMES = ["Light", "Dark"]
DISTINCT = """image => {
  const canvas = document.createElement('canvas');
  canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
  const context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  let drawn = 0;
  for (let i = 3; i < data.length; i += 4) drawn += data[i] > 0;
  return [image.naturalWidth, drawn];
}"""


def example() -> dict[str, Any]:
    """The example's first 2,000 rows, in 1,000 batches."""
    declared = yaml.safe_load((PROJECT / "batch_assets/defs/example/defs.yaml").read_text())["attributes"]
    topics = (PROJECT / "batch_assets/defs/example/topics.csv").read_text().splitlines()[1:]
    declared["source"]["grid"]["topic"] = [topic.strip('"') for topic in topics]
    declared["source"]["limit"] = 2 * BATCHES
    return {**declared, "model": "test-model", "batch_rows": 2, "batches_per_run": 500}


def open_markdown(ui: Browser, name: str) -> None:
    """Open the dialog with one Markdown entry of the metadata."""
    row = ui.page.locator("tr").filter(has_text=name).first
    row.get_by_text("Show markdown").click()
    ui.page.locator(".dagster-markdown").last.wait_for()
    ui.page.wait_for_timeout(300)
    ui.page.locator(".dagster-markdown").last.locator("p").first.scroll_into_view_if_needed()


def test_the_pages_of_a_thousand_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ["--speed", "50", "--output-tokens", "lognormal:60:128"]
    with platform(tmp_path, monkeypatch, example(), simulator=engine) as site:
        run = site.launch_job(f"{site.name}_refresh")
        assert site.finish(run) == dg.DagsterRunStatus.SUCCESS
        published(site, 400)
        for theme in THEMES:
            with browser(site.stack.url, site.name, tmp_path) as ui:
                ui.theme(theme)
                look_at(site, ui, theme)


def look_at(site: Platform, ui: Browser, theme: str) -> None:
    ui.open_lineage()
    eventually(lambda: "100% filled" in ui.nodes().get("rows", ""), 60, "a green lineage")
    ui.shot(f"lineage-{theme}")
    ui.open_asset("dataset")
    eventually(lambda: "sample_rows" in ui.text(), 30, "the metadata of the table")
    text = ui.text()
    assert text.index("first_rows") < text.index("columns")
    ui.shot(f"table-{theme}")

    open_markdown(ui, "histograms")
    pictures = ui.page.locator(".dagster-markdown img")
    eventually(lambda: pictures.count() == 3, 30, "three pictures")
    for picture in pictures.all():
        width, drawn = picture.evaluate(DISTINCT)
        assert width > 300 and drawn > 1000
    ui.shot(f"histograms-{theme}")
    ui.page.keyboard.press("Escape")
    open_markdown(ui, "sample_rows")
    shown = ui.page.locator(".dagster-markdown").last
    assert shown.locator("tbody tr").count() == 10
    assert shown.locator("a, img").count() == 0
    assert "You explain things correctly" in shown.inner_text()
    ui.shot(f"sample-{theme}")
    ui.page.keyboard.press("Escape")

    counts = eventually(lambda: (found := ui.partition_counts()).get("Materialized") == BATCHES and found, 60, "green")
    assert counts.get("Missing", 0) == counts.get("Failed", 0) == 0
    ui.shot(f"partitions-{theme}")
    ui.open_asset("rows", "partitions", partition="00777")
    eventually(lambda: ui.metadata().get("run"), 30, "the batch's metadata")
    ui.shot(f"batch-{theme}")
    ui.open_asset("rows")
    ui.shot(f"rows-{theme}")
    ui.open_asset("prompts")
    ui.shot(f"prompts-{theme}")
    for name, run in (("rows-run", site.rows_runs(dg.DagsterRunStatus.SUCCESS)[0]),):
        ui.open(f"/runs/{run.run_id}")
        ui.shot(f"{name}-{theme}")
    ui.open("/automation")
    ui.shot(f"automation-{theme}")
