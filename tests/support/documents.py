"""The fenced blocks of the documentation, each with the mark that says how it is tested.

A mark is an HTML comment on the line before the fence: `<!-- test: home -->`. MARKS says which there are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
DATASETS, OPERATIONS = REPOSITORY / "docs" / "datasets.md", REPOSITORY / "docs" / "operations.md"
TUTORIAL = REPOSITORY / "docs" / "tutorial.md"
REFERENCE = REPOSITORY / "docs" / "reference.md"
FLEET = REPOSITORY / "docs" / "fleet.md"
DEADLINES = REPOSITORY / "docs" / "deadlines.md"
PROVIDERS = REPOSITORY / "docs" / "providers.md"
DEPLOYMENT = REPOSITORY / "docs" / "deployment.md"
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
EXAMPLES = sorted((REPOSITORY / "examples").glob("**/README.md"))

# Every page that is written for people: DOCUMENTS say what is so today, HISTORY keeps what was. Blocks are run in this
# order, those of the README and the tutorial first.
HISTORY = [REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs" / "history").glob("*.md"))]
DOCUMENTS = [README, TUTORIAL, DATASETS, OPERATIONS, FLEET, DEADLINES, PROVIDERS, DEPLOYMENT, ARCHITECTURE]
_FOUND = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md")), *EXAMPLES]
DOCUMENTS += [page for page in _FOUND if page not in (*DOCUMENTS, *HISTORY)]
PAGES = [*DOCUMENTS, *HISTORY]

# mark: (language, how the block is tested)
MARKS = {
    "home": (
        "bash",
        "run in a home that holds a finished dataset `example`: its commands in process, as it stands (slow)",
    ),
    "project": ("bash", "run in a copy of the project, one after the other (slow)"),
    "engine": ("bash", "run against an engine at the address in the text (slow)"),
    "demo": ("bash", "run in a new home (slow)"),
    "ci": ("bash", "run by .ci/run"),
    "example": ("bash", "of examples/: run as it stands, one after the other, against a simulated engine (slow)"),
    "client": ("bash", "of examples/: run against a service beside a simulated engine (slow)"),
    "table": ("python", "run beside a store with the table of `example`, one after the other"),
    "spec": ("yaml", "a defs.yaml: loaded, and a snapshot is built from files that the test makes"),
    "chain": ("yaml", "datasets that read each other's tables: each is built, answered and published"),
    "fleet": ("yaml", "a fleet.yaml: loaded, and its providers are asked for their offers"),
    "regenerate": ("yaml", "run config of `example`: checked against the op"),
    "postgres": ("yaml", "part of a dagster.yaml: used with a server (slow)"),
    "none": ("", "not run, for the reason that follows"),
}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- test: (\w+)(?:, (.+))? -->\n\Z")


@dataclass(frozen=True)
class Block:
    """One fenced block. `mark` and `reason` are empty where there is none."""

    file: Path
    line: int
    language: str
    mark: str
    reason: str
    text: str

    @property
    def name(self) -> str:
        """Where it stands, for the names of tests."""
        return f"{self.file.name}:{self.line}"

    def yaml(self) -> Any:
        """The block, parsed."""
        return yaml.safe_load(self.text)


def blocks(*marks: str, files: list[Path] = DOCUMENTS) -> list[Block]:
    """The blocks with these marks, in order; all blocks when no mark is given."""
    found = []
    for file in files:
        text = file.read_text()
        for fence in _FENCE.finditer(text):
            mark = _MARK.search(text[: fence.start()])
            line = text.count("\n", 0, fence.start()) + 1
            name, reason = (mark[1], mark[2] or "") if mark else ("", "")
            found.append(Block(file, line, fence[1], name, reason, fence[2]))
    return [block for block in found if not marks or block.mark in marks]
