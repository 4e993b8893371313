"""Rules of a filter on planted texts: recall and precision, rows/s, memory and disk.

`python benchmarks/filter_rules.py --rows 200000`: a tenth of the rows are copies of others: equal but for case, or with
1, 2, 4 or 8 of 60 words changed; as many hold a passage of an evaluation set. What 20M rows take is computed from that.
Words are made up, so that of `language` only the speed means something.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import polars as pl

from batch_assets.filtering.repeated_rows import EqualTexts, RowsMark, SimilarTexts
from batch_assets.filtering.row_marks import Mark, mark_of
from batch_assets.filtering.similar_vectors import SimilarVectors
from batch_assets.spec.row_rules import DuplicatesRule, NearDuplicatesRule, RowRule, SemanticDuplicatesRule

WORDS = 60
CHANGED = (0, 1, 2, 4, 8)
BLOCK = 4000
GOAL_ROWS = 20_000_000


def planted(rows: int, seed: int, passages: list[str]) -> Iterator[tuple[str, str]]:
    """(kind, text) of each row; a copy comes after its original."""
    draw = random.Random(seed)
    vocabulary = [f"{draw.choice('bcdfglmnprst')}{draw.choice('aeiou')}{number:x}" for number in range(30_000)]
    weights = [1 / (place + 10) for place in range(len(vocabulary))]
    kept: list[str] = []
    while rows > 0:
        for text in (" ".join(words) for words in _drawn(draw, vocabulary, weights, 100)):
            kind = "other"
            roll = draw.random()
            if roll < 0.1 and kept:
                count = draw.choice(CHANGED)
                words = draw.choice(kept).split()
                for place in draw.sample(range(WORDS), count):
                    words[place] = draw.choice(vocabulary)
                kind, text = f"changed {count}", " ".join(words).capitalize()
            elif roll < 0.2:
                kind, text = "passage", f"{text} {draw.choice(passages)}"
            elif len(kept) < 20_000:
                kept.append(text)
            yield kind, text
            rows -= 1
            if rows <= 0:
                return


def _drawn(draw: random.Random, vocabulary: list[str], weights: list[float], count: int) -> Iterator[list[str]]:
    words = draw.choices(vocabulary, weights, k=WORDS * count)
    return (words[first : first + WORDS] for first in range(0, len(words), WORDS))


def planted_vectors(rows: int, width: int, seed: int) -> tuple[npt.NDArray[np.float32], list[str]]:
    """Rows of subjects, each of `width` numbers that vary along 40 directions of its own and a little along all, as
    vectors of texts do. A tenth are copies of earlier ones, at a cosine of 0.90 to 0.99 to them."""
    draw = np.random.default_rng(seed)
    subjects = [(draw.normal(size=width), draw.normal(size=(40, width)) * 0.2) for _ in range(200)]
    found = np.empty((rows, width), np.float32)
    for first in range(0, rows, 1000):
        part = found[first : first + 1000]
        middle, along = subjects[draw.integers(200)]
        part[:] = middle + draw.normal(size=(len(part), 40)) @ along + draw.normal(size=part.shape) * 0.2
    draw.shuffle(found)
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    kinds = ["other"] * rows
    for row in np.sort(draw.choice(np.arange(rows // 2, rows), rows // 10, replace=False)):
        original, cosine = found[draw.integers(rows // 2)], draw.choice([0.90, 0.94, 0.96, 0.98, 0.99])
        aside = draw.normal(size=width)
        aside -= aside @ original * original
        found[row] = cosine * original + (1 - cosine**2) ** 0.5 * aside / np.linalg.norm(aside)
        kinds[row] = f"cosine {cosine:.2f}"
    return found, kinds


def memory() -> int:
    """Most megabytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def disk(folder: Path) -> int:
    """Bytes on disk below a folder; of a sparse file what it takes."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def measure(name: str, mark: Mark | RowsMark, frames: list[pl.DataFrame], kinds: list[str], folder: Path) -> None:
    """Print what one rule flags of each kind, and what it takes."""
    began, cpu = time.monotonic(), time.process_time()
    flags = np.zeros(len(kinds), np.bool_)
    used = 0
    if isinstance(mark, EqualTexts | SimilarTexts | SimilarVectors):
        first = 0
        for frame in frames:
            mark.learn(frame, first + np.arange(frame.height))
            first += frame.height
        for found in mark.flagged():
            flags[found] = True
        used = disk(folder)
        mark.close()
    else:
        flags = np.concatenate([cast(Mark, mark).flagged(frame).to_numpy() for frame in frames])
    seconds = time.monotonic() - began
    total, hit = Counter(kinds), Counter(kind for kind, found in zip(kinds, flags, strict=True) if found)
    said = {kind: f"{hit[kind] / total[kind]:.4f}" for kind in sorted(total)}
    rate = len(kinds) / (time.process_time() - cpu)
    print(
        f"{name}: {rate:,.0f} rows/s of CPU, {len(kinds) / seconds:,.0f} rows/s, {memory():,} MB at most, "
        f"{used / len(kinds):,.0f} bytes of disk a row; at {GOAL_ROWS:,} rows {GOAL_ROWS / rate / 60:,.0f} min of CPU, "
        f"{used / len(kinds) * GOAL_ROWS / 1e9:.1f} GB of disk. Flagged: {json.dumps(said)}",
        flush=True,
    )


def measure_vectors(rows: int, width: int, seed: int) -> None:
    """The same of the rule that compares vectors. Rows of one subject may be near each other without being copies."""
    vectors, kinds = planted_vectors(rows, width, seed)
    frames = [pl.DataFrame({"output": vectors[first : first + BLOCK]}) for first in range(0, rows, BLOCK)]
    del vectors
    print(f"{rows:,} vectors of {width} numbers; {memory():,} MB before", flush=True)
    with tempfile.TemporaryDirectory() as name:
        mark = SimilarVectors(SemanticDuplicatesRule(column="output"), Path(name), rows)
        measure("semantic_duplicates", mark, frames, kinds, Path(name))


def main() -> None:
    """Measure all rules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vectors", type=int, default=0, help="measure that many vectors, and no texts")
    parser.add_argument("--width", type=int, default=384)
    given = parser.parse_args()
    if given.vectors:
        measure_vectors(given.vectors, given.width, given.seed)
        return
    draw = random.Random(given.seed + 1)
    passages = [" ".join(f"eval{draw.randrange(5000)}" for _ in range(25)) for _ in range(2000)]
    made = list(planted(given.rows, given.seed, passages))
    kinds = [kind for kind, _ in made]
    texts = [text for _, text in made]
    frames = [pl.DataFrame({"output": texts[first : first + BLOCK]}) for first in range(0, len(texts), BLOCK)]
    del made, texts
    print(f"{given.rows:,} rows of {WORDS} words; {memory():,} MB before", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "evaluation.jsonl").write_text("".join(json.dumps({"q": one}) + "\n" for one in passages))
        measure("duplicates", EqualTexts(DuplicatesRule(column="output"), folder), frames, kinds, folder)
        near = NearDuplicatesRule(column="output")
        measure("near_duplicates", SimilarTexts(near, folder, given.rows), frames, kinds, folder)
        rules: dict[str, dict[str, Any]] = {
            "overlap": {"files": "evaluation.jsonl", "text": "q"},
            "language": {"allowed": ["en"]},
            "refusals": {},
            "personal_data": {},
            "length": {"unit": "words", "max": 100},
        }
        for kind, keys in rules.items():
            mark = mark_of(RowRule.model_validate({kind: {"column": "output", **keys}}), ["output"], folder)
            measure(kind, cast(Mark, mark), frames, kinds, folder)


if __name__ == "__main__":
    main()
