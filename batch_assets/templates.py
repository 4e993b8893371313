"""Prompt templates: sandboxed Jinja over a row's columns, compiled once and rendered for a whole column at a time.

Three rules go beyond Jinja. A column written plainly, `{{ question }}`, must have a value in every row that reaches it;
`{{ context or '' }}` says that it may be missing. Printing nothing (null) is an error, never the word None. And what
would make a prompt differ from one reading to the next (`random`, `lipsum`) does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEXT = 1 << 20
_REQUIRED = "required column"


class TemplateProblem(Exception):
    """A template cannot be compiled: `line` is 1-based within the template."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(f"{message.rstrip('.')} (line {line} of the template)")
        self.line = line


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a row has no prompt."""

    reason: str


class _Nothing(Exception):
    """A plainly written column without a value."""


def _finalize(value: Any) -> Any:
    if value is None:
        raise _Nothing("an expression gives null; write `{{ column or '' }}` where a value may be missing")
    return value


def _required(value: Any, name: str) -> Any:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise _Nothing(f"column {name!r} is {'null' if value is None else 'empty'}")
    return value


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON text for a prompt; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a bound on the text that `*` and `**` can make."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 1 << 16 or abs(right) > 64):
            raise SecurityError("the result of ** is too large")
        for text, times in ((left, right), (right, left)):
            repeats = operator == "*" and isinstance(text, str | list | tuple) and isinstance(times, int)
            if repeats and len(text) * times > MAX_TEXT:
                raise SecurityError("the result of * is too large")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Environment:
    environment = _Environment(
        undefined=StrictUndefined, autoescape=False, keep_trailing_newline=False, finalize=_finalize
    )
    environment.filters["tojson"] = _to_json
    environment.filters[_REQUIRED] = _required
    for name in ("random", "urlize", "xmlattr"):
        del environment.filters[name]
    del environment.globals["lipsum"]
    return environment


class _MarkRequired(NodeTransformer):
    """Wraps every plainly written column, so that it is refused without a value where it is printed."""

    def __init__(self, columns: set[str]) -> None:
        self.columns = columns

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        marked: list[nodes.Expr] = []
        for part in node.nodes:
            if isinstance(part, nodes.Name) and part.name in self.columns:
                name = nodes.Const(part.name, lineno=part.lineno)
                part = nodes.Filter(part, _REQUIRED, [name], [], None, None, lineno=part.lineno)
            marked.append(part)
        node.nodes = marked
        return node


class Template:
    """A compiled template. `columns` are the names it takes from a row; `required` those that it always prints."""

    def __init__(self, text: str) -> None:
        environment = _environment()
        try:
            tree = environment.parse(text)
            self.columns = frozenset(meta.find_undeclared_variables(tree) - set(environment.globals))
            if any(meta.find_referenced_templates(tree)):
                raise TemplateProblem("include, import and extends are not available", 1)
            self._plain = _plain_parts(tree, self.columns)
            self.required = frozenset(_printed(tree) & self.columns)
            marked = _MarkRequired(set(self.columns)).visit(tree)
            self._render = environment.from_string(marked).render
        except TemplateSyntaxError as error:
            raise TemplateProblem(error.message or "syntax error", error.lineno) from error
        except TemplateError as error:
            raise TemplateProblem(str(error), 1) from error

    def render_column(self, columns: Mapping[str, Sequence[Any]], rows: int) -> list[str | Refused]:
        """The text of every row, or why it has none. `columns` holds at least `self.columns`."""
        names = sorted(self.columns)
        render = self._render_row if self._plain is None else self._fill
        if not names:
            return [_bounded(render({}))] * rows
        values = zip(*(columns[name] for name in names), strict=True)
        return [_bounded(render(dict(zip(names, row, strict=True)))) for row in values]

    def _fill(self, row: dict[str, Any]) -> str | Refused:
        """What `_render_row` gives for a template of text and plainly written columns, several times faster."""
        try:
            assert self._plain is not None
            return "".join([text if name is None else str(_required(row[name], name)) for name, text in self._plain])
        except _Nothing as error:
            return Refused(str(error))

    def _render_row(self, row: dict[str, Any]) -> str | Refused:
        try:
            return self._render(row)
        except _Nothing as error:
            return Refused(str(error))
        except UndefinedError as error:
            return Refused(f"template: {error.message}")
        except SecurityError as error:
            return Refused(f"template: {error.message}")
        except Exception as error:  # any expression may fail on any row; the message could quote the row: only its type
            return Refused(f"template: {type(error).__name__}")


def _printed(tree: nodes.Template) -> set[str]:
    """Names written plainly outside any condition or loop."""
    outputs = [node for node in tree.body if isinstance(node, nodes.Output)]
    return {part.name for output in outputs for part in output.nodes if isinstance(part, nodes.Name)}


def _bounded(text: str | Refused) -> str | Refused:
    if isinstance(text, str) and len(text) > MAX_TEXT:
        return Refused(f"the text has {len(text)} characters, more than {MAX_TEXT}")
    return text


def _plain_parts(tree: nodes.Template, columns: frozenset[str]) -> list[tuple[str | None, str]] | None:
    """(column, "") and (None, text) in order when the template is nothing but these; else None."""
    parts: list[tuple[str | None, str]] = []
    for node in tree.body:
        if not isinstance(node, nodes.Output):
            return None
        for part in node.nodes:
            if isinstance(part, nodes.TemplateData):
                parts.append((None, part.data))
            elif isinstance(part, nodes.Name) and part.name in columns:
                parts.append((part.name, ""))
            else:
                return None
    return parts
