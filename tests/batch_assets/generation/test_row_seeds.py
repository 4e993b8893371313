"""Equal rows of a dataset with a seed: each is asked with another one, the same in every run."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from support.dataset_site import MODEL, dataset_site
from support.plain_engine import plain_engine

from gpu_runner.client.protocol import Repair, Requests
from gpu_runner.rows import Generation, Row

KEY = "0" * 64


def asked_seeds(folder: Path, seed: int | None) -> list[int | None]:
    folder.mkdir()
    more = {} if seed is None else {"seed": seed}
    source = {"grid": {"word": ["moon"], "number": [1, 2, 3]}}
    with (
        plain_engine(MODEL) as engine,
        dataset_site(
            folder,
            source=source,
            prompt={"user": "A line on the {{ word }}."},
            id=None,
            sampling={"temperature": 1, "max_tokens": 16, **more},
        ) as site,
    ):
        assert site.materialize("prompts").success
        assert site.run_rows("00000", "00000", engine.url).success
        return [one.get("seed") for one in engine.requests]


def test_each_of_equal_rows_has_a_seed_of_its_own_that_stays(tmp_path: Path) -> None:
    first = asked_seeds(tmp_path / "first", 7)
    assert len(first) == 3 and 7 in first and len(set(first)) == 3
    assert sorted(map(int, first)) == sorted(map(int, asked_seeds(tmp_path / "second", 7)))  # type: ignore[arg-type]
    assert asked_seeds(tmp_path / "none", None) == [None] * 3


@pytest.mark.parametrize(("row_id", "own"), [(f"{KEY}#0", False), (f"{KEY}#1", True), ("id#1", False), ("1", False)])
def test_only_further_occurrences_are_asked_with_another_seed(row_id: str, own: bool) -> None:
    row = Row("00000", row_id, KEY, b'"p"')
    assert (row.seeded(7).seed is not None) == own
    assert row.seeded(None) == row
    if own:
        assert row.seeded(7).seed != row.seeded(8).seed
        assert 0 <= (row.seeded((1 << 63) - 1).seed or 0) < 1 << 31


def test_a_repair_keeps_the_seed_of_its_row() -> None:
    repair = Repair("{", "no JSON", 1)
    chat = Requests(Generation("chat", "m", {"seed": 7}))
    assert orjson.loads(chat.body(b"[]", repair, 99))["seed"] == 99
    assert orjson.loads(chat.body(b"[]"))["seed"] == 7
    text = Requests(Generation("completion", "m", {"seed": 7}))
    assert orjson.loads(text.body(b'"p"', repair, 99))["seed"] == 100
