"""Every hostile key, table and column of a chain ends in one clear error, or is accepted safely.

In this process: DuckDB, which makes the groups, reserves more address space than the other inputs may have.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile.case import Case
from hostile.chains import CHAINS
from hostile.judge import judge


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DAGSTER_HOME", "BATCH_ASSETS_DEFS"):
        monkeypatch.setenv(name, str(tmp_path))


@pytest.mark.parametrize("case", CHAINS, ids=[f"{case.kind}: {case.name}"[:80] for case in CHAINS])
def test_a_hostile_input_of_a_chain_ends_in_one_clear_error_or_is_accepted_safely(case: Case) -> None:
    said, words = judge(case)
    assert said == ("accepted" if case.words is None else "error"), words
    assert case.words is None or case.words in words, words
    assert "Traceback" not in words and " at 0x" not in words and "<built-in" not in words
