"""Tests that are skipped because they fail at times: `quarantine.txt` lists them, each with its reason."""

from __future__ import annotations

import re
from pathlib import Path

LISTED = Path(__file__).parents[1] / "quarantine.txt"
_ENTRY = re.compile(r"(?P<test>tests/\S+\.py::[^\s:]+): (?P<reason>\S.*)")


def entries(text: str) -> dict[str, str]:
    """Reasons by the id of the test, without parameters. ValueError: a line that has no test or no reason."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        entry = _ENTRY.fullmatch(line)
        if entry is None:
            raise ValueError(
                f"quarantine.txt, line {number}: expected `tests/test_x.py::test_y: reason`, found {line!r}"
            )
        found[entry["test"]] = entry["reason"]
    return found


def reason_of(test: str, listed: dict[str, str]) -> str | None:
    """Why the test with this id is in quarantine; its parameters do not matter. None: it is not."""
    return listed.get(test.split("[")[0])
