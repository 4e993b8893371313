"""The picture of a plan says what the plan says, is well-formed whatever the plan is, and stays within its frame."""

from __future__ import annotations

import base64
import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_assets.capacity_planning.cost_curve import (
    BUDGET,
    CHOSEN,
    DEADLINE,
    HEIGHT,
    LINE,
    WIDTH,
    curve_markdown,
    curve_svg,
    dollars,
    span,
)
from gpu_runner.planner.planner import in_detail, make_plan
from gpu_runner.planner.types import Candidate, Interval, Plan, PlannedOffer, Target, Work

HOUR = 3600.0
L40S = PlannedOffer("runpod/l40s", 0.86, 1500, 240)
H100 = PlannedOffer("aws/h100", 6.9, 9000, 480, capacity=8)
SPOT = PlannedOffer("vast/4090 spot", 0.27, 800, 400, spot=True, interruptions_per_hour=0.1, spread=0.2)
WORK = Work(4e8, 4e8, 0, 1000, 0.1)
SVG = "{http://www.w3.org/2000/svg}"


def plan(deadline: float | None = 6 * HOUR, budget: float | None = 120) -> Plan:
    options, target = [L40S, H100, SPOT], Target(deadline, budget, 40)
    return in_detail(make_plan(WORK, options, [], target), WORK, options, [], target)


def candidate(finish: float, usd: float, *, option: PlannedOffer = L40S, number: int = 3) -> Candidate:
    return Candidate(((option, number),), Interval(finish, finish * 1.2), Interval(usd, usd * 1.3))


def made_of(*curve: Candidate, chosen: Candidate | None = None, reason: str = "because") -> Plan:
    return Plan(chosen, curve[0] if curve else None, reason, feasible=True, curve=curve)


def texts(svg: str) -> list[str]:
    """All that is written in the picture, in order."""
    return [one.text or "" for one in ET.fromstring(svg).iter(f"{SVG}text")]


def line_to(svg: str, colour: str) -> list[float]:
    """Numbers of the first path or polyline that is drawn in the colour."""
    for one in ET.fromstring(svg).iter():
        if one.get("stroke") == colour:
            return [float(number) for number in re.findall(r"-?[\d.]+", one.get("d") or one.get("points") or "")]
    return []


def test_the_picture_shows_what_was_chosen_deadline_and_budget():
    found = plan()
    assert found.chosen is not None
    svg = curve_svg(found, 6 * HOUR, 120)
    words = texts(svg)
    assert "deadline in 6 h" in words
    assert "budget $120.00" in words
    (chosen,) = [text for text in words if text.startswith("● chosen")]
    assert f"{found.chosen.instances} instances, {dollars(found.chosen.usd.p50)}" in chosen
    assert f"{span(found.chosen.finish.p50)} to {span(found.chosen.finish.p95)}" in chosen
    assert f"{found.curve[-1].instances}×" in words


def test_it_tells_those_who_do_not_see_it_the_plans_reason():
    found = plan()
    root = ET.fromstring(curve_svg(found, None, None))
    assert root.get("role") == "img"
    labels = (root.get("aria-labelledby") or "").split()
    told = {one.get("id"): one.text for one in root if one.get("id") in labels}
    assert told == {"title": "Price against finish time", "about": found.reason}


def test_the_line_falls_in_steps_from_the_fastest_to_the_cheapest():
    svg = curve_svg(made_of(candidate(HOUR, 80), candidate(2 * HOUR, 40), candidate(8 * HOUR, 30)), None, None)
    numbers = line_to(svg, LINE)
    points = list(zip(numbers[::2], numbers[1::2], strict=True))
    assert len(points) == 6
    assert points == sorted(points)  # to the right, and down: y grows downwards
    heights = [HEIGHT - 62 - points[i][1] for i in (0, 2, 4)]
    assert [round(height / heights[2], 2) for height in heights] == [2.67, 1.33, 1.0]


def test_the_line_leads_through_what_was_chosen_and_leaves_out_what_is_dearer_and_later():
    chosen, dearer = candidate(4 * HOUR, 35), candidate(5 * HOUR, 60)
    svg = curve_svg(made_of(candidate(HOUR, 80), dearer, candidate(8 * HOUR, 30), chosen=chosen), None, None)
    assert len(line_to(svg, LINE)) == 2 * 6
    (dot,) = [one for one in ET.fromstring(svg).iter(f"{SVG}circle") if one.get("fill") == CHOSEN]
    assert [float(dot.get("cx") or 0), float(dot.get("cy") or 0)] == line_to(svg, LINE)[4:6]


