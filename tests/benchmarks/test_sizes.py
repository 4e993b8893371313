"""The counts that `make lint` prints."""

from __future__ import annotations

from pathlib import Path

from benchmarks.sizes import LONG, line_counts, report


def test_lines_are_counted_by_floor_and_long_modules_are_named_longest_first(tmp_path: Path) -> None:
    for file, lines in (("batch_assets/a.py", 3), ("resources/b.py", LONG + 1), ("gpu_runner/c/d.py", LONG + 2)):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("x = 1\n" * lines)
    assert report(line_counts(tmp_path)).splitlines() == [
        "batch_assets         3 lines in    1 modules",
        "resources          401 lines in    1 modules",
        "gpu_runner         402 lines in    1 modules",
        "in all             806 lines in    3 modules",
        "    402  gpu_runner/c/d.py",
        "    401  resources/b.py",
    ]
