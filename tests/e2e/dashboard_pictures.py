"""Pictures of deploy/monitoring/dashboard.json: `PYTHONPATH=tests python -m e2e.dashboard_pictures FOLDER [SECONDS]`.

Grafana is not at hand, so dashboard_page.html draws the panels from the dashboard's JSON and a Prometheus' answers. The
services that it looks at are real (dashboard_sources.py), and so are their callers (dashboard_traffic.py). Engines are
simulated.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Page, sync_playwright

from e2e.browser import ARGUMENTS, CHROMIUM
from e2e.dashboard_sources import MONITORING, SCRAPE_SECONDS, dashboard_sources
from e2e.dashboard_traffic import play
from e2e.small_png import shoot

PAGE = Path(__file__).parent / "dashboard_page.html"
WIDTH = 1600
Theme = Literal["dark", "light"]
SECONDS = 420.0  # long enough for an alert to fire


@dataclass(frozen=True)
class Shown:
    """What one panel shows. `none`: what it says where it has no data. `hidden`: pixels of the legend that do not fit.
    `cut`: title or description does not.
    """

    id: int
    title: str
    type: str
    error: str | None
    none: str | None
    hidden: int
    cut: bool
    series: Sequence[dict[str, Any]]


def dashboard() -> dict[str, Any]:
    """The file."""
    found: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return found


def parts(panels: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Ids of the panels of the upper and the lower half, cut above a row where there is one."""
    half = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in panels) / 2
    tops = [one["gridPos"]["y"] for one in panels if one["type"] == "row"] or [one["gridPos"]["y"] for one in panels]
    cut = min(tops, key=lambda top: abs(top - half))
    upper = [one["id"] for one in panels if one["gridPos"]["y"] < cut]
    return upper, [one["id"] for one in panels if one["id"] not in upper]


def draw(page: Page, prometheus: str, times: tuple[float, float], theme: Theme, panels: Sequence[int]) -> list[Shown]:
    """Draw these panels from the first time to the second, in Unix seconds; says what they show."""
    look = {
        "dashboard": dashboard(),
        "prometheus": prometheus,
        "start": times[0],
        "end": times[1],
        "scrape": SCRAPE_SECONDS,
        "theme": theme,
        "panels": panels,
    }
    page.goto(PAGE.as_uri())
    return [Shown(**one) for one in page.evaluate("look => draw(look)", look)]


def pictures(prometheus: str, times: tuple[float, float], folder: Path) -> list[Shown]:
    """The upper half by night, the lower half by day, as dashboard-1.png and dashboard-2.png."""
    found: list[Shown] = []
    folder.mkdir(parents=True, exist_ok=True)
    themes: tuple[Theme, Theme] = ("dark", "light")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            page = chromium.new_page(viewport={"width": WIDTH, "height": 900})
            halves = zip(themes, parts(dashboard()["panels"]), strict=True)
            for number, (theme, panels) in enumerate(halves, 1):
                found += draw(page, prometheus, times, theme, panels)
                shoot(page, folder / f"dashboard-{number}.png")
        finally:
            chromium.close()
    return found


def main() -> None:
    """Take them."""
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS
    with tempfile.TemporaryDirectory() as folder, dashboard_sources(Path(folder)) as site:
        began = time.time()
        print("answers by status:", asyncio.run(play(site, seconds)))
        for panel in pictures(site.prometheus, (began, time.time()), Path(sys.argv[1])):
            print(panel)


if __name__ == "__main__":
    main()
