"""Test modules that are marked as a whole: `pytestmark = pytest.mark.slow`, or which of `soak` and `vllm`."""

from __future__ import annotations

import re
from pathlib import Path

MARKS = ("slow", "soak", "vllm")
_WHOLE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(\w+)", re.MULTILINE)


def mark_of(module: Path) -> str | None:
    """The one of `MARKS` that all its tests have."""
    whole = _WHOLE.search(module.read_text())
    return whole[1] if whole and whole[1] in MARKS else None
