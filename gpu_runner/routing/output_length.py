"""How many tokens an answer will have: of the same caller and model lately, else of the model, else a guess. Pure."""

from __future__ import annotations

from collections import OrderedDict

MOST_CALLERS = 10_000
WEIGHT = 0.1
GUESS = 256.0


class OutputLengths:
    """Exponentially weighted means. Bounded: callers that were not heard for longest are forgotten."""

    def __init__(self) -> None:
        self._means: OrderedDict[tuple[str, str], float] = OrderedDict()

    def expected(self, caller: str, model: str, limit: int | None = None) -> float:
        """Tokens; not more than the request's own limit."""
        found = self._means.get((caller, model), self._means.get(("", model), GUESS))
        return found if limit is None else min(found, float(limit))

    def ended(self, caller: str, model: str, tokens: int) -> None:
        """An answer had so many."""
        for key in {(caller, model), ("", model)}:
            before = self._means.get(key)
            self._means[key] = float(tokens) if before is None else before + WEIGHT * (tokens - before)
            self._means.move_to_end(key)
        while len(self._means) > MOST_CALLERS:
            self._means.popitem(last=False)
