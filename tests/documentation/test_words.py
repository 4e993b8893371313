"""The words of the glossary are those of the code, and words that were given up do not come back."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from support.documents import REPOSITORY

PRODUCT = ("batch_assets", "resources", "gpu_runner")
MOST_WORDS = 40
GIVEN_UP = {"shift", "hire", "crew", "heart", "renter", "site"}


@cache
def named(*roots: str) -> dict[str, str]:
    """Folders, modules and classes by name, with one file that has them."""
    found: dict[str, str] = {}
    for file in (file for root in roots for file in sorted((REPOSITORY / root).rglob("*.py"))):
        place = str(file.relative_to(REPOSITORY))
        found |= dict.fromkeys(file.relative_to(REPOSITORY).with_suffix("").parts, place)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] = place
    return found


def glossary() -> list[tuple[str, list[str]]]:
    """Each word, with the names that it has in the code."""
    text = (REPOSITORY / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    return [(word, re.findall(r"`([^`]+)`", names)) for word, names in rows if word not in ("word", "---")]


@pytest.mark.slow
def test_the_glossary_is_short_and_names_what_exists() -> None:
    words = glossary()
    assert 20 < len(words) <= MOST_WORDS
    assert len({word for word, _ in words}) == len(words)
    assert sum(bool(names) for _, names in words) > 30
    known = named(*PRODUCT)
    assert [(word, name) for word, names in words for name in names if name.rstrip("/") not in known] == []


@pytest.mark.slow
def test_a_word_that_was_given_up_names_nothing() -> None:
    found = {
        name: place
        for name, place in named(*PRODUCT, "tests", "benchmarks").items()
        if GIVEN_UP & {part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}
    }
    assert found == {}, "docs/glossary.md has our words"