def test_the_deadline_stands_where_a_fleet_would_be_done_just_in_time():
    just = candidate(2 * HOUR, 40)
    svg = curve_svg(made_of(candidate(HOUR, 80), just, chosen=just), just.finish.p95, 40)
    x = next(one.get("cx") for one in ET.fromstring(svg).iter(f"{SVG}circle") if one.get("fill") == CHOSEN)
    y = next(one.get("cy") for one in ET.fromstring(svg).iter(f"{SVG}circle") if one.get("fill") == CHOSEN)
    assert line_to(svg, DEADLINE)[0] == float(x or 0)
    assert line_to(svg, BUDGET)[1] == float(y or 0)


@pytest.mark.parametrize(
    ("deadline", "budget", "said"),
    [
        (600.0, None, "deadline in 10 min: cannot be met"),
        (-600.0, None, "the deadline was 10 min ago: cannot be met"),
        (400 * 24 * HOUR, None, "deadline in 400 d →"),
        (None, 1.0, "budget $1.00: too little"),
        (None, 1e6, "↑ budget $1,000,000"),
    ],
)
def test_what_is_impossible_or_far_away_is_said(deadline: float | None, budget: float | None, said: str):
    assert said in texts(curve_svg(plan(deadline, budget), deadline, budget))


def test_without_a_fleet_the_picture_says_so():
    nothing = make_plan(WORK, [], [], Target())
    assert "no fleet can do the work" in texts(curve_svg(nothing, HOUR, 1))
    done = make_plan(Work(0, 1, 0, 0), [L40S], [], Target())
    assert "nothing is left to do" in texts(curve_svg(done, HOUR, 1))
    assert "| fleet |" not in curve_markdown(nothing, HOUR, 1)


def test_names_of_offers_cannot_break_the_picture_or_the_table():
    evil = PlannedOffer("a<b>&'\"\x00\ud800|c", 1, 1, 1)
    one = candidate(HOUR, 1, option=evil)
    found = made_of(one, chosen=one, reason=f"]]>{evil.name}\n# heading")
    shown = [words.text for words in ET.fromstring(curve_svg(found, None, None)).iter(f"{SVG}title")]
    assert any("a<b>&'\"  |c" in (text or "") for text in shown)
    markdown = curve_markdown(found, None, None)
    assert "a<b>&'\"  \\|c" in markdown
    assert "\n# heading" not in markdown


def test_the_markdown_holds_the_picture_the_reason_and_the_alternatives():
    found = plan()
    image, _, reason, _, *table = curve_markdown(found, 6 * HOUR, 120).splitlines()
    inside = re.fullmatch(r"!\[Price against finish time\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", image)
    assert inside is not None
    assert base64.b64decode(inside[1]).decode() == curve_svg(found, 6 * HOUR, 120)
    assert reason == found.reason
    assert [line.split(" | ")[0] for line in table[2:]] == ["| **chosen**", "| earliest"] + ["| next best"] * len(
        found.next_best
    )
    assert len(found.next_best) > 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0 s"),
        (0.25, "0.25 s"),
        (9.7, "10 s"),
        (59.6, "1 min"),
        (250, "4 min 10 s"),
        (599.7, "10 min"),
        (601, "10 min"),
        (3599, "1 h"),
        (4.35 * HOUR, "4 h 21 min"),
        (60 * HOUR, "60 h"),
        (156 * HOUR, "6 d 12 h"),
    ],
)
def test_times_are_short_and_never_sixty_of_anything(seconds: float, said: str):
    assert span(seconds) == said


figures = st.floats(0, 1e9) | st.sampled_from([0.0, 1e-9, math.inf, math.nan])
intervals = st.builds(Interval, figures, figures)
fleets = st.lists(st.tuples(st.sampled_from([L40S, H100, SPOT]), st.integers(1, 500)), max_size=3).map(tuple)
candidates = st.builds(Candidate, fleets, intervals, intervals)
limits = st.none() | st.floats(-1e9, 1e9)


@pytest.mark.slow
@given(st.lists(candidates, max_size=6), st.none() | candidates, limits, limits.map(lambda usd: usd and abs(usd)))
def test_no_plan_breaks_the_picture_and_nothing_lies_outside(
    curve: list[Candidate], chosen: Candidate | None, deadline: float | None, budget: float | None
):
    svg = curve_svg(made_of(*curve, chosen=chosen), deadline, budget)
    for one in ET.fromstring(svg).iter():
        assert "nan" not in "".join(value for name, value in one.items() if name in ("d", "points", "x", "cx"))
        for across, down in (("x", "y"), ("cx", "cy")):
            assert 0 <= float(one.get(across, 0)) <= WIDTH
            assert 0 <= float(one.get(down, 0)) <= HEIGHT
    assert len(svg) < 20_000
    assert curve_markdown(made_of(*curve, chosen=chosen), deadline, budget)
