"""A plan as a picture: what the work costs against when it is done, with deadline, budget and what was chosen.

An SVG without scripts, fonts or links, so that it shows wherever an image does: in Dagster's metadata, a mail, a file.
The line goes down in steps: at each finish time it is at the cost of the cheapest fleet that is done by then (P95).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpu_runner.money import format_usd
from gpu_runner.planner.types import Candidate, Plan, say_fleet

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 66, 24, 58, 62
INK, SOFT, GRID = "#1f2733", "#5b6675", "#e3e7ec"
LINE, CHOSEN, DEADLINE, BUDGET = "#2b62c4", "#c2410c", "#a8201a", "#6b3fa0"
FONT = "font-family='system-ui,-apple-system,Segoe UI,Roboto,Helvetica,Arial,sans-serif'"
HALO = "paint-order='stroke' stroke='#fff' stroke-width='4' stroke-linejoin='round'"
TICK_GAP, LABEL_GAP, WORD = 52, 30, 6.4  # pixels between labels of the axis, of points; width of a letter
FAR = 30.0  # a deadline more than so many times as far as all finishes is only written down
HIGH = 1.8  # and a budget so many times as high as all costs
NOTHING = 1e-6  # US dollars that are drawn as none
NARROW, FEW = 6.0, 8  # a time axis whose end is less than so many times its start has even ticks, so many at most
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_UNITS = [(_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min"), (1.0, "s")]
_TICKS = {"s": (1, 2, 5, 10, 20, 30), "min": (1, 2, 5, 10, 20, 30), "h": (1, 2, 4, 8, 12)}
_TICKS |= {"d": (1, 2, 4, 7, 14, 30, 60, 120, 240, 500, 1000, 2000, 4000)}
_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800]
_STEPS += [3600 * hours for hours in (1, 2, 3, 6, 12, 24, 48, 96, 168, 336, 720, 2400, 9600)]


@dataclass(frozen=True, slots=True)
class Axes:
    """From seconds (logarithmic) and US dollars (linear, from 0) to pixels."""

    first: float
    last: float
    top: float

    @classmethod
    def around(cls, shown: Sequence[Candidate], deadline: float | None, budget: float | None) -> Axes:
        """Axes that hold all candidates, and deadline and budget unless they are far away."""
        slowest = max(one.finish.p95 for one in shown)
        seconds = [second for one in shown for second in (one.finish.p50, one.finish.p95)]
        if deadline is not None and 0 < deadline <= FAR * slowest:
            seconds.append(deadline)
        dearest = max(one.usd.p95 for one in shown)
        usd = max(dearest, budget if budget is not None and budget <= HIGH * dearest else 0.0)
        first, last = max(1.0, min(seconds)), max(2.0, *seconds)
        room = max(1.15, (last / first) ** 0.06)
        return cls(max(0.5, first / room), last * room, usd * 1.12 if usd > NOTHING else 1.0)

    def x(self, seconds: float) -> float:
        """Pixels from the left, within the picture."""
        part = math.log(max(seconds, self.first) / self.first) / math.log(self.last / self.first)
        return LEFT + min(1.0, part) * (WIDTH - LEFT - RIGHT)

    def y(self, usd: float) -> float:
        """Pixels from above, within the picture."""
        return HEIGHT - BOTTOM - min(1.0, max(0.0, usd / self.top)) * (HEIGHT - TOP - BOTTOM)


def curve_svg(plan: Plan, deadline: float | None, budget: float | None) -> str:
    """The plan's curve. `deadline`: seconds from now, `budget`: US dollars from now on; None: there is none."""
    shown = _finite([*plan.curve, *([plan.chosen] if plan.chosen else [])])
    curve = _falling(shown)
    if not shown:
        words = "nothing is left to do" if plan.chosen else "no fleet can do the work"
        return _picture(plan, [_text(WIDTH / 2, HEIGHT / 2, words, SOFT, anchor="middle", size=15)])
    axes = Axes.around(shown, deadline, budget)
    parts = [*_grid(axes), *_curve(axes, curve)]
    if deadline is not None:
        missed = plan.earliest is not None and plan.earliest.finish.p95 > deadline
        parts += _deadline(axes, deadline, ": cannot be met" if missed else "")
    if budget is not None:
        parts += _budget(axes, budget, ": too little" if plan.chosen is None else "")
    if plan.chosen is not None and plan.chosen in shown:
        parts += _chosen(axes, plan.chosen)
    return _picture(plan, parts)


def curve_markdown(plan: Plan, deadline: float | None, budget: float | None) -> str:
    """The picture, the plan's reason, and what was chosen beside the alternatives: for Dagster's metadata."""
    picture = base64.b64encode(curve_svg(plan, deadline, budget).encode()).decode()
    named = [("**chosen**", plan.chosen), ("earliest", plan.earliest)]
    named += [("next best", one) for one in plan.next_best]
    lines = [_row(name, one) for name, one in named if one is not None and one.fleet and _finite([one])]
    head = ["| | fleet | done in | at P95 | $ | at P95 |", "|:--|:--|--:|--:|--:|--:|"] if lines else []
    image = f"![Price against finish time](data:image/svg+xml;base64,{picture})"
    return "\n".join([image, "", _plain(plan.reason), "", *head, *lines]).rstrip()


