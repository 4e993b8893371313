"""Whether a text is similar to one of those before it, within bounded time and memory: 0.9 MB for 5,000 texts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from batch_assets.gates.text_features import PERMUTATIONS, runs_of, signature, similarities, words_of

WORDS_OF_RUN = 3


class SimilarTextsBefore:
    """The newest `remembered` texts, as MinHash signatures of their runs of three words. For one thread.

    One bit of each hash finds the few texts whose signatures are compared: of two texts with similarity s, bits differ
    with a chance of (1 - s) / 2 ("b-bit minwise hashing", Li and König, 2010). Raises BadCondition without rensa.
    """

    def __init__(self, similarity: float, remembered: int) -> None:
        self._similarity = similarity
        chance = (1 - similarity) / 2
        self._differ = PERMUTATIONS * chance + 3 * math.sqrt(PERMUTATIONS * chance * (1 - chance)) + 1
        self._signatures: Any = np.zeros((remembered, PERMUTATIONS), np.uint8)
        self._bits: Any = np.zeros((PERMUTATIONS // 64, remembered), np.uint64)
        self._texts = 0
        signature([""])

    def look(self, text: str) -> bool:
        """Whether one before is similar; this one is remembered. A text without words is similar to none."""
        words = words_of(text)
        if not words:
            return False
        found = signature(runs_of(words, WORDS_OF_RUN)).astype(np.uint8)
        bits = np.packbits(found & 1).view(np.uint64)
        there = min(self._texts, len(self._signatures))
        differ = sum(np.bitwise_count(row[:there] ^ one) for row, one in zip(self._bits, bits, strict=True))
        near = np.flatnonzero(differ <= self._differ)
        similar = bool((similarities(self._signatures[near], found) >= self._similarity).any())
        place = self._texts % len(self._signatures)
        self._signatures[place], self._bits[:, place] = found, bits
        self._texts += 1
        return similar
