"""Dagster's UI in Debian's chromium: the few things that a person does there, by what is written on the screen."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.timing import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
WIDTH, HEIGHT = 1400, 900

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium: apt-get install -y --no-install-recommends chromium"
)


@dataclass
class Browser:
    """One tab on one dataset. `folder` takes the screenshots."""

    page: Page
    url: str
    dataset: str
    folder: Path

    def open(self, path: str) -> None:
        """Open a page of the UI and wait until it has loaded what it shows."""
        self.page.goto(f"{self.url}{path}", wait_until="networkidle")
        self.page.wait_for_timeout(500)

    def theme(self, name: str) -> None:
        """Light or Dark, from the next page that is opened: what the UI's settings keep (`DAGSTER_THEME_KEY`)."""
        self.page.add_init_script(f"localStorage.setItem('dagster-theme', JSON.stringify('{name}'))")

    def open_asset(self, name: str, view: str = "overview", **query: str) -> None:
        """Open one view of one asset of the dataset."""
        more = "".join(f"&{key}={value}" for key, value in query.items())
        self.open(f"/assets/{self.dataset}/{name}?view={view}{more}")

    def open_lineage(self) -> None:
        """Open the asset graph of the dataset's group."""
        self.open(f"/locations/__repository__@batch_assets/asset-groups/{self.dataset}/lineage")
        self.page.locator("svg foreignObject").first.wait_for()

    def text(self) -> str:
        """All that is written on the page."""
        return self.page.locator("body").inner_text()

    def shot(self, name: str) -> None:
        """Keep a picture of what is on the screen."""
        self.page.screenshot(path=self.folder / f"{name}.png")

    def press(self, label: str) -> None:
        """Press the first button that carries the label."""
        self.page.get_by_role("button", name=label).first.click()

    def nodes(self) -> dict[str, str]:
        """What the boxes of the asset graph say, by the asset's name."""
        texts = [box.text_content() or "" for box in self.page.locator("svg foreignObject").all()]
        return {text.partition("Latest event")[0].strip(): text for text in texts}

    def edges(self) -> set[tuple[str, str]]:
        """Arrows of the asset graph, found by where they begin and end."""
        boxes = []
        for box in self.page.locator("svg foreignObject").all():
            x, y, width, height = (float(box.get_attribute(a) or 0) for a in ("x", "y", "width", "height"))
            name = (box.text_content() or "").partition("Latest event")[0].strip()
            boxes.append((name, x, y, width, height))

        def at(x: float, y: float) -> str:
            near = min(boxes, key=lambda b: max(b[1] - x, x - b[1] - b[3], 0) + max(b[2] - y, y - b[2] - b[4], 0))
            return near[0]

        found = set()
        for arrow in self.page.locator("svg path[marker-end]").all():
            numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", arrow.get_attribute("d") or "")]
            found.add((at(*numbers[:2]), at(*numbers[-2:])))
        return found

    def launch_dialog(self) -> Locator:
        """The dialog that asks which partitions to materialize."""
        return self.page.get_by_role("dialog").filter(has_text="Launch runs to materialize")

    def choose_partition(self, key: str) -> None:
        """Tick one partition in the dialog."""
        self.launch_dialog().get_by_text("Select a partition or create one").click()
        self.page.get_by_role("menuitem", name=key).click()
        self.page.keyboard.press("Escape")

    def choose(self, which: str) -> int:
        """Press All, Failed, Missing or "Failed and missing" in the dialog; returns how many partitions it says.

        -1 when it says nothing yet.
        """
        dialog = self.launch_dialog()
        dialog.get_by_role("button", name=which, exact=True).click()
        self.page.wait_for_timeout(500)
        counted = re.search(r"(\d+) partitions?", dialog.inner_text())
        return int(counted[1]) if counted else -1

    def launch(self) -> None:
        """Press the dialog's last button, whatever it is called for this choice, and wait until the dialog is gone."""
        self.launch_dialog().get_by_role("button", name=re.compile("^Launch")).click()
        self.launch_dialog().wait_for(state="hidden")

    def partition_counts(self) -> dict[str, int]:
        """Failed, Materialized, Materializing and Missing, as the partitions page of rows counts them."""
        self.open_asset("rows", "partitions")
        found = re.findall(r"(Failed|Materialized|Materializing|Missing) \((\d+)\)", self.text())
        return {state: int(count) for state, count in found}

    def metadata(self) -> dict[str, str]:
        """The table of metadata on the page, as text."""
        rows = [row.locator("td").all_inner_texts() for row in self.page.locator("table tr").all()]
        return {cells[0].strip(): cells[1].strip() for cells in rows if len(cells) >= 2}

    def terminate_run(self, run_id: str) -> None:
        """Cancel a run on its own page, as the UI asks for it."""
        self.open(f"/runs/{run_id}")
        self.press("Terminate")
        self.page.get_by_role("dialog").get_by_role("button", name="Terminate 1 run").click()


@contextlib.contextmanager
def browser(url: str, dataset: str, folder: Path) -> Iterator[Browser]:
    """A browser for as long as the body runs. Screenshots go to BATCH_ASSETS_SCREENSHOTS, else below `folder`."""
    from playwright.sync_api import sync_playwright

    pictures = Path(os.environ.get("BATCH_ASSETS_SCREENSHOTS") or folder / "screenshots")
    pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=30_000 * PATIENCE)
        try:
            page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.set_default_timeout(30_000 * PATIENCE)
            yield Browser(page, url, dataset, pictures)
        finally:
            chromium.close()
