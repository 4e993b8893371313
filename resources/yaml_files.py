"""YAML that people write, read within bounds: bytes, values (each alias counts as all that it stands for) and depth.

PyYAML builds an alias without a copy, so a file of a kilobyte can hold a billion values for whoever walks through them.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

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


class _Loader(_BASE):  # type: ignore[misc,valid-type]
    """PyYAML's safe loader, with a place for values that cannot be what they look like (a 13th month)."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, TypeError, KeyError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            place = node.start_mark.line + 1, node.start_mark.column + 1
            raise YamlProblem(f"a {kind}", "text that looks like one and is none; put it in quotes", *place) from error


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
    try:
        _check(text)
        return list(yaml.load_all(text, _Loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # never the line itself: it may hold a secret
        said = getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__
        place = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        raise YamlProblem("YAML", str(said), *place) from None
    except RecursionError:
        raise YamlProblem(f"at most {MAX_DEPTH} levels", "more") from None


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


def compose(text: str) -> Any:
    """The nodes of a text that `load` has read, with their lines."""
    return yaml.compose(text, Loader=_BASE)


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
