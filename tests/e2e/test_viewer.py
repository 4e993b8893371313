"""`batch-assets view` in a real browser: hostile rows are text, the keyboard is enough, and it can be read at 200 %."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.snapshots import SourceRow, commit, questions, write_snapshot

from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from e2e.browser import browser, needs_chromium
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_chromium]

SCRIPTS = (
    "<img src=x onerror=\"document.title='stolen'\">",
    "<script>document.title='stolen'</script>",
    '"><svg onload="document.title=\'stolen\'">',
    "<a href=\"javascript:document.title='stolen'\">press</a>",
    "{{constructor.constructor('document.title=1')()}}",
    "</pre></td><iframe srcdoc=\"<script>parent.document.title='stolen'</script>\">",
)
COLUMN = "<img src=x onerror=document.title='stolen'>"


@contextlib.contextmanager
def viewed(folder: Path, dataset: str) -> Iterator[Page]:
    """The page of a dataset of the store in `folder`, as `batch-assets view` names it."""
    (folder / "defs").mkdir()
    own = {"BATCH_ASSETS_STORE": str(folder / "store"), "BATCH_ASSETS_DEFS": str(folder / "defs")}
    command = [sys.executable, "-m", "batch_assets.cli.main", "view", dataset, "--port", "0"]
    environment = os.environ | own | {"DAGSTER_HOME": str(folder / "home")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[1]
            with browser(url, dataset, folder) as opened:
                opened.page.goto(url)
                yield opened.page
        finally:
            process.terminate()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """The page of a dataset whose prompts, ids and a column's name and values are scripts; rows 3 and 70 are dead."""
    store = DatasetStore(open_objects(str(tmp_path / "store")), "hostile")
    for now, count in ((1.0, 118), (2.0, 120)):
        rows = [
            SourceRow(f"{number:03d}{SCRIPTS[number % 6]}", SCRIPTS[number % 6], {COLUMN: SCRIPTS[number % 6]})
            for number in range(count)
        ]
        manifest = write_snapshot(store, rows)
        commit(store, manifest, dead=[rows[3].row_id, rows[70].row_id])
        publish(store, manifest, card=Card(), now=now, workdir=tmp_path)
    with viewed(tmp_path, "hostile") as opened:
        yield opened


def says(page: Page, words: str) -> None:
    from playwright.sync_api import expect

    expect(page.locator("#status")).to_have_text(re.compile(words))


def test_scripts_in_rows_and_in_names_of_columns_are_text(page: Page) -> None:
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    says(page, "^120 of 120 rows")
    for number in range(6):
        page.locator("tbody tr").nth(number).click()
        page.locator("#detail h2").filter(has_text=f"Row {number:03d}").wait_for()
        detail = page.locator("#detail").inner_text()
        assert detail.count(SCRIPTS[number]) >= 3  # the id, the prompt, the value of the column
        assert COLUMN in detail
    page.locator("#detail").get_by_text(re.compile("answers to this prompt")).wait_for()
    page.get_by_role("button", name=COLUMN, exact=True).click()  # the head of the column: sorts by it
    says(page, "^120 of 120 rows")
    page.get_by_role("group", name=COLUMN).get_by_role("button").first.click()  # a bar of its histogram
    says(page, "^20 of 120 rows")
    assert SCRIPTS[0].split()[0] in page.locator("#conditions").inner_text() + page.locator("#bars").inner_text()
    page.locator("#conditions button").click()
    page.locator("#compare").select_option(index=1)
    says(page, "2 added")
    assert page.title() == "hostile: rows"
    kinds = page.evaluate("[...document.querySelectorAll('body *')].map(one => one.localName)")
    assert not {"img", "svg", "iframe", "script"} & set(kinds)
    assert not page.evaluate("[...document.querySelectorAll('body a')].some(a => a.href.startsWith('javascript'))")
    assert errors == []


def test_the_keyboard_is_enough(page: Page) -> None:
    says(page, "^120 of 120 rows")
    page.keyboard.press("/")
    page.keyboard.type("what nobody wrote")
    page.keyboard.press("Enter")
    says(page, "^0 of 120 rows")
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.keyboard.press("Enter")
    says(page, "^120 of 120 rows")
    page.get_by_role("button", name="Dead letters").focus()
    page.keyboard.press("Space")
    says(page, "^2 of 120 rows")
    page.locator("tbody tr").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator("#detail h2").filter(has_text="Row 070").wait_for()
    assert "Dead letter: prompt_too_long: the prompt has 9000 tokens" in page.locator("#detail").inner_text()
    page.keyboard.press("Escape")
    page.locator("#detail").wait_for(state="hidden")
    assert page.evaluate("document.activeElement.rowIndex") == 2  # where it was
    page.get_by_role("button", name="Dead letters").focus()
    page.keyboard.press("Space")
    says(page, "^120 of 120 rows")
    page.locator("#page").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    says(page, "^120 of 120 rows")
    assert page.locator("tbody tr").count() == 20
    bars = page.get_by_role("group", name="completion_tokens").get_by_role("button")
    bars.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    says(page, r"^\d\d? of 120 rows")
    where = page.url
    page.reload()
    says(page, r"^\d\d? of 120 rows")  # the address holds what is looked at
    assert page.url == where


def test_it_can_be_read_at_twice_the_size_by_day_and_by_night(page: Page) -> None:
    says(page, "^120 of 120 rows")
    page.set_viewport_size({"width": 640, "height": 500})  # what 1,280 points have left at 200 %
    page.locator("tbody tr").first.click()
    page.locator("#detail h2").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # only the table scrolls sideways
    brightness = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for element in ("body", "#detail pre", "#status", "dt", "tbody td", "#dead"):
            text, back = page.evaluate(COLOURS, element)
            assert contrast(text, back) >= 4.5, (scheme, element, text, back)
        brightness.append(luminance(page.evaluate(COLOURS, "body")[1]))
    assert brightness[0] > 0.8 and brightness[1] < 0.05


COLOURS = """selector => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  let element = document.querySelector(selector);
  const text = numbers(getComputedStyle(element).color);
  while (element && numbers(getComputedStyle(element).backgroundColor)[3] === 0) element = element.parentElement;
  return [text, element ? numbers(getComputedStyle(element).backgroundColor) : [255, 255, 255]];
}"""


def luminance(colour: list[float]) -> float:
    """Relative luminance of WCAG 2.2."""
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (one / 255 for one in colour[:3])
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: list[float], other: list[float]) -> float:
    """Contrast ratio of WCAG 2.2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_table_that_is_being_made_shows_more_when_the_page_is_loaded_again(tmp_path: Path) -> None:
    store = DatasetStore(open_objects(str(tmp_path / "store")), "growing")
    manifest = write_snapshot(store, questions(100))
    commit(store, manifest, keys=["00000", "00001"])
    with viewed(tmp_path, "growing") as page:
        says(page, "^20 of 20 rows")
        assert "20 of 100 rows, being made" in page.locator("#making").inner_text()
        page.locator("tbody tr").nth(12).click()
        page.locator("#detail h2").filter(has_text="Row id-000012").wait_for()
        commit(store, manifest, keys=["00002"])
        page.reload()
        says(page, "^30 of 30 rows")
        assert "30 of 100 rows, being made" in page.locator("#making").inner_text()
        page.locator("#detail h2").filter(has_text="Row id-000012").wait_for()
        assert page.locator("#version").is_disabled()
