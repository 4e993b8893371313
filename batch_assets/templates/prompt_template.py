"""Prompt templates: sandboxed Jinja over a row's columns, compiled once and rendered for a whole column at a time.

Four rules go beyond Jinja. A column written plainly, `{{ question }}`, must have a value in every row that reaches it;
`{{ context or '' }}` says that it may be missing. Printing nothing (null) is an error, never the word None, and so is
printing what is no data. What would make a prompt differ from one reading to the next (`random`, `lipsum`) does not
exist. And a row takes a bounded number of steps (`template_values`), the same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

from batch_assets.templates.rewrite import (
    COLUMN,
    ROW,
    ColumnsByName,
    Guard,
    NotHere,
    called_names,
    check_statements,
    stored_names,
)
from batch_assets.templates.sandbox import BUILTIN, Sandbox
from batch_assets.templates.values import MAX_STEPS, MAX_TEXT, Nothing, TooMuch, Unprintable, text_of

# A template is compiled to Python, which takes about a second for so many tokens.
MAX_TOKENS = 20_000
_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
_NO_WORD = re.compile(r"\{\{-?\s*(\w+(?:[ ./:-]+\w+)+)\s*-?\}\}")
_SINGLE = re.compile(r"(?<!\{)\{\s*([^\W\d]\w*)\s*\}(?!\})")
# So many rows that cannot be rendered within their bounds, and hardly one that can: the template is at fault.
MAX_EXHAUSTED = 20


class TemplateProblem(Exception):
    """A template cannot be compiled: `line` is 1-based within the template."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(f"{message.rstrip('.')} (line {line} of the template)")
        self.line = line


class TemplateExhausted(Exception):
    """Most rows take more than a template may: it is of no use to try them all."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a row has no prompt. `by_template`: what is wrong is an expression of the template, with this row."""

    problem: str
    by_template: bool = False

    @property
    def reason(self) -> str:
        """In words, for whoever looks at the row."""
        return f"template: {self.problem}" if self.by_template else self.problem


