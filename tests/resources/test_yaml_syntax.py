"""A file that is no YAML: one sentence with line, column, what was expected and what was found, and no text of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from resources.fleet.fleet_config import FleetConfig, FleetConfigError
from resources.yaml_files import YamlProblem, load

BROKEN = {
    "a: [1, 2\nb: 3\n": "line 2, column 2: expected YAML, a comma or ] in the list that begins in line 1, found "
    "something else",
    "a: {x: 1\n": "line 2, column 1: expected YAML, a comma or } in the mapping that begins in line 1, found "
    "something else",
    "- a\nb: c\n": "line 2, column 1: expected YAML, an item with - of the list that begins in line 1, found "
    "something else in its column",
    "a:\n    b: 1\n  c: 2\n": "line 3, column 3: expected YAML, a key in the same column as the first one, in line 1, "
    "found text in another column",
    "a: 1\nkey\n": "line 3, column 1: expected YAML, a colon and a space after the key in line 2, found none",
    "a: secret: 3\n": "line 1, column 10: expected YAML, a line with one key and its value; put text with a colon in "
    "quotes, found a colon where no key can end",
    "a: - b\n": "line 1, column 4: expected YAML, the items of a list on lines of their own, found an item beside its "
    "key",
    "a: *secret\n": "line 1, column 4: expected YAML, text that begins with * in quotes, found an alias (*) of no "
    "anchor (&)",
    "a: !secret 1\n": "line 1, column 4: expected YAML, values without tags, found a tag (!) that means nothing here",
    "a:\n\t- x\n": "line 2, column 1: expected YAML, spaces before a key, no tab, found a tab",
    "a: @secret\n": "line 1, column 4: expected YAML, text that begins with this sign in quotes, found a @",
    "a: 'secret\n": "line 2, column 1: expected YAML, a quote that closes the text of line 1, found the "
    "end of the file",
    'a: "\\q"\n': "line 1, column 5: expected YAML, a known escape behind \\ in double quotes, or single quotes, found "
    "another one",
    "a: >secret\n": "line 1, column 5: expected YAML, the text behind | or > on lines of its own, found text in the "
    "same line",
    "a: [\n": "line 2, column 1: expected YAML, a value, found none",
    "{a: 1}}": "line 1, column 7: expected YAML, the end of the document, or ---, found more text",
    "\x00a": "expected YAML, text without control characters, found one of these",
}


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_expected_is_said_in_words(text: str) -> None:
    with pytest.raises(YamlProblem) as found:
        load(text)
    assert str(found.value) == BROKEN[text] and "secret" not in str(found.value)


def test_the_sentence_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("engines: [\n")
    with pytest.raises(FleetConfigError) as found:
        FleetConfig.load(file)
    assert str(found.value) == f"{file}: line 2, column 1: expected YAML, a value, found none"
