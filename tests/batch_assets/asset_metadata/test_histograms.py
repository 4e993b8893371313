"""Histograms of a table: what is counted, where bins lie, and pictures that are well-formed, small and safe."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest
from support.snapshots import commit, questions, write_snapshot

from batch_assets.asset_metadata.distributions import Bin, Distribution, TableDistributions, table_distributions
from batch_assets.asset_metadata.histogram import (
    BAR,
    DEAD,
    FAR,
    INK,
    SOFT,
    distributions_markdown,
    figure,
    numbers_picture,
    reasons_picture,
)
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore

DAY, NIGHT = "#ffffff", "#0f1114"


def of(values: list[float]) -> Distribution:
    found = Distribution()
    found.add(np.array(values))
    return found


def pictures(markdown: str) -> list[str]:
    found = re.findall(r"!\[[\w .,:%+]*\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", markdown)
    return [base64.b64decode(one).decode() for one in found]


def contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted([luminance(first), luminance(second)], reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_quantiles_are_right_to_three_digits_in_bounded_memory() -> None:
    random = np.random.default_rng(7)
    values = random.lognormal(4, 1, 200_000)
    found = Distribution()
    for part in np.array_split(values, 50):
        found.add(part)
    assert found.count == 200_000
    for share in (0.5, 0.95, 0.99, 1.0):
        assert found.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.01)
    assert len(found._counts) < 6_000


def test_bins_hold_every_value_once_and_the_far_ones_share_the_last() -> None:
    assert of([]).bins(whole=True) == []
    assert of([0.0, 0.0]).bins(whole=True) == [Bin(0, 1, 2)]
    assert of([128.0] * 9).bins(whole=True) == [Bin(128, 129, 9)]
    even = of([float(i) for i in range(1, 101)]).bins(whole=True)
    assert {bin.last - bin.first for bin in even} == {5.0}
    assert sum(bin.count for bin in even) == 100
    assert even[0] == Bin(0, 5, 4)
    tail = of([float(i % 10) for i in range(1000)] + [900.0, 5000.0]).bins(whole=True)
    assert tail[-1] == Bin(10, math.inf, 2)
    small = of([0.012, 0.013, 0.02]).bins(whole=False)
    assert sum(bin.count for bin in small) == 3 and len(small) <= 25


def test_what_is_no_number_is_left_out() -> None:
    assert of([math.nan, math.inf, -1.0, 2.0]).count == 1


def test_only_rows_that_were_asked_count(local_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(local_objects, "sums")
    manifest = write_snapshot(store, questions(40), duplicates={f"c{i}": "id-000001" for i in range(30)})
    commit(store, manifest, dead=["id-000003", "id-000004"])
    table = publish(store, manifest, card=Card(), now=1.0, workdir=tmp_path)
    found = table_distributions(store, table)
    assert (found.tokens.count, found.seconds.count) == (38, 38)
    assert found.reasons == Counter({"stop": 38, "no completion": 2})
    assert len(pictures(distributions_markdown(found))) == 3


def test_vectors_have_no_output_length_and_an_empty_table_no_picture(local_objects: Objects, tmp_path: Path) -> None:
    assert distributions_markdown(TableDistributions()) == ""
    vectors = TableDistributions(seconds=of([0.5]), reasons=Counter({"not said": 1}))
    assert [re.findall("<title>([^:]+)", svg) for svg in pictures(distributions_markdown(vectors))] == [
        ["Finish reasons"],
        ["Latency"],
    ]


def test_a_picture_is_xml_of_bounded_size_whatever_an_engine_says() -> None:
    many = Counter({f"<script>'\"&\u0000{i}" + "x" * 5000: 10 - i % 3 for i in range(50)})
    found = TableDistributions(of([float(i) for i in range(3000)]), of([i / 7 for i in range(1, 4000)]), many)
    markdown = distributions_markdown(found)
    assert len(markdown) < 30_000
    for svg in pictures(markdown):
        root = ElementTree.fromstring(svg)
        assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {"svg", "title", "text", "rect", "path"}
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for box in (element for element in root.iter() if element.tag.endswith("rect")):
            x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
            assert x >= 0 and x + w <= width and y >= 0 and y + h <= height


def test_bars_are_as_high_as_their_counts() -> None:
    _, svg = numbers_picture("Output length", "tokens", of([5.0] * 40 + [15.0] * 100 + [25.0] * 50), whole=True)
    heights = [float(height) for height in re.findall(r"<rect[^>]* height='([\d.]+)'", svg)]
    assert len(heights) == 3
    assert heights[0] / heights[1] == pytest.approx(0.4, abs=0.01)
    assert heights[2] / heights[1] == pytest.approx(0.5, abs=0.01)


def test_reasons_are_counted_without_end_by_no_engine() -> None:
    found = TableDistributions()
    names = [f"reason {i}" for i in range(1000)]
    columns = {
        "completion_tokens": pa.array([1] * 1000),
        "finish_reason": pa.array(names),
        "error": pa.nulls(1000, pa.string()),
        "seconds": pa.array([0.1] * 1000),
        "duplicate_of": pa.nulls(1000, pa.string()),
    }
    found.add(pa.record_batch(columns))
    assert len(found.reasons) <= 51 and found.reasons.total() == 1000


def test_words_beside_a_picture_say_its_figures() -> None:
    alt, svg = numbers_picture("Latency", "seconds", of([0.25] * 10 + [1.5]), whole=False)
    assert alt == "Latency: median 0.25, P95 1.5, most 1.5 seconds"
    assert alt in svg
    alt, _ = reasons_picture("Finish reasons", {"stop": 4990, "length": 9, "no completion": 1})
    assert alt == "Finish reasons: stop 4,990, length 9, no completion 1"
    assert [figure(value) for value in (0.0421, 1.5, 128.0, 12345.0)] == ["0.0421", "1.5", "128", "12,345"]


@pytest.mark.parametrize("colour", [INK, SOFT, BAR, FAR, DEAD])
def test_colours_read_well_by_day_and_by_night(colour: str) -> None:
    least = 3.0  # WCAG 2.2: graphics, and large text; words of the pictures stand beside them as alternative text too
    assert contrast(colour, DAY) >= least
    assert contrast(colour, NIGHT) >= least
