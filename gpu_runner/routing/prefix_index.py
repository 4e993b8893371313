"""How much of a prompt an engine has in its prefix cache, guessed from what was sent to it. Pure.

A prompt is cut into blocks; a block's key depends on all blocks before it, as in vLLM's prefix cache. Which blocks an
engine still has is not known: the last `most` that were sent to it are taken to be there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_BYTES = 1024
MOST_BLOCKS = 64  # of one prompt: what lies beyond is not looked for


def block_keys(prompt: bytes, block: int = BLOCK_BYTES, *, caller: str = "") -> tuple[int, ...]:
    """Keys of the whole blocks of a prompt, the first ones first. Of this process only: str hashes are salted.

    Of this `caller` only: predictions are told to callers, and must not tell what another one has asked.
    """
    keys, before = [], hash(caller)
    for start in range(0, min(len(prompt) - block + 1, MOST_BLOCKS * block), block):
        before = hash((before, prompt[start : start + block]))
        keys.append(before)
    return tuple(keys)


class PrefixIndex:
    """Blocks that one engine is taken to have, the least recently sent first."""

    def __init__(self, most: int = 4096) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._most = most

    def match(self, keys: Sequence[int]) -> int:
        """How many of the first blocks are there."""
        for number, key in enumerate(keys):
            if key not in self._blocks:
                return number
        return len(keys)

    def sent(self, keys: Sequence[int]) -> None:
        """A prompt goes to the engine."""
        for key in keys:
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
