"""`python -m support.assertion_bytecode`, in tests/: writes pytest's bytecode of the test modules, on all cores.

pytest rewrites the `assert` statements of a test module when it is imported first, and keeps the result. In a fresh
clone every worker of pytest-xdist would do so for every module at the same time: 6.5 s of CPU each. Private names of
pytest are imported here only; requirements.lock pins its version.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc, get_cache_dir

TESTS = Path(__file__).resolve().parents[1]
CONFIG: Any = SimpleNamespace(
    getini=lambda name: False
)  # enable_assertion_pass_hook, the one setting that is asked for
STATE: Any = SimpleNamespace(trace=print)


def rewritten() -> list[Path]:
    """The modules that pytest rewrites."""
    return sorted([*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")])


def bytecode(module: Path) -> Path:
    """Where pytest looks for what it has rewritten."""
    return get_cache_dir(module) / (module.name.removesuffix(".py") + PYC_TAIL)


def write(module: Path) -> None:
    """What pytest does before it runs a module, unless it was done for this source."""
    kept = bytecode(module)
    if _read_pyc(module, kept) is None:
        kept.parent.mkdir(exist_ok=True)
        source_hash, code = _rewrite_test(module, CONFIG)
        _write_pyc(STATE, code, source_hash, kept)


def main() -> None:
    """Every module."""
    with ProcessPoolExecutor(os.cpu_count()) as cores:
        list(cores.map(write, rewritten(), chunksize=4))


if __name__ == "__main__":
    main()
