"""How commands print: JSON for programs, tables that are as wide in a file or a pipe as they need."""

from __future__ import annotations

import json
import sys
from typing import Any

PLAIN_WIDTH, WIDE_WIDTH = 160, 180  # columns of a table that goes into a file or a pipe; of one with long reasons


def print_json(value: dict[str, Any]) -> None:
    """One line of JSON on stdout, at once."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()
