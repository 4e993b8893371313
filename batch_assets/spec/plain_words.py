"""Words without quotes in a dataset's YAML that would not stay what was typed: `1.10` is the number 1.1.

Where a value is a label (a grid, `enum`, `const`), a number must be written as it is printed. Where a value goes to the
engine as it is (`chat_template_kwargs`, `extra`), no word may be used that YAML 1.1 reads as something else: a file of
before could mean that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from batch_assets.spec.errors import Problem, show
from resources.yaml_files import older_reading

MAX_PROBLEMS = 50
_LABELS = ("enum", "const")
_OF_NAMES = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")  # keys of these are names
_NUMBERS = {"tag:yaml.org,2002:int": int, "tag:yaml.org,2002:float": float}


def ambiguous_words(document: Any) -> list[Problem]:
    """What is wrong with the words of a document that declares a dataset; its node, as `load_documents` has it."""
    attributes = _at(document, "attributes")
    labels = [("source.grid", _at(attributes, "source", "grid"))]
    schemas = [("output.json_schema", _at(attributes, "output", "json_schema"))]
    sent = [(f"sampling.{key}", _at(attributes, "sampling", key)) for key in ("extra", "chat_template_kwargs")]
    found = [
        *(problem for key, node in labels for problem in _walk(node, key, labels=True, sent=False)),
        *(problem for key, node in schemas for problem in _walk(node, key, labels=False, sent=False)),
        *(problem for key, node in sent for problem in _walk(node, key, labels=False, sent=True)),
    ]
    return found[:MAX_PROBLEMS]


def _at(node: Any, *keys: str) -> Any:
    for key in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        node = next((value for name, value in pairs if name.value == key), None)
    return node


def _walk(node: Any, key: str, *, labels: bool, sent: bool, names: bool = False) -> Iterator[Problem]:
    """`labels`: within a list of labels; `sent`: goes to the engine; `names`: keys of this mapping are no keywords."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            word = str(name.value)
            inner = labels or (word in _LABELS and not names)
            of_names = word in _OF_NAMES and not names
            yield from _walk(value, f"{key}.{word:.100}", labels=inner, sent=sent, names=of_names)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _walk(value, f"{key}.{number}", labels=labels, sent=sent)
    elif isinstance(node, yaml.ScalarNode) and not node.style:
        problem = _label_problem(node, key) if labels else _sent_problem(node, key) if sent else None
        if problem is not None:
            yield problem


def _label_problem(node: Any, key: str) -> Problem | None:
    kind = _NUMBERS.get(node.tag)
    if kind is None:
        return None
    printed = _printed(node)
    if printed == node.value:
        return None
    hint = f"It would become {printed}: write {_quoted(node)} for the text, {printed} for the number."
    return Problem(key, "a number as it is printed, or text in quotes", node.value[:100], hint)


def _printed(node: Any) -> str:
    try:
        number = float(node.value) if node.tag.endswith("float") else int(node.value, 0)
    except ValueError:  # not finite, or too long: refused elsewhere
        return str(node.value)
    return str(number)


def _sent_problem(node: Any, key: str) -> Problem | None:
    before = older_reading(node)
    text_now, text_before = node.tag.endswith(":str"), isinstance(before, str)
    if hasattr(before, "isoformat") or text_now == text_before:
        return None
    other = "true or false" if isinstance(before, bool) else "the number in decimal digits"
    hint = f"YAML 1.1 and 1.2 read this word differently: write {_quoted(node)} for the text, or {other}."
    return Problem(key, "a word that is read in one way", show(node.value), hint)


def _quoted(node: Any) -> str:
    return "'" + str(node.value)[:100].replace("'", "''") + "'"
