"""What the documentation names exists: links, files, modules, functions. The architecture page is complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.documents import ARCHITECTURE, REPOSITORY

# docs/history/ is not here: it says what was seen at a time, of the files of that time.
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "SECURITY.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
ROOTS = ("batch_assets", "resources", "gpu_runner")
PATHS = re.compile(
    r"(?<![\w/.~-])(?:\./|\.\./)?((?:batch_assets|resources|gpu_runner|tests|benchmarks|deploy|docs)/[\w./-]*)"
)
DOTTED = re.compile(r"(?<![\w/.])((?:batch_assets|resources|gpu_runner)(?:\.[A-Za-z_]\w*)+)")
LINK_AND_NAME = re.compile(r"\]\(\.\./([\w/]+\.py)\)(?: `([\w.]+)`)?")
MOST_MODULES = 8


def packages() -> list[Path]:
    return sorted(file.parent for root in ROOTS for file in (REPOSITORY / root).rglob("__init__.py"))


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def names_of(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """What a module or class defines, with the body of each."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[statement.name] = statement.body
        elif isinstance(statement, ast.Assign):
            found |= {target.id: [] for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = []
    return found


def defines(file: Path, name: str) -> bool:
    """Whether the module defines `function`, `Class` or `Class.method`."""
    body = tree(file).body
    for part in name.split("."):
        names = names_of(body)
        if part not in names:
            return False
        body = names[part]
    return True


def exported(package: Path) -> list[str] | None:
    """`__all__` of a package, or None."""
    for statement in tree(package / "__init__.py").body:
        if isinstance(statement, ast.Assign) and any(getattr(one, "id", "") == "__all__" for one in statement.targets):
            return [str(name) for name in ast.literal_eval(statement.value)]
    return None


def dotted_exists(dotted: str) -> bool:
    """Whether this is a package, a module, or a name that one of them defines or exports."""
    parts = dotted.split(".")
    place = REPOSITORY
    for number, part in enumerate(parts):
        if (place / part / "__init__.py").is_file():
            place = place / part
            continue
        rest = parts[number:]
        if (place / f"{part}.py").is_file():
            return len(rest) == 1 or defines(place / f"{part}.py", ".".join(rest[1:]))
        return len(rest) == 1 and (part in (exported(place) or ()) or defines(place / "__init__.py", part))
    return True


def section(title: str) -> str:
    """The text below a heading of docs/architecture.md."""
    _, found, rest = ARCHITECTURE.read_text().partition(f"\n## {title}\n")
    assert found, f"docs/architecture.md: expected a heading {title!r}"
    return rest.partition("\n## ")[0]


def table_rows(text: str) -> Iterator[list[str]]:
    """Cells of the rows of the tables in a text, without their heads."""
    for line in re.sub(r"^\|.*\n\|[-|]+\n", "", text, flags=re.MULTILINE).splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).resolve().exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_of_the_repository_exists(page: Path) -> None:
    text = page.read_text()
    made = {f"batch_assets/defs/{name}" for name in re.findall(r"^batch-assets new (\w+)", text, re.MULTILINE)}
    for found in PATHS.finditer(text):
        path = found[1].rstrip("./-")
        if "NAME" in path or any(path == one or path.startswith(f"{one}/") for one in made):
            continue
        assert (REPOSITORY / path).exists(), f"{page.name}, line {text.count(chr(10), 0, found.start()) + 1}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_module_named_by_its_file_alone_exists(page: Path) -> None:
    known = {file.name for file in (REPOSITORY / "tests").rglob("test_*.py")}
    assert set(re.findall(r"(?<![/\w])test_\w+\.py", page.read_text())) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_dotted_name_of_the_code_exists(page: Path) -> None:
    text = page.read_text()
    for found in DOTTED.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        assert dotted_exists(found[1]), f"{page.name}, line {line}: {found[1]}"


@pytest.mark.slow
def test_every_function_of_the_architecture_is_in_its_module() -> None:
    found = LINK_AND_NAME.findall(ARCHITECTURE.read_text())
    assert sum(bool(name) for _, name in found) > 50
    for path, name in found:
        assert (REPOSITORY / path).is_file(), path
        assert not name or defines(REPOSITORY / path, name), f"{path}: expected {name}; it was renamed or moved"


@pytest.mark.parametrize("path", ["row", "lease", "deadline"])
def test_a_path_has_at_most_eight_modules_and_all_of_them_are_in_the_picture(path: str) -> None:
    modules = [LINK_AND_NAME.findall(cells[2]) for cells in table_rows(section(f"The path of a {path}"))]
    assert modules and all(len(one) == 1 for one in modules), "expected one module for each step"
    named = {file for ((file, _),) in modules}
    assert 1 < len(named) <= MOST_MODULES
    picture = ARCHITECTURE.read_text().partition("```mermaid")[2].partition("```")[0]
    drawn = re.findall(r"\[\"(\w+/\w+)\"\]", picture)
    missing = [file for file in named if not any(file.endswith(f"/{node}.py") for node in drawn)]
    assert [
        file for file in missing if not file.endswith("fleet_database/targets.py")
    ] == []  # drawn as the fleet database


