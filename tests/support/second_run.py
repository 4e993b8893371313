"""`python tests/support/second_run.py PYTEST_OPTIONS`: run tests; those that failed once more, alone.

A machine that does other work too can make a sound test fail, and one red test keeps everything else from landing. So
what fails is run again in one process, when nothing runs beside it. What passes then is unstable: it is printed, has to
be listed in `tests/unstable.txt` with its reason, and is mended next. A test that has been listed for more than
`LISTED_DAYS` gets no second run, and neither does anything when more than `MOST` tests failed. What is unstable is
added to the file that UNSTABLE_LOG names, too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

LISTED = Path(__file__).parents[1] / "unstable.txt"
LISTED_DAYS = 7
MOST = 10
TESTS_FAILED = 1  # pytest's exit status when tests were run and some of them failed

_ENTRY = re.compile(r"(?P<since>\d{4}-\d\d-\d\d) (?P<test>tests/\S+\.py::[^\s:]+): (?P<reason>\S.*)")


@dataclass(frozen=True, slots=True)
class Unstable:
    """A listed test: the day on which it was seen first, and what was seen."""

    since: date
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit status of one pytest, and the ids of the tests that failed."""

    status: int
    failed: frozenset[str]


def entries(text: str) -> dict[str, Unstable]:
    """What is listed, by the id of the test without parameters. ValueError: a line without day, test or reason."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        entry = _ENTRY.fullmatch(line)
        if entry is None:
            raise ValueError(
                f"unstable.txt, line {number}: expected `2026-01-31 tests/test_x.py::test_y: reason`, found {line!r}"
            )
        found[entry["test"]] = Unstable(date.fromisoformat(entry["since"]), entry["reason"])
    return found


def listed_too_long(failed: frozenset[str], listed: dict[str, Unstable], today: date) -> list[str]:
    """Tests among `failed` that had their time to be mended; parameters do not matter."""
    entry = {test: listed.get(test.split("[")[0]) for test in failed}
    return sorted(test for test, known in entry.items() if known and (today - known.since).days > LISTED_DAYS)


def run_twice(
    run: Callable[[bool], Outcome], listed: dict[str, Unstable], today: date, say: Callable[[str], None]
) -> int:
    """Exit status of the tests. `run(again)` runs all of them, or what failed in the run before."""
    first = run(False)
    if first.status != TESTS_FAILED or not first.failed:
        return first.status
    if len(first.failed) > MOST:
        say(f"{len(first.failed)} tests failed: too many for a second run (at most {MOST})")
        return first.status
    if late := listed_too_long(first.failed, listed, today):
        say(f"no second run: listed in unstable.txt for more than {LISTED_DAYS} days: {', '.join(late)}")
        return first.status
    say(f"{len(first.failed)} failed: once more, alone")
    second = run(True)
    for test in sorted(first.failed - second.failed) if second.status in (0, TESTS_FAILED) else ():
        known = listed.get(test.split("[")[0])
        say(f"unstable: {test} ({known.reason if known else 'list it in tests/unstable.txt with its reason'})")
    return second.status


def _pytest(options: Sequence[str], kept: str) -> Callable[[bool], Outcome]:
    """Pytest with these options. `kept`: a folder of ours for its cache, which knows what failed."""

    def run(again: bool) -> Outcome:
        more = ["--last-failed", "--last-failed-no-failures=none", "-n", "0"] if again else []
        command = [sys.executable, "-m", "pytest", *options, "-o", f"cache_dir={kept}", *more]
        status = subprocess.run(command, check=False).returncode
        found = Path(kept) / "v" / "cache" / "lastfailed"
        return Outcome(status, frozenset(json.loads(found.read_text()) if found.exists() else ()))

    return run


def main(options: Sequence[str]) -> int:
    """Exit status."""

    def say(words: str) -> None:
        print(words, flush=True)
        if words.startswith("unstable: ") and (log := os.environ.get("UNSTABLE_LOG")):
            with Path(log).open("a") as file:
                file.write(f"{words}\n")

    with tempfile.TemporaryDirectory() as kept:
        return run_twice(_pytest(options, kept), entries(LISTED.read_text()), date.today(), say)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
