"""Each part of the service ended at a random point of the work: a small run of benchmarks/front_door_kills.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.timing import PATIENCE

from benchmarks.front_door_kills import KINDS, Sizes, run

pytestmark = pytest.mark.slow

# Finished rows reach the store within 0.2 s: those are lost with the disk of the service, besides those in flight.
LOST_WITH_THE_DISK = 200 * PATIENCE


def test_a_batch_survives_the_end_of_each_part(tmp_path: Path) -> None:
    sizes = Sizes(2_000, 2, len(KINDS) + 1, slots=16, store_away=1.5, engine_away=2.0, seed=7, goes_on=5 * 5 * PATIENCE)
    verdict = run(tmp_path, sizes)
    assert verdict.wrong == []
    assert verdict.asked_again <= verdict.in_flight + LOST_WITH_THE_DISK