class Template:
    """A compiled template. `columns` are the names it takes from a row; `required` those that it always prints.

    Not for two threads at once.
    """

    def __init__(self, text: str) -> None:
        self._sandbox = Sandbox()
        self._exhausted = self._rendered = 0
        try:
            self._compile(text)
        except TemplateSyntaxError as error:
            raise TemplateProblem((error.message or "syntax error") + _by_name(text), error.lineno) from error
        except NotHere as error:
            raise TemplateProblem(str(error), error.line) from None
        except (TemplateError, ValueError, OverflowError) as error:
            raise TemplateProblem(str(error), 1) from error
        except (RecursionError, SyntaxError, MemoryError):  # of Python's compiler, for what Jinja made of the template
            raise TemplateProblem("expected at most 20 loops or 100 parentheses in each other, found more", 1) from None
        if not self.columns and isinstance(found := self._bounded(self._render_row(())), Refused):
            raise TemplateProblem(found.problem, 1)

    def _compile(self, text: str) -> None:
        for number, _ in enumerate(self._sandbox.lexer.tokeniter(text, None)):
            if number > MAX_TOKENS:
                raise TemplateProblem(f"expected at most {MAX_TOKENS:,} tokens, found more", 1)
        tree = self._sandbox.parse(text)
        check_statements(tree)
        stored = stored_names(tree)
        if ROW not in stored:  # else `row` is a name of the template's own
            ColumnsByName().visit(tree)
        called, plain = called_names(tree)
        undeclared = meta.find_undeclared_variables(tree)
        if "self" in (called | plain) - stored:  # Jinja declares it by itself, for blocks
            undeclared.add("self")
        # A name that is only called is a function of Jinja; any other one is a column, also `range` and `self`.
        functions = {name for name in called - plain if f"{BUILTIN}{name}" in self._sandbox.builtins}
        self.columns = frozenset(undeclared - functions)
        self._names = sorted(self.columns)
        renamed = {name: f"{COLUMN}{i}" for i, name in enumerate(self._names) if name not in stored}
        self._inner = [renamed.get(name, name) for name in self._names]
        self._plain = _plain_parts(tree, self.columns)
        self.required = frozenset(_printed(tree) & self.columns)
        guarded = Guard(self.columns, renamed, stored).visit(tree)
        self._template = self._sandbox.from_string(guarded)

    def render_column(self, columns: Mapping[str, Sequence[Any]], rows: int) -> list[str | Refused]:
        """The text of every row, or why it has none. `columns` holds at least `self.columns`.

        Raises TemplateExhausted when row after row takes too much.
        """
        render = self._render_row if self._plain is None else self._fill
        if not self._names:
            return [self._bounded(render(()))] * rows
        binary = {i for name in self._names for i in _binary(columns[name])}
        values = zip(*(columns[name] for name in self._names), strict=True)
        if not binary:
            return [self._bounded(render(row)) for row in values]
        return [self._binary_row(row) if i in binary else self._bounded(render(row)) for i, row in enumerate(values)]

    def _binary_row(self, row: tuple[Any, ...]) -> Refused:
        name = next(name for name, value in zip(self._names, row, strict=True) if isinstance(value, bytes))
        return Refused(f"column {name!r}: expected text, a number, true/false, a list or a mapping, found binary data")

    def _fill(self, row: tuple[Any, ...]) -> str | Refused:
        """What `_render_row` gives for a template of text and plainly written columns, several times faster."""
        assert self._plain is not None
        try:
            return "".join([text if at < 0 else _required(row[at], self._names[at]) for at, text in self._plain])
        except Unprintable as error:
            return Refused(str(error))
        except TooMuch as error:
            return Refused(f"template {error}")

    def _render_row(self, row: tuple[Any, ...]) -> str | Refused:
        self._sandbox.meter.left = MAX_STEPS
        try:
            # Jinja's own way to a context builds a ChainMap for every row, which costs as much as rendering it.
            variables = {**self._sandbox.builtins, **dict(zip(self._inner, row, strict=True))}
            context = Context(self._sandbox, variables, None, {})
            return self._sandbox.concat(self._template.root_render_func(context))
        except TooMuch as error:
            self._exhausted += 1
            return Refused(f"template {error}{self._line(error.__traceback__)}")
        except Nothing as error:
            return Refused(str(error))
        except Unprintable as error:
            return Refused(f"{error}{self._line(error.__traceback__)}", by_template=True)
        except (UndefinedError, SecurityError) as error:
            return Refused(f"{error.message}{self._line(error.__traceback__)}", by_template=True)
        except RecursionError:
            return Refused(
                "a value is nested too deeply, or a macro or loop calls itself without an end", by_template=True
            )
        except Exception as error:  # any expression may fail on any row; the message could quote the row: only its type
            return Refused(f"{type(error).__name__}{self._line(error.__traceback__)}", by_template=True)

    def _line(self, trace: TracebackType | None) -> str:
        """Where in the template an error was raised."""
        found = 0
        while trace is not None:
            if trace.tb_frame.f_globals.get("name") == self._template.name and "debug_info" in trace.tb_frame.f_globals:
                found = self._template.get_corresponding_lineno(trace.tb_lineno)
            trace = trace.tb_next
        return f" (line {found} of the template)" if found else ""

    def _bounded(self, text: str | Refused) -> str | Refused:
        if isinstance(text, str):
            self._rendered += 1
            if len(text) > MAX_TEXT:
                return Refused(f"the text has {len(text)} characters, more than {MAX_TEXT}")
        elif self._exhausted >= MAX_EXHAUSTED and self._exhausted > self._rendered:
            raise TemplateExhausted(f"{text.reason}; so did {self._exhausted} rows, and only {self._rendered} did not")
        return text


def _by_name(text: str) -> str:
    """How a column is written whose name is no word, where a template seems to print one."""
    found = _NO_WORD.search(text)
    return f"; the column {found[1]!r} is written {{{{ row[{found[1]!r}] }}}}" if found else ""


def single_braces(text: str) -> str | None:
    """The first name that stands in single braces, which print nothing; None without one."""
    found = _SINGLE.search(text)
    return found[1] if found else None


def _binary(values: Sequence[Any]) -> list[int]:
    """Places of binary values."""
    if set(map(type, values)) <= _PLAIN_TYPES:
        return []
    return [i for i, value in enumerate(values) if isinstance(value, bytes)]


def _required(value: Any, name: str) -> str:
    if type(value) is str:
        if not value.strip():
            raise Nothing(f"column {name!r} is empty")
        return value
    if value is None:
        raise Nothing(f"column {name!r} is null")
    try:
        return text_of(value)
    except Unprintable as error:
        raise Unprintable(f"column {name!r}: {error}") from None


def _printed(tree: nodes.Template) -> set[str]:
    """Names written plainly outside any condition or loop."""
    outputs = [node for node in tree.body if isinstance(node, nodes.Output)]
    return {part.name for output in outputs for part in output.nodes if isinstance(part, nodes.Name)}


def _plain_parts(tree: nodes.Template, columns: frozenset[str]) -> list[tuple[int, str]] | None:
    """(place of a column, "") and (-1, text) in order when the template is nothing but these; else None."""
    places = {name: place for place, name in enumerate(sorted(columns))}
    parts: list[tuple[int, str]] = []
    for node in tree.body:
        if not isinstance(node, nodes.Output):
            return None
        for part in node.nodes:
            if isinstance(part, nodes.TemplateData):
                parts.append((-1, part.data))
            elif isinstance(part, nodes.Name) and part.name in columns:
                parts.append((places[part.name], ""))
            else:
                return None
    return parts
