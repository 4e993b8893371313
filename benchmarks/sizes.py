"""How much code there is: lines of each floor, and the modules that are long. `make lint` prints it; nothing fails.

A long module is not wrong. One that holds two subjects is.
"""

from __future__ import annotations

from pathlib import Path

ROOTS = ("batch_assets", "resources", "gpu_runner")
LONG = 400


def line_counts(repository: Path) -> dict[Path, int]:
    """Lines of every module of the product, by its path in the repository."""
    modules = [file for root in ROOTS for file in sorted((repository / root).rglob("*.py"))]
    return {file.relative_to(repository): file.read_text(encoding="utf-8").count("\n") for file in modules}


def report(counts: dict[Path, int]) -> str:
    """Lines and modules of each floor, their sum, and the modules of more than `LONG` lines, longest first."""
    lines = []
    for root in ROOTS:
        own = [count for file, count in counts.items() if file.parts[0] == root]
        lines.append(f"{root:<14}{sum(own):>8,} lines in {len(own):>4} modules")
    lines.append(f"{'in all':<14}{sum(counts.values()):>8,} lines in {len(counts):>4} modules")
    long = sorted(((count, file) for file, count in counts.items() if count > LONG), reverse=True)
    lines += [f"  {count:>5}  {file.as_posix()}" for count, file in long]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(line_counts(Path(__file__).resolve().parents[1])))
