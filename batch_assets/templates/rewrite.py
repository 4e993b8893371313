"""Rewrites a parsed template: what is looked up, called, built, compared, looped over and printed goes through the
sandbox, and columns get names of their own, which no name of Jinja or Python can hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from batch_assets.templates.sandbox import BUILT, BUILTIN, COUNTED, ITEM, JOINED, METHOD, PRINTED, SIZED, SPENT

COLUMN = "_column_"
ROW = "row"
_ABSENT = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)
_GLOBALS = frozenset({"range", "dict", "namespace", "cycler", "joiner"})


class NotHere(Exception):
    """A template uses what prompts do not have."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def check_statements(tree: nodes.Template) -> None:
    """Raises NotHere for statements that a prompt has no use for."""
    for node in tree.find_all(_ABSENT):
        raise NotHere("include, import, extends and block are not available", node.lineno)
    for node in tree.find_all((nodes.ScopedEvalContextModifier, nodes.EvalContextModifier)):
        raise NotHere("autoescape is not available", node.lineno)
    for output in tree.find_all(nodes.Output):
        for part in output.nodes:
            if isinstance(part, nodes.Const) and (part.value is None or isinstance(part.value, bool)):
                word = repr(part.value)
                raise NotHere(f"{{{{ {word} }}}} is always {word}, never a column of that name", part.lineno)


def stored_names(tree: nodes.Template) -> frozenset[str]:
    """Names that the template itself gives a value, anywhere."""
    names = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
    names |= {node.name for node in tree.find_all(nodes.NSRef)}
    return frozenset(names | {node.name for node in tree.find_all(nodes.Macro)})


def called_names(tree: nodes.Template) -> tuple[frozenset[str], frozenset[str]]:
    """(names that are only ever called, all others)."""
    called = {id(node.node) for node in tree.find_all(nodes.Call) if isinstance(node.node, nodes.Name)}
    names = [node for node in tree.find_all(nodes.Name) if node.ctx == "load"]
    plain = {node.name for node in names if id(node) not in called}
    return frozenset({node.name for node in names if id(node) in called}), frozenset(plain)


class ColumnsByName(NodeTransformer):
    """`row['my col']` is the column of that name, whatever it is called."""

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        name = node.arg.value if isinstance(node.arg, nodes.Const) else None
        if isinstance(node.node, nodes.Name) and node.node.name == ROW and isinstance(name, str) and name:
            return nodes.Name(name, "load", lineno=node.lineno)
        self.generic_visit(node)
        return node


class Guard(NodeTransformer):
    """The rewriting. `columns`: names that come from a row; `renamed`: those of them that get a name of their own."""

    def __init__(self, columns: frozenset[str], renamed: dict[str, str], stored: frozenset[str]) -> None:
        self.columns, self.renamed, self.stored = columns, renamed, stored

    def visit_Name(self, node: nodes.Name) -> nodes.Expr:
        if node.ctx == "load" and node.name in self.renamed:
            return nodes.Name(self.renamed[node.name], "load", lineno=node.lineno)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Expr:
        target = node.node
        path = self._path(target)
        self.generic_visit(node)
        if isinstance(target, nodes.Name) and target.name in _GLOBALS and target.name not in self.stored:
            node.node = nodes.Name(f"{BUILTIN}{target.name}", "load", lineno=target.lineno)
        elif isinstance(target, nodes.Getattr):
            # generic_visit has made an item of it
            found = node.node
            assert isinstance(found, nodes.Filter) and found.node is not None
            node.node = _filter(found.node, METHOD, target.attr, path)
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Expr:
        path = self._path(node)
        self.generic_visit(node)
        return _filter(node.node, ITEM, node.attr, path)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        path = self._path(node)
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filter(node, BUILT)
        wanted = _filter(node.node, ITEM)
        wanted.args = [node.arg, nodes.Const(path, lineno=node.lineno)]
        return wanted

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        return _filter(self.generic_visit(node), BUILT)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, BUILT) if node.ctx == "load" else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), JOINED)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        node.expr = _sized(node.expr)
        for operand in node.ops:
            operand.expr = _sized(operand.expr)
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:
        steps = 1 + _nodes(node.body) + (_nodes([node.test]) if node.test else 0)
        self.generic_visit(node)
        if node.recursive:  # it may be called from within, so its body pays
            node.body.insert(0, _pay(node, steps))
        node.iter = _filter(node.iter, COUNTED, 1 if node.recursive else steps)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        steps = 1 + _nodes(node.body)
        self.generic_visit(node)
        node.body.insert(0, _pay(node, steps))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        steps, call = 1 + _nodes(node.body), node.call
        self.generic_visit(node)
        node.call = call  # Jinja wants a call here; its parts are rewritten in place
        node.body.insert(0, _pay(node, steps))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        found: list[nodes.Expr] = []
        for part in node.nodes:
            if isinstance(part, nodes.TemplateData):
                found.append(part)
                continue
            plain = isinstance(part, nodes.Name) and part.name in self.columns
            about = self._about(part)
            found.append(_filter(self.visit(part), PRINTED, about, plain))
        node.nodes = found
        return node

    def _about(self, node: nodes.Expr) -> str:
        """What an expression is about: its path, or the columns in it."""
        if isinstance(node, nodes.Getattr | nodes.Getitem):
            return self._path(node)
        names = [node] if isinstance(node, nodes.Name) else node.find_all(nodes.Name)
        columns = sorted({one.name for one in names if one.name in self.columns})
        words = ", ".join(map(repr, columns))
        return f"{'column' if len(columns) == 1 else 'columns'} {words}" if columns else ""

    def _path(self, node: nodes.Node) -> str:
        """`order.items` as it was written, with the word column when it begins with one."""
        if isinstance(node, nodes.Name):
            return f"column {node.name!r}" if node.name in self.columns else node.name
        if isinstance(node, nodes.Getattr):
            return f"{self._path(node.node)}.{node.attr}"
        if isinstance(node, nodes.Getitem):
            word = repr(node.arg.value) if isinstance(node.arg, nodes.Const) else "…"
            return f"{self._path(node.node)}[{word}]"
        return "…"


def _filter(node: Any, name: str, *words: Any) -> nodes.Filter:
    constants: list[nodes.Expr] = [nodes.Const(word, lineno=node.lineno) for word in words]
    return nodes.Filter(node, name, constants, [], None, None, lineno=node.lineno)


def _nodes(body: Sequence[nodes.Node]) -> int:
    return sum(1 for part in body for _ in part.find_all(nodes.Node))


def _pay(node: nodes.Node, steps: int) -> nodes.ExprStmt:
    constant = nodes.Const(steps, lineno=node.lineno)
    return nodes.ExprStmt(_filter(constant, SPENT), lineno=node.lineno)


def _sized(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filter(node, SIZED)