def _row(name: str, one: Candidate) -> str:
    fleet = _plain(say_fleet(one)).replace("|", "\\|")
    times = f"{span(one.finish.p50)} | {span(one.finish.p95)}"
    return f"| {name} | {fleet} | {times} | {dollars(one.usd.p50)} | {dollars(one.usd.p95)} |"


def dollars(usd: float) -> str:
    """`$0.0123`, `$4.20`, `$1,234`."""
    return f"${format_usd(round(usd))[:-3]}" if usd >= 1000 else f"${format_usd(usd)}"


def _finite(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that can be drawn: with work to do, and an end."""
    return [
        one
        for one in candidates
        if one.fleet and all(map(math.isfinite, (one.finish.p50, one.finish.p95, one.usd.p50, one.usd.p95)))
    ]


def _falling(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that nothing is as soon and as cheap as, soonest first."""
    found: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.finish.p95, one.usd.p50)):
        if not found or one.usd.p50 < found[-1].usd.p50:
            found.append(one)
    return found


def _picture(plan: Plan, parts: Sequence[str]) -> str:
    """The frame, with the plan's reason for those who do not see it."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' "
        f"role='img' aria-labelledby='title about' {FONT} font-size='12'>"
        f"<title id='title'>Price against finish time</title><desc id='about'>{_escaped(plan.reason)}</desc>"
        f"<rect width='{WIDTH}' height='{HEIGHT}' rx='6' fill='#fff'/>"
        + _text(LEFT, 26, "Price against finish time", INK, size=15, weight=600)
        + "".join(parts)
        + "</svg>"
    )


def _grid(axes: Axes) -> Iterator[str]:
    """Both axes with their labels."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    step = _step(axes.top)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    for number in range(int(axes.top / step) + 1):
        y = axes.y(number * step)
        yield f"<path d='M{LEFT} {y:.1f}H{right}' stroke='{GRID if number else SOFT}'/>"
        yield _text(LEFT - 8, y + 4, f"${number * step:,.{digits}f}" if number else "$0", SOFT, anchor="end")
    free = -math.inf
    for seconds, label in _ticks(axes.first, axes.last):
        x = axes.x(seconds)
        if x >= free:
            yield f"<path d='M{x:.1f} {bottom}v5' stroke='{SOFT}'/>"
            yield _text(x, bottom + 19, label, SOFT, anchor="middle")
            free = x + TICK_GAP
    words = "done within, from now (19 of 20 times)  ·  line: expected cost, shade: cost 19 of 20 times"
    yield _text((LEFT + right) / 2, HEIGHT - 14, words, SOFT, anchor="middle")


def _ticks(first: float, last: float) -> Iterator[tuple[float, str]]:
    """Round times within the axis: even steps on a narrow one, growing ones on a wide one."""
    if last / first < NARROW:
        step = next((step for step in _STEPS if (last - first) / step <= FEW), _STEPS[-1])
        size, unit = next(found for found in _UNITS if step >= found[0])
        for number in range(math.ceil(first / step), math.floor(last / step) + 1):
            yield number * step, f"{number * step / size:g} {unit}"
        return
    for size, unit in reversed(_UNITS):
        for number in _TICKS[unit]:
            if first <= number * size <= last:
                yield number * size, f"{number} {unit}"


def span(seconds: float) -> str:
    """`45 s`, `4 min 10 s`, `43 min`, `4 h 21 min`, `60 h`, `6 d 12 h`: the two largest units, if not 0."""
    seconds = max(0.0, seconds)
    for (large, name), (small, below) in pairwise(_UNITS):
        exact = 1.0 if small == 1.0 and seconds >= 10 * _MINUTE else None  # seconds are no matter then
        whole = round(seconds / (_MINUTE if exact else small)) * (_MINUTE if exact else small)
        if whole >= (4 * large if large == _DAY else large):
            rest = round((whole % large) / small)
            return f"{whole // large:.0f} {name}" + (f" {rest} {below}" if rest else "")
    return f"{round(seconds)} s" if seconds >= 9.5 else f"{seconds:.2g} s"


def _step(top: float) -> float:
    """1, 2 or 5 times a power of ten: four to nine lines."""
    power: float = 10.0 ** math.floor(math.log10(top / 4))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= top / 4 * (1 + 1e-9))


