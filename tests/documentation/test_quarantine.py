"""The quarantine: a test is skipped only while it is listed, with a reason, under its name."""

from __future__ import annotations

import ast

import pytest
from support.documents import REPOSITORY
from support.quarantine import LISTED, entries, reason_of


def test_each_entry_names_a_test_that_exists_and_has_a_reason() -> None:
    for test in entries(LISTED.read_text()):
        file, name = test.split("::")
        tree = ast.parse((REPOSITORY / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, test


def test_a_listed_test_is_skipped_with_all_its_parameters_and_no_other_one_is() -> None:
    listed = entries("# why\n\ntests/e2e/test_fleet.py::test_lost: seen twice in 40 runs; the killed host is slow\n")
    reason = "seen twice in 40 runs; the killed host is slow"
    assert reason_of("tests/e2e/test_fleet.py::test_lost", listed) == reason
    assert reason_of("tests/e2e/test_fleet.py::test_lost[a-b::c]", listed) == reason
    assert reason_of("tests/e2e/test_fleet.py::test_lost_twice", listed) is None
    assert reason_of("tests/e2e/test_s3.py::test_lost", listed) is None


@pytest.mark.parametrize(
    "line", ["tests/test_x.py::test_y", "tests/test_x.py::test_y: ", "test_y: slow", "tests/a.py: b"]
)
def test_an_entry_without_a_test_or_a_reason_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="line 1: expected"):
        entries(line)


def test_ci_gives_a_failed_test_no_second_chance() -> None:
    """A stage that fails ends it: nothing stands behind a `||`, and no option runs failed tests again."""
    script = (REPOSITORY / ".ci" / "run").read_text()
    stages = [line for line in script.splitlines() if line.startswith("make ") or "-m pytest" in line]
    assert len(stages) == 5  # make test, lint and weights; the slow tests; vLLM's
    assert not any("||" in line or "if " in line for line in stages)
    assert "set -euo pipefail" in script
    assert not any(option in script for option in ("--last-failed", "--lf", "--failed-first", "--reruns"))
