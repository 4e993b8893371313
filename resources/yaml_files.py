"""YAML that people write, read within bounds: bytes, values (each alias counts as all that it stands for) and depth.

PyYAML builds an alias without a copy, so a file of a kilobyte can hold a billion values for whoever walks through them.

Words without quotes are read by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), where only
`true` and `false` are truth values: `no`, `12:30` and `2026-01-31` are text. Two things are otherwise: a whole number
with a leading zero (`01234`) is text, as it is a label more often than a number; and merge keys (`<<`) work.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from gpu_runner.errors import UserFacingError

MAX_BYTES = 16 << 20
MAX_VALUES = 500_000
MAX_DEPTH = 100
SETTINGS_BYTES = 1 << 20
_BASE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Settings = TypeVar("Settings", bound=BaseModel)


class YamlProblem(Exception):
    """A file is not YAML that can be used: `line` and `column` are 1-based, 0 when unknown; it quotes no value."""

    def __init__(self, expected: str, found: str, line: int = 0, column: int = 0) -> None:
        self.said = f"expected {expected}, found {found}"
        super().__init__(f"line {line}, column {column}: {self.said}" if line else self.said)
        self.expected, self.found, self.line, self.column = expected, found, line, column


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its value, and its nodes with the text as it was written."""

    value: Any
    node: Any


_TAG = "tag:yaml.org,2002:"
_CORE = (  # kind, what it looks like, its first characters
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|(?:0|[1-9][0-9]*)(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", "<<", "<"),
)


class _Loader(_BASE):  # type: ignore[misc,valid-type]
    """PyYAML's safe loader with the core schema, and a place for values that cannot be what they look like."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, TypeError, KeyError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            place = node.start_mark.line + 1, node.start_mark.column + 1
            raise YamlProblem(f"a {kind}", "text that looks like one and is none; put it in quotes", *place) from error


def _whole_number(loader: Any, node: Any) -> int:
    text = loader.construct_scalar(node)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _number(loader: Any, node: Any) -> float:
    return float(loader.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes what any version of YAML would read as something else than text; keeps the lines of a text."""

    def represent_str(self, text: str) -> Any:
        return self.represent_scalar(f"{_TAG}str", text, style="|" if "\n" in text else None)


for _kind, _pattern, _first in _CORE:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_pattern})\\Z"), list(_first))
_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.add_constructor(f"{_TAG}int", _whole_number)
_Loader.add_constructor(f"{_TAG}float", _number)


def dump(value: Any) -> str:
    """A document that `load`, and readers of YAML 1.1 like Dagster's, read as this value."""
    options = {"sort_keys": False, "default_flow_style": None, "width": 120, "allow_unicode": True}
    return str(yaml.dump(value, Dumper=_Dumper, **options))


def older_reading(node: Any) -> Any:
    """A word without quotes as YAML 1.1 reads it; its text where that cannot be built."""
    try:
        loader = _BASE("")
        tag = loader.resolve(yaml.ScalarNode, node.value, (True, False))
        return loader.construct_object(yaml.ScalarNode(tag, node.value), deep=True)
    except (yaml.YAMLError, ValueError, OverflowError):
        return node.value


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a plain file of at most `most` bytes. Raises YamlProblem, and OSError when it cannot be opened."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise YamlProblem("a file", "a folder, a pipe or a device")
    if found.st_size > most:
        raise YamlProblem(f"at most {most:,} bytes", f"{found.st_size:,}")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise YamlProblem(f"at most {most:,} bytes", "more")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlProblem("UTF-8 text", f"{error.reason} at byte {error.start}") from None


def load(text: str) -> Any:
    """The one document of a text. Raises YamlProblem."""
    documents = load_all(text)
    if len(documents) > 1:
        raise YamlProblem("one document", str(len(documents)))
    return documents[0] if documents else None


def load_all(text: str) -> list[Any]:
    """All documents of a text. Raises YamlProblem."""
    return [document.value for document in load_documents(text)]


def load_documents(text: str) -> list[Document]:
    """The same, with their nodes. Raises YamlProblem."""
    try:
        _check(text)
        return list(_documents(text))
    except yaml.YAMLError as error:
        raise _syntax_problem(error, text) from None
    except RecursionError:
        raise YamlProblem(f"at most {MAX_DEPTH} levels", "more") from None


