"""How much sooner a run ends when its last rows are sent longest prompt first: a model of slots, no engine.

    python -m benchmarks.longest_first [--seeds 8]

Each slot writes one token a step, and takes the next row when its own is done. A step takes the same time however many
slots are busy, which is best for the order that is tried: an engine's steps are shorter when few rows are left. Prompts
and answers are as long as those of GSM8K (their lengths correlate by 0.5), read from the folder that
BATCH_ASSETS_TEST_DATA names, drawn with replacement. Printed: length of the run ÷ that in the order of the source. The
last 2 × slots rows (about what a feed has read ahead) or 8 × slots rows are sorted by their prompts, or by their
answers, which nobody knows before. `apart`: by prompts, where answers have nothing to do with their prompts.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

SIZES = ((1_000, 256), (5_000, 64), (5_000, 256), (5_000, 1_024), (20_000, 256), (125_000, 256), (125_000, 1_024))
BYTES_A_TOKEN = 4


def run_steps(answers: Sequence[int], slots: int) -> int:
    """Steps until the last of these answers is written, in this order."""
    busy = list(answers[:slots])
    heapq.heapify(busy)
    for tokens in answers[slots:]:
        heapq.heapreplace(busy, busy[0] + tokens)
    return max(busy)


def longest_last(answers: Sequence[int], lengths: Sequence[int], rows: int) -> list[int]:
    """The answers with the last `rows` of them sorted by these lengths, the longest first."""
    cut = max(0, len(answers) - rows)
    tail = sorted(range(cut, len(answers)), key=lambda place: -lengths[place])
    return [*answers[:cut], *(answers[place] for place in tail)]


def ratios(prompts: Sequence[int], answers: Sequence[int], slots: int, apart: Sequence[int]) -> list[float]:
    """Of one order each: last 2 × and 8 × slots by the prompts, last 8 × slots by the answers, 2 × slots `apart`."""
    before = run_steps(answers, slots)
    orders = ((prompts, 2 * slots), (prompts, 8 * slots), (answers, 8 * slots), (apart, 2 * slots))
    return [run_steps(longest_last(answers, lengths, rows), slots) / before for lengths, rows in orders]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    seeds = parser.parse_args().seeds
    folder = Path(os.environ["BATCH_ASSETS_TEST_DATA"]) / "gsm8k"
    lines = [json.loads(line) for name in ("train", "test") for line in (folder / f"{name}.jsonl").open()]
    known = [(len(one["question"]) // BYTES_A_TOKEN, 1 + len(one["answer"]) // BYTES_A_TOKEN) for one in lines]
    print(f"{'rows':>8} {'slots':>6}  2 × by prompt  8 × by prompt  8 × by answer      2 × apart")
    for rows, slots in SIZES:
        found = []
        for seed in range(seeds):
            rng = random.Random(seed)
            drawn = rng.choices(known, k=rows)
            prompts, answers = [prompt for prompt, _ in drawn], [answer for _, answer in drawn]
            found.append(ratios(prompts, answers, slots, rng.sample(prompts, rows)))
        said = "  ".join(f"{mean(column):13.3f}" for column in zip(*found, strict=True))
        print(f"{rows:8,} {slots:6,}  {said}")


if __name__ == "__main__":
    main()
