"""Votes of a judge, counted: seconds, memory and disk. `python -m benchmarks.judge_votes --rows 1000000`."""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from batch_assets.judging.votes import Scores
from batch_assets.spec.judge import JudgeSpec

VOTES, AT_ONCE = 3, 4_000


def votes(first: int, count: int, draw: np.random.Generator) -> pa.Table:
    """Lines of a table of votes, one in fifty of them lost."""
    return pa.table(
        {
            "judged_id": [f"question-{(first + number) // VOTES:09d}" for number in range(count)],
            "score": pa.array(draw.integers(1, 6, count), mask=draw.random(count) < 0.02),
            "error": pa.nulls(count, pa.string()),
            "duplicate_of": pa.nulls(count, pa.string()),
            "prompt_tokens": np.full(count, 300),
            "completion_tokens": np.full(count, 60),
            "usd": np.full(count, 1e-5),
        }
    )


def main() -> None:
    """Count three votes on each of so many rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    judge = JudgeSpec.model_validate({"dataset": "answers", "rubric": "Good.", "votes": VOTES})
    draw, began, used = np.random.default_rng(1), time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder, Scores(judge, Path(folder)) as scores:
        for first in range(0, rows * VOTES, AT_ONCE):
            scores.add(votes(first, min(AT_ONCE, rows * VOTES - first), draw))
        counted = sum(table.num_rows for table in scores.rows())
        overall = scores.overall()
        disk = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    assert counted == rows and overall.votes == rows * VOTES
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{rows:,} rows, {overall.votes:,} votes: {time.monotonic() - began:.0f} s, "
        f"{time.process_time() - used:.0f} s of CPU, {memory:,} MiB, {disk >> 20:,} MiB of disk"
    )


if __name__ == "__main__":
    main()
