"""Which rows are sent in the order of their prompts, so that one beginning is computed once: engines cache prefixes.

Rows are cut into windows in the order in which they are read. Within a window they are sent in the order of their
prompts, once it is seen that this pays: prompts of a window have beginnings in common that an engine's cache need not
have any more by the time the next one comes. No row waits for rows of a later window, so none waits for ever. Pure.

How long a cache keeps blocks that are not used (the last ones that were, where there is room): vLLM's documentation,
Automatic Prefix Caching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_runner.routing.prefix_index import BLOCK_BYTES, PrefixIndex, block_keys

Place = tuple[int, bytes]  # number of the window, and the prompt: rows are sent in this order

AS_READ: Place = (0, b"")


@dataclass(frozen=True, slots=True)
class PrefixPolicy:
    """`rows`, or `prompt_bytes` of prompts, are a window; 0 rows: all rows are sent as they were read.

    `cached_blocks` (of BLOCK_BYTES) of prompts any engine is taken to have in its cache: rows may share those with the
    rows before them in any order. Prompts are ordered where `least_share` of all they hold is shared beyond that, once
    `least_rows` of a window are known.
    """

    rows: int = 0
    prompt_bytes: int = 32 << 20
    cached_blocks: int = 64
    least_share: float = 0.1
    least_rows: int = 50


class PrefixOrder:
    """The places of rows, one after the other."""

    def __init__(self, policy: PrefixPolicy) -> None:
        self._policy = policy
        self._window = 1
        self.pays = False
        self._begin()

    def _begin(self) -> None:
        self._rows = self._bytes = self._blocks = self._shared = 0
        self._cached, self._seen = PrefixIndex(self._policy.cached_blocks), PrefixIndex(1 << 16)

    @property
    def ahead(self) -> int:
        """How many rows are to be read ahead, so that the next window is known before one of its rows is sent."""
        return self._policy.rows if self.pays else 0

    def places(self, prompts: Sequence[bytes]) -> list[Place]:
        """The places of the rows of the batch that was read next, by their prompts. A window ends with a batch."""
        policy = self._policy
        if not policy.rows:
            return [AS_READ] * len(prompts)
        if self._rows >= policy.rows or self._bytes >= policy.prompt_bytes:
            self.pays = self._worth_it()
            self._window += 1
            self._begin()
        for prompt in prompts:
            self._learn(prompt)
        self.pays = self.pays or (self._rows >= policy.least_rows and self._worth_it())
        return [(self._window, prompt if self.pays else b"") for prompt in prompts]

    def _learn(self, prompt: bytes) -> None:
        keys = block_keys(prompt)
        self._rows += 1
        self._bytes += len(prompt)
        self._blocks += 1 + len(prompt) // BLOCK_BYTES
        self._shared += self._seen.match(keys) - self._cached.match(keys)
        self._seen.sent(keys)
        self._cached.sent(keys)

    def _worth_it(self) -> bool:
        return self._shared >= self._policy.least_share * self._blocks
