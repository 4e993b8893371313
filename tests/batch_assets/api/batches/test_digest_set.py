"""A set of digests is as Python's, and small."""

import random
import tracemalloc

import pytest

from batch_assets.api.batches.digest_set import MOST_RECENT, DigestSet


@pytest.mark.parametrize("most_recent", [1, 2, 7, 1000])
def test_it_says_what_a_set_says(most_recent: int):
    draw, ours, theirs = random.Random(most_recent), DigestSet(most_recent), set[bytes]()
    # Few different halves: many digests share the one or the other, and some are as small or as large as can be.
    halves = [bytes(8), b"\xff" * 8, *(draw.randbytes(8) for _ in range(20))]
    for _ in range(1500):
        digest = draw.choice(halves) + draw.choice(halves)
        assert ours.add(digest) == (digest not in theirs)
        theirs.add(digest)
        assert len(ours) == len(theirs)
    assert len(theirs) > 400
    assert not any(ours.add(digest) for digest in theirs)


@pytest.mark.slow
def test_three_times_as_many_as_are_kept_apart_take_less_than_a_third_of_pythons_memory():
    """A tenth of the usual numbers: what is measured is a share, and tracing each allocation takes seconds."""
    kept_apart, draw = MOST_RECENT // 10, random.Random(1)

    def grown(kept: DigestSet | set[bytes]) -> int:
        tracemalloc.start()
        try:
            for _ in range(3 * kept_apart + 100):
                kept.add(draw.randbytes(16))
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    ours, theirs = grown(DigestSet(kept_apart)), grown(set())
    assert ours < theirs / 3, f"{ours:,} and {theirs:,} bytes"