def test_every_module_of_the_picture_exists() -> None:
    picture = ARCHITECTURE.read_text().partition("```mermaid")[2].partition("```")[0]
    modules = [str(file) for root in ROOTS for file in (REPOSITORY / root).rglob("*.py")]
    nodes = re.findall(r"\[\"([^\"(]+)\"\]", picture)
    nodes = [node for node in nodes if "/" in node]
    assert len(nodes) > 15
    for node in nodes:
        assert any(module.endswith(f"/{node}.py") for module in modules), node


def test_each_place_to_change_something_is_one_function_of_one_file() -> None:
    rows = list(table_rows(section("Where do I change …")))
    assert len(rows) >= 12
    for what, where in rows:
        assert [bool(name) for _, name in LINK_AND_NAME.findall(where)] == [True], what


def test_the_table_of_folders_names_every_package() -> None:
    rows = list(table_rows(section("Folders")))
    told = {cells[0].strip("`/"): cells[1] for cells in rows}
    for package in packages():
        folder = package.relative_to(REPOSITORY)
        if len(folder.parts) <= 2:
            assert folder.as_posix() in told, f"docs/architecture.md: expected a row for {folder}/"
        elif len(folder.parts) == 3:
            assert f"`{folder.name}/`" in told["/".join(folder.parts[:2])], (
                f"expected {folder}/ in the row of its parent"
            )
    assert [folder for folder in told if not (REPOSITORY / folder / "__init__.py").is_file()] == []


def test_the_layout_names_every_folder_of_the_code() -> None:
    layout = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("\n## Layout\n")[2].partition("\n## ")[0]
    rows = list(table_rows(layout))
    for root in ROOTS:
        told = [name for cells in rows if cells[0].strip("`/ ") == root for name in re.findall(r"`(\w+)/`", cells[1])]
        folders = {package.name for package in packages() if package.parent == REPOSITORY / root}
        assert sorted(set(told) - {"defs"}) == sorted(folders), f"CONTRIBUTING.md, Layout, {root}/"


@pytest.mark.parametrize("package", packages(), ids=lambda package: ".".join(package.relative_to(REPOSITORY).parts))
def test_each_package_says_what_lives_in_it_and_what_others_may_import(package: Path) -> None:
    assert ast.get_docstring(tree(package / "__init__.py")), f"{package}/__init__.py: expected a docstring"
    names = exported(package)
    assert names is not None, f"{package}/__init__.py: expected __all__"
    own = names_of(tree(package / "__init__.py").body)
    for name in names:
        there = (package / f"{name}.py").is_file() or (package / name / "__init__.py").is_file()
        assert there or offers(package, name, own), f"{package}/__init__.py: __all__ names {name}"


def offers(package: Path, name: str, own: dict[str, list[ast.stmt]]) -> bool:
    """Whether `__init__` defines or imports the name, at its top or when it is asked for."""
    imports = [node for node in ast.walk(tree(package / "__init__.py")) if isinstance(node, ast.ImportFrom)]
    return name in own or any(alias.name == name for node in imports for alias in node.names)


def imports_of(file: Path) -> Iterator[str]:
    """Dotted names of our own code that a module imports, wherever in it."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in found if name.partition(".")[0] in ROOTS)


def not_exported(imported: str, importer: Path) -> str | None:
    """What `importer` takes of another package that is not in its `__all__`. Packages in packages have their own."""
    place, parts = REPOSITORY, imported.split(".")
    while parts and (place / parts[0] / "__init__.py").is_file():
        place = place / parts.pop(0)
    if not parts or importer.is_relative_to(place) or parts[0] in (exported(place) or ()):
        return None
    return f"{'.'.join(place.relative_to(REPOSITORY).parts)}: {parts[0]}, imported by {importer.name}"


@pytest.mark.slow
@pytest.mark.parametrize("root", ROOTS)
def test_modules_import_of_other_packages_only_what_these_export(root: str) -> None:
    files = sorted((REPOSITORY / root).rglob("*.py"))
    found = {not_exported(name, file) for file in files for name in imports_of(file)} - {None}
    assert found == set(), "add it to __all__ of its package, or use what the package offers"


@pytest.mark.slow
def test_no_function_has_more_than_60_lines() -> None:
    long = []
    for folder in (*ROOTS, "benchmarks"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                    long += [f"{path.name} {node.name}"] if node.end_lineno - node.lineno >= 60 else []
    assert long == []
