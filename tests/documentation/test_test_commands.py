"""Each pytest command that a page of docs/ promises selects a test: a renamed or moved one is no evidence."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
DEFAULT_MARKS = "not slow and not soak and not vllm"
WITH_VALUE = ("-n", "--dist", "-p")
ALL_MARKS = "slow or not slow"
PLUGIN = """
import json, os
def pytest_collection_modifyitems(items):
    found = [(one.nodeid, [mark.name for mark in one.iter_markers()]) for one in items]
    with open(os.environ["COLLECTED"], "w") as file:
        json.dump(found, file)
"""


@dataclass(frozen=True)
class Selection:
    """What a command of pytest selects by."""

    paths: tuple[str, ...]
    marks: str
    names: str

    @classmethod
    def of(cls, command: str) -> Selection:
        """Of the words after `pytest`."""
        words = iter(shlex.split(command[re.search(r"\bpytest ", command).end() :]))  # type: ignore[union-attr]
        paths, marks, names = [], DEFAULT_MARKS, ""
        for word in words:
            if word == "-m":
                marks = next(words)
            elif word == "-k":
                names = next(words)
            elif word in WITH_VALUE:
                next(words)
            elif not word.startswith("-"):
                paths.append(word)
        return cls(tuple(paths), marks, names)

    def selects(self, node: str, marks: list[str]) -> bool:
        """Whether it selects this test."""
        if self.paths and not node.startswith(self.paths):
            return False

        def has_mark(name: str, /, **_: object) -> bool:
            return name in marks

        def has_name(name: str, /, **_: object) -> bool:
            return name.lower() in node.lower()

        if not Expression.compile(self.marks).evaluate(has_mark):
            return False
        return not self.names or Expression.compile(self.names).evaluate(has_name)


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[str]]]:
    """All tests: their names, and their marks."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "names_and_marks.py").write_text(PLUGIN)
    found = {"COLLECTED": str(folder / "collected.json"), "PYTHONPATH": str(folder), "PYTEST_ADDOPTS": ""}
    words = ["-p", "names_and_marks", "-p", "no:cacheprovider", "--collect-only", "-q", "-m", ALL_MARKS, "tests"]
    command = [sys.executable, "-m", "pytest", *words]
    subprocess.run(command, cwd=REPOSITORY, env=os.environ | found, stdout=subprocess.DEVNULL, check=True, timeout=300)
    return [(node, marks) for node, marks in json.loads((folder / "collected.json").read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_command_selects_a_test(page: Path, collected: list[tuple[str, list[str]]]) -> None:
    commands = [found for found in re.findall(r"`([^`\n]*\bpytest [^`\n]*)`", page.read_text()) if "tests/" in found]
    nothing = [one for one in commands if not any(Selection.of(one).selects(*test) for test in collected)]
    assert nothing == [], "these commands select no test"


def test_a_command_that_selects_nothing_is_seen() -> None:
    tests = [("tests/e2e/test_a.py::test_kill[x]", ["soak"]), ("tests/test_b.py::test_c", [])]
    wanted = {
        "SOAK pytest -m soak -s tests/e2e/test_a.py -k kill": 1,
        'pytest tests -m "slow or not slow"': 2,
        "pytest -m slow tests/e2e/test_a.py": 0,
        "pytest tests/test_b.py -k d_": 0,
        "pytest -n 2 tests": 1,
    }
    for command, count in wanted.items():
        assert sum(Selection.of(command).selects(*test) for test in tests) == count, command
