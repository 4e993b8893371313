"""deploy/monitoring/dashboard.json as people see it: each panel has data of real services, and room for its words."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from e2e.dashboard_pictures import dashboard, pictures
from e2e.dashboard_sources import dashboard_sources, needs_site
from e2e.dashboard_traffic import play

pytestmark = [pytest.mark.soak("online"), pytest.mark.timeout(240), needs_site]

SECONDS = 40.0
LARGEST = 300_000  # bytes of a picture
# Queries that may find nothing in so short a time, with the panel's title: nothing was refused, and no rule has fired.
MAYBE_NOTHING = {("Alerts that fire", "A"), ("Online requests per second", "B"), ("Results lost in the store", "A")}


def test_every_panel_shows_data_and_its_words_fit(tmp_path: Path) -> None:
    site_folder, folder = tmp_path / "site", tmp_path / "pictures"
    site_folder.mkdir()
    with dashboard_sources(site_folder) as site:
        began = time.time()
        statuses = asyncio.run(play(site, SECONDS))
        found = pictures(site.prometheus, (began, time.time()), folder)
    assert {200, 202, 401, 404, 429} <= set(statuses), statuses
    panels = {panel["id"]: panel for panel in dashboard()["panels"] if panel["type"] != "row"}
    assert [panel.id for panel in found] == list(panels)
    assert {panel.title: panel.error for panel in found if panel.error} == {}
    asked = {(panels[panel.id]["title"], target["refId"]) for panel in found for target in panels[panel.id]["targets"]}
    seen = {(panel.title, one["target"]) for panel in found for one in panel.series if one["points"]}
    assert asked - seen <= MAYBE_NOTHING
    assert {panel.title: panel.none for panel in found if panel.none == "No data"} == {}
    assert [panel.title for panel in found if panel.hidden or panel.cut] == []
    sizes = [file.stat().st_size for file in sorted(folder.iterdir())]
    assert len(sizes) == 2 and all(50_000 < size < LARGEST for size in sizes), sizes
