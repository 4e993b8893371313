"""Errors for users: each class has its exit status, and nothing is decided by a class's name or an error's words."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_runner.errors import ExitStatus, UserFacingError

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("gpu_runner", "resources", "batch_assets")
MESSAGES = ("message", "note", "pause", "reason", "said", "why", "words")  # attributes for people
CLASS_WORDS = ("__name__", "__qualname__", "__module__")
# What other programs only say in words, or by the name of a class: one function each.
OTHER_PROGRAMS = {
    ("batch_assets/dagster_internals/code_server.py", "is_unreachable"),  # an error that Dagster has written down
    ("batch_assets/local_dagster/dagster_client.py", "launch"),  # the type of an answer in Dagster's GraphQL schema
    ("batch_assets/api/interactive/proxy.py", "refusal"),  # an engine's 404: of a route, or of a model
    ("gpu_runner/providers/kubernetes/api.py", "_forbidden"),  # a quota, in the words of Kubernetes' admission
    ("gpu_runner/providers/kubernetes/provider.py", "create"),  # reasons of Kubernetes' Status object, a closed list
    ("gpu_runner/fleet_database/migrations/versions/v0002_kinds.py", "upgrade"),  # what version 0001 of ours wrote
    (
        "gpu_runner/fleet_database/migrations/versions/v0003_declared_dead.py",
        "upgrade",
    ),  # what version 0002 of ours wrote
}


def subclasses(cls: type) -> Iterator[type]:
    for found in cls.__subclasses__():
        yield found
        yield from subclasses(found)


def test_every_error_for_users_has_an_exit_status():
    for module in (
        "batch_assets.file_permissions", "batch_assets.cli.demos.demo", "batch_assets.cli.demos.demo_fleet",
        "batch_assets.cli.dataset_commands.preview",
        "batch_assets.cli.user_errors",
        "batch_assets.local_dagster.dagster_client", "batch_assets.local_dagster.home", "batch_assets.settings",
        "batch_assets.snapshot.source.errors", "batch_assets.spec.errors", "batch_assets.spec.request_options",
        "gpu_runner.fleet_database.migrations",
        "resources.endpoints", "resources.fleet.fleet_config", "resources.pricing.price_files",
        "resources.objects.store_health",
    ):  # fmt: skip
        importlib.import_module(module)
    found = {cls.__name__: getattr(cls, "exit_status", None) for cls in subclasses(UserFacingError)}
    expected = {
        "AccessError", "CommandError", "CorruptObject", "DagsterRuns", "EndpointsError", "FleetConfigError",
        "FleetDatabaseTooNew",
        "InvalidDeadline", "InvalidTag", "LaunchError", "NoModel", "PreviewError", "PricingError", "SettingError",
        "SourceError", "SpecError", "StackError", "StoreAway", "StoreError",
    }  # fmt: skip
    assert expected <= set(found)
    assert {found[name] for name in expected} == {ExitStatus.WRONG_REQUEST}
    assert all(status in (ExitStatus.FAILED, ExitStatus.WRONG_REQUEST) for status in found.values())


def test_a_class_without_an_exit_status_cannot_be_defined():
    with pytest.raises(TypeError, match="expected an ExitStatus as exit_status"):
        type("Nothing", (UserFacingError,), {})
    with pytest.raises(TypeError, match="expected an ExitStatus as exit_status"):
        type("Number", (UserFacingError,), {"exit_status": 2})


def decisions_by_words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and function of each place that compares the name of a class, or looks into the text of an error or note."""
    yield from _decisions(tree, "", frozenset())


def _decisions(node: ast.AST, function: str, caught: frozenset[str]) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    if isinstance(node, ast.ExceptHandler) and node.name:
        caught = caught | {node.name}
    if _decides(node, caught):
        yield getattr(node, "lineno", 0), function
    for child in ast.iter_child_nodes(node):
        yield from _decisions(child, function, caught)


def _decides(node: ast.AST, caught: frozenset[str]) -> bool:
    if isinstance(node, ast.Compare):
        if all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
            return False  # None or a member of an enum
        sides = (node.left, *node.comparators)
        return not all(_is_message(side) for side in sides) and any(_is_words(side, caught) for side in sides)
    if isinstance(node, ast.Match):
        return _is_words(node.subject, caught)
    if isinstance(node, ast.Subscript):
        return _is_words(node.slice, caught)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("startswith", "endswith", "find", "index", "count"):
            return _is_words(node.func.value, caught)
        if node.func.attr in ("removeprefix", "removesuffix", "partition", "rpartition"):
            return _is_message(node.func.value)
        return node.func.attr in ("search", "match", "fullmatch") and any(_is_words(one, caught) for one in node.args)
    return False


def _is_words(node: ast.AST, caught: frozenset[str]) -> bool:
    """`type(error).__name__`, `str(error)`, `error.args` or `run.note`, and what methods and indexes make of them."""
    if _is_message(node):
        return True
    if isinstance(node, ast.Attribute) and node.attr in CLASS_WORDS:
        return True
    if isinstance(node, ast.Attribute) and node.attr == "args":
        return isinstance(node.value, ast.Name) and node.value.id in caught
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(_is_words(one, caught) for one in node.elts)
    if isinstance(node, ast.Subscript):
        return _is_words(node.value, caught)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _is_words(node.func.value, caught)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
        return any(isinstance(one, ast.Name) and one.id in caught for one in node.args)
    return False


def _is_message(node: ast.AST) -> bool:
    """`run.note` and the like, but not whether there is one, nor whether it is the same as another one."""
    return isinstance(node, ast.Attribute) and node.attr in MESSAGES


@pytest.mark.parametrize(
    "test",
    [
        "type(error).__name__ in ANSWERS", "type(error).__name__ == 'StoreError'", "'locked' in str(error)",
        "type(error).__module__.startswith('obstore')", "type(error).__module__.partition('.')[0] == 'sqlalchemy'",
        "str(error).lower().startswith('waiting')", "error.args[0] == 'gone'", "re.search('gone', str(error))",
        "STATUS[type(error).__name__]", "run.note.startswith('waiting')", "failure.reason == 'no capacity'",
        "'budget' in target.pause", "run.note.removeprefix('waiting: ')", "re.match('gone', lease.reason)",
    ],
)  # fmt: skip
def test_a_decision_by_words_is_found(test: str):
    code = f"def f():\n  try: g()\n  except Exception as error:\n    if {test}: pass\n"
    assert list(decisions_by_words(ast.parse(code))) == [(4, "f")]


@pytest.mark.parametrize(
    "code",
    [
        "try: g()\nexcept OSError as error: say(f'{type(error).__name__}: {error}', str(error), error.errno == 2)",
        "if target.pause is not None and machine.reason is EndReason.EXITED: g()",
    ],
)
def test_what_only_shows_an_error_or_asks_for_a_kind_is_none(code: str):
    assert list(decisions_by_words(ast.parse(code))) == []


@pytest.mark.slow
def test_nothing_is_decided_by_the_name_of_a_class_or_the_words_of_an_error():
    found = set()
    for floor in FLOORS:
        for file in sorted((ROOT / floor).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            for line, function in decisions_by_words(ast.parse(file.read_text())):
                if (name, function) not in OTHER_PROGRAMS:
                    found.add(f"{name}:{line} in {function}")
    assert found == set()


def test_each_exception_of_another_program_is_still_there():
    there = set()
    for name in {name for name, _ in OTHER_PROGRAMS}:
        there |= {(name, function) for _, function in decisions_by_words(ast.parse((ROOT / name).read_text()))}
    assert there == OTHER_PROGRAMS
