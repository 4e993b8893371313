"""`python -m support.prepared_modules`, in tests/: what pytest and Hypothesis keep of modules, on all cores.

pytest rewrites the `assert` statements of a test module when it is imported first, and keeps the result. Hypothesis
keeps the constants of each module of ours, which it tries as examples. In a fresh clone every worker of pytest-xdist
would do both for every module at the same time: 6.5 and 2.2 s of CPU each. Private names of the two are imported here
only; requirements.lock pins their versions.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc, get_cache_dir
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.internal.constants_ast import constants_from_module

from support.whole_modules import mark_of

TESTS = Path(__file__).resolve().parents[1]
CONFIG: Any = SimpleNamespace(
    getini=lambda name: False
)  # enable_assertion_pass_hook, the one setting that is asked for
STATE: Any = SimpleNamespace(trace=print)


def rewritten() -> list[Path]:
    """The modules that pytest rewrites where no slow test runs."""
    found = sorted([*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")])
    return [module for module in found if mark_of(module) is None]


def with_constants() -> list[Path]:
    """The modules whose constants Hypothesis reads."""
    packages = ("batch_assets", "resources", "gpu_runner", "benchmarks")
    return sorted(module for package in packages for module in (TESTS.parent / package).rglob("*.py"))


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


def write_constants(path: Path) -> None:
    """What Hypothesis does of a module when it is imported first, unless it was done for this source."""
    set_hypothesis_home_dir(TESTS.parent / ".hypothesis")
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    constants_from_module(module)


def main() -> None:
    """Every module."""
    with ProcessPoolExecutor(os.cpu_count()) as cores:
        found = [cores.map(write, rewritten(), chunksize=4), cores.map(write_constants, with_constants(), chunksize=16)]
        for each in found:
            list(each)


if __name__ == "__main__":
    main()