# A part of what the parser says, what was expected then, and what was found. `{line}`: where what is open begins.
_SYNTAX = (
    ("',' or ']'", "a comma or ] in the list that begins in line {line}", "something else"),
    ("',' or '}'", "a comma or }} in the mapping that begins in line {line}", "something else"),
    ("'-' indicator", "an item with - of the list that begins in line {line}", "something else in its column"),
    ("expected key", "a key in the same column as the first one, in line {line}", "text in another column"),
    ("could not find expected ':'", "a colon and a space after the key in line {line}", "none"),
    ("mapping values are not allowed", "a line with one key and its value; put text with a colon in quotes",
     "a colon where no key can end"),
    ("block sequence entries", "the items of a list on lines of their own", "an item beside its key"),
    ("undefined alias", "text that begins with * in quotes", "an alias (*) of no anchor (&)"),
    ("alphabetic or numeric character", "a name behind & or *; put text that begins with them in quotes", "none"),
    ("constructor for the tag", "values without tags", "a tag (!) that means nothing here"),
    ("unknown escape character", "a known escape behind \\ in double quotes, or single quotes", "another one"),
    ("comment or line break", "the text behind | or > on lines of its own", "text in the same line"),
    ("node content", "a value", "none"),
    ("<document start>", "the end of the document, or ---", "more text"),
    ("control characters", "text without control characters", "one of these"),
)  # fmt: skip
_SIGNS = {"\t": "a tab", "@": "a @", "`": "a `", "%": "a %"}  # that begin no value, and hold no secret


def _syntax_problem(error: yaml.YAMLError, text: str) -> YamlProblem:
    """What is wrong in a text that is no YAML, in words for people. It never quotes the line: it may hold a secret."""
    mark, begun = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    said = str(getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__)
    place = (mark.line + 1, mark.column + 1) if mark else (0, 0)
    line = begun.line + 1 if begun else place[0]
    if "unexpected end of stream" in said:
        return YamlProblem(f"YAML, a quote that closes the text of line {line}", "the end of the file", *place)
    if "cannot start any token" in said and mark is not None:
        lines = text.splitlines()
        here = lines[mark.line][mark.column : mark.column + 1] if mark.line < len(lines) else ""
        expected = "spaces before a key, no tab" if here == "\t" else "text that begins with this sign in quotes"
        return YamlProblem(f"YAML, {expected}", _SIGNS.get(here, "a sign that begins no value"), *place)
    for part, expected, found in _SYNTAX:
        if part in said:
            return YamlProblem(f"YAML, {expected.format(line=line)}", found, *place)
    return YamlProblem("YAML", said.removeprefix("found "), *place)


def _documents(text: str) -> Iterator[Document]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            yield Document(loader.construct_document(node), node)
    finally:
        loader.dispose()


def read_settings(path: Path, model: type[Settings], error: type[UserFacingError]) -> Settings:
    """A file of settings, of at most SETTINGS_BYTES; without a file, or with an empty one, the model's defaults.

    Raises `error` with the path, the first key that is wrong, and what was expected.
    """
    if not path.exists():
        return model()
    try:
        found = load(read_text(path, SETTINGS_BYTES))
        return model() if found is None else model.model_validate(found)
    except YamlProblem as problem:
        raise error(f"{path}: {problem}") from None
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise error(f"{path}: {where + ': ' if where else ''}{first['msg']}") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror})") from None


def line_of(node: Any, keys: Sequence[str | int]) -> int:
    """The line, from 1, of the deepest place of a document on the way to these keys; 0 without a document."""
    line = 0 if node is None else node.start_mark.line + 1
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            pairs = [(name, value) for name, value in node.value if name.value == str(key)]
            if not pairs:
                break
            line, node = pairs[-1][0].start_mark.line + 1, pairs[-1][1]
        elif isinstance(node, yaml.SequenceNode) and str(key).isdigit() and int(key) < len(node.value):
            node = node.value[int(key)]
            line = node.start_mark.line + 1
        else:
            break
    return line


def compose(text: str) -> Any:
    """The nodes of a text that `load` has read, with their lines."""
    return yaml.compose(text, Loader=_Loader)


def _check(text: str) -> None:
    """Count values and levels, from the events of the parser: before anything is built."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []  # (anchor, values before it)
    total = 0
    for event in _events(text):
        kind = type(event)
        if kind is yaml.AliasEvent:
            if event.anchor in {anchor for anchor, _ in open_nodes}:
                raise _at(event, "an alias of what is complete", f"*{event.anchor:.40} within itself")
            total += sizes.get(event.anchor, 1)
        elif kind is yaml.ScalarEvent:
            total += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif kind in (yaml.SequenceStartEvent, yaml.MappingStartEvent):
            open_nodes.append((event.anchor, total))
            total += 1
            if len(open_nodes) > MAX_DEPTH:
                raise _at(event, f"at most {MAX_DEPTH} levels", "more")
        elif kind in (yaml.SequenceEndEvent, yaml.MappingEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = total - before
        if total > MAX_VALUES:
            raise _at(event, f"at most {MAX_VALUES:,} values", "more (an alias counts as all that it stands for)")


def _events(text: str) -> Iterator[Any]:
    return iter(yaml.parse(text, Loader=_BASE))


def _at(event: Any, expected: str, found: str) -> YamlProblem:
    return YamlProblem(expected, found, event.start_mark.line + 1, event.start_mark.column + 1)
