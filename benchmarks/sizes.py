"""How much code there is and how it is cut. `make lint` prints it; nothing fails.

Lines of each floor; modules that one other module imports, and how many of them stand beside it; names that several
modules have; and the modules that are long. A long module is not wrong: one that holds two subjects is. A module with
one importer is not wrong either: one without a subject of its own is. Names that stay equal, and why, are in
docs/decisions.md.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

ROOTS = ("batch_assets", "resources", "gpu_runner")
LONG = 400


def modules(repository: Path) -> list[Path]:
    """Every module of the product, by its path in the repository."""
    return [file.relative_to(repository) for root in ROOTS for file in sorted((repository / root).rglob("*.py"))]


def line_counts(repository: Path) -> dict[Path, int]:
    """Lines of every module."""
    return {file: (repository / file).read_text(encoding="utf-8").count("\n") for file in modules(repository)}


def importers(repository: Path) -> dict[Path, set[Path]]:
    """Which modules import a module, wherever in them: for every module of the product."""
    files = modules(repository)
    known = {
        ".".join(file.parent.parts if file.stem == "__init__" else file.with_suffix("").parts): file for file in files
    }
    found: dict[Path, set[Path]] = {file: set() for file in files}
    for file in files:
        for node in ast.walk(ast.parse((repository / file).read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in known else node.module for name in inner]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name in known and known[name] != file:
                    found[known[name]].add(file)
    return found


def with_one_importer(repository: Path) -> dict[Path, Path]:
    """Modules that exactly one other module imports, with that one. Packages count for their modules."""
    found = importers(repository)
    return {file: next(iter(by)) for file, by in found.items() if file.stem != "__init__" and len(by) == 1}


def equal_names(files: list[Path]) -> dict[str, int]:
    """Names that more than one module has, most frequent first."""
    counts = Counter(file.stem for file in files if file.stem != "__init__")
    return {name: count for name, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])) if count > 1}


def report(repository: Path) -> str:
    """What `make lint` prints, longest modules first."""
    counts = line_counts(repository)
    by_floor: dict[str, list[int]] = defaultdict(list)
    for file, count in counts.items():
        by_floor[file.parts[0]].append(count)
    lines = [f"{root:<14}{sum(by_floor[root]):>8,} lines in {len(by_floor[root]):>4} modules" for root in ROOTS]
    lines.append(f"{'in all':<14}{sum(counts.values()):>8,} lines in {len(counts):>4} modules")
    single = with_one_importer(repository)
    beside = sum(file.parent == by.parent for file, by in single.items())
    lines.append(f"{len(single)} modules have one importer, {beside} of them in the same folder")
    equal = equal_names(list(counts))
    lines.append("equal names: " + (", ".join(f"{name} ({count})" for name, count in equal.items()) or "none"))
    long = sorted(((count, file) for file, count in counts.items() if count > LONG), reverse=True)
    lines += [f"modules of more than {LONG} lines (advice):"] if long else []
    lines += [f"  {count:>5}  {file.as_posix()}" for count, file in long]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(Path(__file__).resolve().parents[1]))
