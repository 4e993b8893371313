"""Histograms as SVG without scripts, fonts or links, and as Markdown for Dagster's metadata.

The background is transparent, and every colour has a contrast of about 4:1 against white and against Dagster's night
background: an image does not learn which theme the page around it has.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence

from batch_assets.asset_metadata.distributions import NO_COMPLETION, Bin, Distribution, TableDistributions

WIDTH, HEIGHT = 460, 210
LEFT, RIGHT, TOP, BOTTOM = 14, 14, 50, 30
INK, SOFT, BAR, FAR, DEAD = "#76808f", "#7d8694", "#4f7fe8", "#8f7ad6", "#d0583f"
FONT = "font-family='system-ui,-apple-system,Segoe UI,Roboto,Helvetica,Arial,sans-serif'"
MOST_REASONS = 6
_NAME_LETTERS = 22
_LINE = 24


def distributions_markdown(found: TableDistributions) -> str:
    """The pictures of a table, below each other; empty when no row was asked."""
    pictures: list[tuple[str, str]] = []
    if found.tokens.most > 0:
        pictures.append(numbers_picture("Output length", "tokens", found.tokens, whole=True))
    if found.reasons:
        pictures.append(reasons_picture("Finish reasons", found.reasons))
    if found.seconds.count:
        pictures.append(numbers_picture("Latency", "seconds", found.seconds, whole=False))
    return "\n\n".join(_markdown(alt, svg) for alt, svg in pictures)


def numbers_picture(title: str, unit: str, values: Distribution, *, whole: bool) -> tuple[str, str]:
    """(the figures in words, SVG) of a distribution of numbers."""
    figures = (
        f"median {figure(values.quantile(0.5))}, P95 {figure(values.quantile(0.95))}, most {figure(values.most)} {unit}"
    )
    return f"{title}: {figures}", _svg(title, figures, _bars(values.bins(whole=whole)))


def reasons_picture(title: str, reasons: Mapping[str, int]) -> tuple[str, str]:
    """(the figures in words, SVG) of counts by name, the largest first."""
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    shown, rest = ordered[:MOST_REASONS], ordered[MOST_REASONS:]
    if rest:
        shown.append(("other", sum(count for _, count in rest)))
    total = sum(reasons.values())
    words = ", ".join(f"{_cut(name)} {count:,}" for name, count in shown)
    height = TOP + _LINE * len(shown) + 8
    return f"{title}: {words}", _svg(title, f"of {total:,} rows", _lines(shown, total), height)


def figure(value: float) -> str:
    """`0.042`, `1.5`, `128`, `12,300`: three significant digits below 1,000, thousands apart."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):g}"


def _bars(bins: Sequence[Bin]) -> Iterator[str]:
    bottom, inner = HEIGHT - BOTTOM, WIDTH - LEFT - RIGHT
    most = max(bin.count for bin in bins)
    tallest = next(number for number, bin in enumerate(bins) if bin.count == most)
    step = inner / len(bins)
    width = min(step - 1.5, 60.0)
    yield _path(f"M{LEFT} {bottom + 0.5}H{WIDTH - RIGHT}", SOFT)
    for number, bin in enumerate(bins):
        height = bin.count / most * (bottom - TOP - 14)
        x, far = LEFT + number * step + (step - width) / 2, math.isinf(bin.last)
        if bin.count:
            height = max(1.5, height)
            yield (
                f"<rect x='{x:.1f}' y='{bottom - height:.1f}' width='{width:.1f}' height='{height:.1f}' rx='1.5' "
                f"fill='{FAR if far else BAR}'/>"
            )
        if number == tallest:
            yield _text(max(x + width / 2, LEFT + 16), bottom - height - 5, f"{bin.count:,}", SOFT, anchor="middle")
    yield from _ticks(bins, step)


def _ticks(bins: Sequence[Bin], step: float) -> Iterator[str]:
    """Where bins begin, as many as have room; what is far off is written at its bin."""
    every = max(1, math.ceil(56 / step))
    for number, bin in enumerate(bins):
        x, far = LEFT + number * step, math.isinf(bin.last)
        if far:
            yield _text(WIDTH - RIGHT, HEIGHT - BOTTOM + 17, f"{figure(bin.first)}+", FAR, anchor="end")
        elif number % every == 0 and (number + every <= len(bins) or len(bins) <= every):
            yield _path(f"M{x:.1f} {HEIGHT - BOTTOM}v4", SOFT)
            anchor = "start" if number == 0 else "middle"
            yield _text(x, HEIGHT - BOTTOM + 17, figure(bin.first), SOFT, anchor=anchor)


def _lines(shown: Sequence[tuple[str, int]], total: int) -> Iterator[str]:
    """A line per name: name, bar, count and share."""
    begin, room = LEFT + 160, WIDTH - RIGHT - LEFT - 160 - 120
    most = max(count for _, count in shown)
    for number, (name, count) in enumerate(shown):
        y = TOP + number * _LINE
        colour = BAR if name in ("stop", "tool_calls") else DEAD if name == NO_COMPLETION else FAR
        yield _text(begin - 10, y + 14, _cut(name), INK, anchor="end")
        width = max(1.5, count / most * room)
        yield f"<rect x='{begin}' y='{y + 3}' width='{width:.1f}' height='14' rx='1.5' fill='{colour}'/>"
        yield _text(begin + width + 8, y + 14, f"{count:,} ({_share(count, total)})", SOFT)


def _share(count: int, total: int) -> str:
    share = 100 * count / total
    return f"{share:.0f}%" if share >= 10 or share == 0 else f"{share:.2g}%" if share >= 0.01 else "<0.01%"


def _svg(title: str, figures: str, parts: Iterator[str], height: int = HEIGHT) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"role='img' {FONT} font-size='12'><title>{_escaped(f'{title}: {figures}')}</title>"
        + _text(LEFT, 20, title, INK, size=14, weight=600)
        + _text(LEFT, 38, figures, SOFT)
        + "".join(parts)
        + "</svg>"
    )


def _markdown(alt: str, svg: str) -> str:
    plain = "".join(c if c.isalnum() or c in " .,:%+" else " " for c in alt)
    return f"![{plain}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def _path(line: str, colour: str) -> str:
    return f"<path d='{line}' stroke='{colour}'/>"


def _text(
    x: float, y: float, words: str, colour: str, *, anchor: str = "start", size: int = 12, weight: int = 400
) -> str:
    more = f" text-anchor='{anchor}'" if anchor != "start" else ""
    more += f" font-size='{size}'" if size != 12 else ""
    more += f" font-weight='{weight}'" if weight != 400 else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' fill='{colour}'{more}>{_escaped(words)}</text>"


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_LETTERS else f"{name[: _NAME_LETTERS - 1]}…"


def _escaped(words: str) -> str:
    """Fit for XML, on one line: what an engine calls its finish reasons is not ours to trust."""
    plain = "".join(c if c.isprintable() else " " for c in words)
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;")
