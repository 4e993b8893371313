"""How commands print: JSON for programs, and for people lines that are wrapped on a terminal alone."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# DEL and the C1 controls, line and paragraph separators, and what turns the direction of writing around.
_STEERING = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
UNWRAPPED = 10_000  # columns of what goes into a file or a pipe: ids and paths are to stay whole


def output_console() -> Console:
    """Standard output for people. In a file or a pipe nothing is wrapped; a table is as wide as what it holds."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=UNWRAPPED)


def print_json(value: dict[str, Any]) -> None:
    """One line of JSON on stdout, at once. What could steer a terminal is written as an escape, as JSON may."""
    line = json.dumps(value, ensure_ascii=False)
    sys.stdout.write(_STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", line) + "\n")
    sys.stdout.flush()