def _curve(axes: Axes, points: Sequence[Candidate]) -> Iterator[str]:
    """The steps, the shade above them, and the number of instances at each."""
    end = axes.x(axes.last)
    line = _steps([(axes.x(one.finish.p95), axes.y(one.usd.p50)) for one in points], end)
    above = _steps([(axes.x(one.finish.p95), axes.y(one.usd.p95)) for one in points], end)
    shade = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*line, *reversed(above)])
    yield f"<polygon points='{shade}' fill='{LINE}' fill-opacity='.13'/>"
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
    yield f"<polyline points='{drawn}' fill='none' stroke='{LINE}' stroke-width='2' stroke-linejoin='round'/>"
    free = -math.inf
    for one in points:
        x, y = axes.x(one.finish.p95), axes.y(one.usd.p50)
        yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{LINE}'><title>{_escaped(_about(one))}</title></circle>"
        if x >= free:
            yield _text(x - 6, y + 15, f"{one.instances}×", LINE, anchor="end", halo=True)
            free = x + LABEL_GAP


def _steps(points: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    found = [points[0]]
    for (_, y), (x, below) in pairwise(points):
        found += [(x, y), (x, below)]
    return [*found, (end, found[-1][1])]


def _deadline(axes: Axes, deadline: float, remark: str) -> Iterator[str]:
    """A line up, with what is too late shaded; words at the border when it is far away or has passed."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    if deadline > axes.last:
        yield _text(right, TOP - 8, f"deadline in {span(deadline)} →", DEADLINE, anchor="end", weight=600)
        return
    x = axes.x(deadline) if deadline > 0 else LEFT
    words = (f"deadline in {span(deadline)}" if deadline > 0 else f"the deadline was {span(-deadline)} ago") + remark
    yield f"<path d='M{x:.1f} {TOP}H{right}V{bottom}H{x:.1f}Z' fill='{DEADLINE}' opacity='.06'/>"
    yield f"<path d='M{x:.1f} {TOP}V{bottom}' stroke='{DEADLINE}' stroke-width='1.5' stroke-dasharray='6 4'/>"
    yield _text(x, TOP - 8, words, DEADLINE, anchor=_anchor(x, words), weight=600)


def _budget(axes: Axes, budget: float, remark: str) -> Iterator[str]:
    """A line across; words at the border when it is far above all costs."""
    words, right = f"budget {dollars(budget)}{remark}", WIDTH - RIGHT
    if budget > axes.top:
        yield _text(right - 6, TOP + 16, f"↑ {words}", BUDGET, anchor="end", weight=600, halo=True)
        return
    y = axes.y(budget)
    yield f"<path d='M{LEFT} {y:.1f}H{right}' stroke='{BUDGET}' stroke-width='1.5' stroke-dasharray='2 4'/>"
    yield _text(right - 6, max(y - 6, TOP + 16), words, BUDGET, anchor="end", weight=600, halo=True)


def _chosen(axes: Axes, one: Candidate) -> Iterator[str]:
    """The chosen fleet: a large dot, whiskers from the median finish and to the cost at P95; words beside the title."""
    x, y = axes.x(one.finish.p95), axes.y(one.usd.p50)
    sooner, dearer = axes.x(one.finish.p50), axes.y(one.usd.p95)
    yield f"<path d='M{sooner:.1f} {y:.1f}H{x:.1f}V{dearer:.1f}' fill='none' stroke='{CHOSEN}' stroke-width='2.5'/>"
    yield f"<path d='M{sooner:.1f} {y - 4:.1f}v8M{x - 4:.1f} {dearer:.1f}h8' stroke='{CHOSEN}' stroke-width='2.5'/>"
    yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='7' fill='{CHOSEN}' stroke='#fff' stroke-width='2'>"
    yield f"<title>{_escaped(_about(one))}</title></circle>"
    instances = "1 instance" if one.instances == 1 else f"{one.instances} instances"
    words = f"● chosen: {instances}, {dollars(one.usd.p50)}, {span(one.finish.p50)} to {span(one.finish.p95)}"
    yield _text(WIDTH - RIGHT, 26, words, CHOSEN, anchor="end", weight=600)


def _anchor(x: float, words: str) -> str:
    """Words begin, are centred or end at `x`, so that they stay within the picture."""
    half = len(words) * WORD / 2
    if x - half < LEFT:
        return "start"
    return "end" if x + half > WIDTH - RIGHT else "middle"


def _about(one: Candidate) -> str:
    times = f"done in {span(one.finish.p50)}, P95 {span(one.finish.p95)}"
    return f"{say_fleet(one)}: {times}, {dollars(one.usd.p50)}, P95 {dollars(one.usd.p95)}"


def _text(
    x: float,
    y: float,
    words: str,
    colour: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: int = 400,
    halo: bool = False,
) -> str:
    more = f" font-size='{size}'" if size != 12 else ""
    more += f" font-weight='{weight}'" if weight != 400 else ""
    more += f" text-anchor='{anchor}'" if anchor != "start" else ""
    more += f" {HALO}" if halo else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' fill='{colour}'{more}>{_escaped(words)}</text>"


def _escaped(words: str) -> str:
    """Fit for XML: what a provider calls its offers is not ours to trust."""
    return _plain(words).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;")


def _plain(words: str) -> str:
    """On one line, without characters that XML does not have."""
    return "".join(c if c.isprintable() else " " for c in words)
