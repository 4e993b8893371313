"""How many inputs one request may hold. Pure.

Three bounds: inputs, bytes and tokens. Far more tokens than an engine computes in one step (vLLM's
`max_num_batched_tokens`, 8,192 by default) gain nothing: steps are full, and the cost of a request is spread over much
work already. Tokens of a text are estimated by its bytes; the ratio is learned from what the server counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# Of English prose; corrected by what the server counts.
TOKENS_PER_BYTE = 0.25
# How much one answered list corrects the ratio.
RATIO_WEIGHT = 0.1
# What a row that failed in company is sent with: fewer, and in its last try none.
RETRY_SHARE = 8


@dataclass(frozen=True, slots=True)
class ListLimits:
    """What a list may hold at most. One input alone is always allowed."""

    inputs: int = 64
    tokens: int = 16_384
    bytes: int = 256 << 10


class ListSize:
    """What one server takes. `most`: inputs; falls where the server is found to refuse longer lists."""

    def __init__(self, limits: ListLimits) -> None:
        self._limits = limits
        self.most = max(1, limits.inputs)
        self._ratio = TOKENS_PER_BYTE

    def fits(self, inputs: int, size: int) -> bool:
        """Whether so many inputs of so many bytes together may be one list."""
        if inputs <= 1:
            return True
        limits = self._limits
        return inputs <= self.most and size <= limits.bytes and size * self._ratio <= limits.tokens

    def counted(self, tokens: int, size: int) -> None:
        """The server counted so many tokens in so many bytes."""
        if tokens > 0 and size > 0:
            self._ratio += RATIO_WEIGHT * (tokens / size - self._ratio)

    def refuses_more_than(self, inputs: int) -> None:
        """Longer lists were refused though no input of them was at fault."""
        self.most = max(1, min(self.most, inputs))

    def with_tries_left(self, failures: int, tries: int) -> int:
        """With how many inputs one may be sent, itself included, that failed so often in company of others.

        Its last try it has alone: it ends by its own failure, never by that of another.
        """
        if failures + 1 >= tries:
            return 1
        return self.most if failures == 0 else max(1, self.most // RETRY_SHARE)


def take_list(
    take: Callable[[], T | None],
    put_back: Callable[[T], None],
    size: ListSize,
    *,
    most: int,
    bytes_of: Callable[[T], int],
    companions: Callable[[T], int],
    kind_of: Callable[[T], object] = lambda one: "",
) -> list[T]:
    """The next list of a queue, in order; empty where nothing is queued. `companions`: how many may go with this one.

    `kind_of`: only what is of one kind goes together, and None alone. The first one that does not fit is put back.
    """
    first = take()
    if first is None:
        return []
    found, total, room = [first], bytes_of(first), min(most, companions(first))
    if room > 1 and (kind := kind_of(first)) is None:
        return found
    while len(found) < room:
        following = take()
        if following is None:
            break
        room = min(room, companions(following))
        total += bytes_of(following)
        if len(found) >= room or not size.fits(len(found) + 1, total) or kind_of(following) != kind:
            put_back(following)
            break
        found.append(following)
    return found
