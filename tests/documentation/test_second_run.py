"""What failed is run once more, alone; what passes then is unstable, and is listed for a week at most."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from support.documents import REPOSITORY
from support.second_run import LISTED, MOST, Outcome, entries, run_twice

TODAY = date(2026, 2, 10)
GREEN, RED = Outcome(0, frozenset()), Outcome(1, frozenset({"tests/a.py::test_x[1]"}))


def told(*outcomes: Outcome, listed: str = "") -> tuple[int, list[bool], str]:
    """Exit status, the runs that were made (whether for what had failed), and what was said."""
    left, runs, said = list(outcomes), [], []

    def run(again: bool) -> Outcome:
        runs.append(again)
        return left.pop(0)

    status = run_twice(run, entries(listed), TODAY, said.append)
    return status, runs, "\n".join(said)


def test_each_entry_names_a_test_that_exists() -> None:
    for test in entries(LISTED.read_text()):
        file, name = test.split("::")
        tree = ast.parse((REPOSITORY / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.parametrize(
    "line",
    [
        "tests/test_x.py::test_y: no day",
        "2026-02-01 tests/test_x.py::test_y",
        "2026-02-01 tests/test_x.py::test_y: ",
        "2026-02-01 test_y: slow",
    ],
)
def test_an_entry_without_day_test_or_reason_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="line 1: expected"):
        entries(line)


def test_nothing_is_run_again_when_all_passed() -> None:
    assert told(GREEN) == (0, [False], "")


def test_what_passes_when_it_is_run_alone_is_unstable_and_the_run_is_green() -> None:
    status, runs, said = told(RED, GREEN)
    assert (status, runs) == (0, [False, True])
    assert "unstable: tests/a.py::test_x[1] (list it" in said


def test_what_fails_twice_is_red() -> None:
    status, runs, said = told(RED, RED)
    assert (status, runs) == (1, [False, True])
    assert "unstable" not in said


def test_a_listed_test_has_its_second_run_for_a_week() -> None:
    line = "2026-02-0{} tests/a.py::test_x: seen twice; the killed host is slow"
    status, _, said = told(RED, GREEN, listed=line.format(3))
    assert status == 0 and "the killed host is slow" in said
    assert told(RED, listed=line.format(2))[:2] == (1, [False])


def test_a_run_that_broke_off_or_failed_as_a_whole_is_not_run_again() -> None:
    many = Outcome(1, frozenset(f"tests/a.py::test_{n}" for n in range(MOST + 1)))
    for outcome in (Outcome(2, RED.failed), Outcome(3, frozenset()), Outcome(5, frozenset()), many):
        assert told(outcome)[:2] == (outcome.status, [False])


def test_nothing_is_called_unstable_by_a_second_run_that_broke_off() -> None:
    status, _, said = told(RED, Outcome(3, frozenset()))
    assert status == 3 and "unstable" not in said


@pytest.mark.slow
def test_pytest_runs_only_what_failed_and_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, pathlib\n"
        "def test_passes(): pathlib.Path('passes').open('a').write('x')\n"
        "def test_fails_once():\n"
        "    flag = pathlib.Path('flag')\n"
        "    flag.open('a').write(os.environ.get('PYTEST_XDIST_WORKER', 'alone') + ' ')\n"
        "    assert flag.read_text().endswith('alone ')\n"
    )
    program = REPOSITORY / "tests" / "support" / "second_run.py"
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, str(program), "-q", "-n", "2", "--dist", "worksteal"],
        cwd=tmp_path,
        env={**outside, "UNSTABLE_LOG": str(tmp_path / "log")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "log").read_text().startswith("unstable: test_some.py::test_fails_once")
    assert (tmp_path / "passes").read_text() == "x"
    assert (tmp_path / "flag").read_text().split()[1:] == ["alone"]


def test_ci_runs_all_its_tests_so() -> None:
    """A stage that fails ends it, and nothing stands behind a `||`."""
    script = (REPOSITORY / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script and "-m pytest" not in script
    assert "-m pytest" not in (REPOSITORY / "Makefile").read_text()
    stages = [line for line in script.splitlines() if line.startswith(("make ", ".venv/bin/python tests/"))]
    assert len(stages) == 5  # make test, lint and weights; the slow tests; vLLM's
    assert not any("||" in line or "if " in line for line in stages)
