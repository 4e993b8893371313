"""Imports between folders as one picture: a dependency matrix (SVG), of the working tree or of a commit.

    python benchmarks/import_matrix.py FILE.svg [--commit REV]

A row imports, a column is imported; the darker a cell, the more modules of the row's folder import from the column's.
Folders stand below those that import them, so every import between folders is right of the diagonal. What is left of
it, drawn red, closes a circle. Modules that lie directly in a root, or in `api`, are its first and its last
(definitions and tags), so their imports are grey.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.sizes import ROOTS, importers  # noqa: E402

CELL, LEFT, TOP = 9, 190, 22
SHADES = ((1, 0.3), (3, 0.5), (8, 0.75), (sys.maxsize, 1.0))  # importing modules at most, opacity
SPLIT = "batch_assets/api"  # large, so its folders are drawn one by one


def folder_of(file: Path) -> str:
    """The folder that a module is drawn in: one below a root, below `api` one further; a root for its own modules."""
    depth = 3 if file.as_posix().startswith(f"{SPLIT}/") else 2
    return "/".join(file.parent.parts[:depth])


def between_folders(found: dict[Path, set[Path]]) -> Counter[tuple[str, str]]:
    """(importing folder, imported folder): how many modules of the first import from the second."""
    pairs = {(by, folder_of(file)) for file, all_by in found.items() for by in all_by}
    return Counter((folder_of(by), to) for by, to in pairs if folder_of(by) != to)


def in_order(folders: set[str], edges: Counter[tuple[str, str]]) -> list[str]:
    """Floor by floor, each folder below those that import it; roots first on their floor."""
    order: list[str] = []
    for root in ROOTS:
        order += [root] if root in folders else []
        left = {folder for folder in folders if folder.startswith(f"{root}/")}
        while left:
            waits = {one: sum((other, one) in edges for other in left - {one}) for one in left}
            order.append(min(left, key=lambda one: (waits[one], one)))
            left.remove(order[-1])
    return order


def square(column: int, row: int) -> str:
    """One cell, as a path."""
    return f"M{LEFT + column * CELL} {TOP + row * CELL}h{CELL}v{CELL}h-{CELL}z"


def picture(found: dict[Path, set[Path]]) -> str:
    """The matrix as SVG, without scripts, fonts or links."""
    edges = between_folders(found)
    order = in_order({folder_of(file) for file in found}, edges)
    size, place = len(order) * CELL, {folder: number for number, folder in enumerate(order)}
    grid = "".join(f"M{LEFT} {TOP + at}h{size}M{LEFT + at} {TOP}v{size}" for at in range(0, size + 1, CELL))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + size + 8}" height="{TOP + size + 8}" '
        'font-family="sans-serif" font-size="8">',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="4" y="12">row imports column; {len(order)} folders, '
        f"{len(edges)} imports between them</text>",
        f'<path d="{grid}" stroke="#eee"/>',
    ]
    for folder, number in place.items():
        parts.append(f'<text x="{LEFT - 4}" y="{TOP + number * CELL + 7}" text-anchor="end">{escape(folder)}</text>')
    cells: dict[tuple[str, float], list[str]] = {("#ccc", 1.0): [square(number, number) for number in place.values()]}
    for (by, to), count in sorted(edges.items()):
        back = place[by] > place[to]
        colour = "#999" if {by, to} & {*ROOTS, SPLIT} else "#c00" if back else "#06c"
        shade = next(shade for most, shade in SHADES if count <= most)
        cells.setdefault((colour, shade), []).append(square(place[to], place[by]))
    for (colour, shade), squares in cells.items():
        parts.append(f'<path d="{"".join(squares)}" fill="{colour}" fill-opacity="{shade}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--commit", help="of this repository; the working tree when left out")
    asked = parser.parse_args()
    if asked.commit is None:
        drawn = picture(importers(ROOT))
    else:
        with tempfile.TemporaryDirectory() as folder:
            packed = subprocess.run(
                ["git", "archive", asked.commit, *ROOTS], cwd=ROOT, check=True, stdout=subprocess.PIPE
            )
            subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
            drawn = picture(importers(Path(folder)))
    asked.file.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
