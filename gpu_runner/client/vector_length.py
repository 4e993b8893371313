"""All vectors of a dataset have one length: a vector of another one can be compared with none of them. Pure."""

from __future__ import annotations

from gpu_runner.client.protocol import EngineRefused

# So many in a row are no slip of one answer: either the first vector was wrong, or this engine serves another model.
MOST_OTHERS = 20


class VectorLength:
    """The length that vectors must have: `known` from the request or from committed vectors, else that of the first."""

    def __init__(self, known: int | None = None) -> None:
        self.expected = known
        self._others = 0

    def check(self, found: int) -> str | None:
        """What is wrong with a vector of this length, or None.

        Raises EngineRefused when vectors of other lengths come one after the other.
        """
        if self.expected is None:
            self.expected = found
        if found == self.expected:
            self._others = 0
            return None
        self._others += 1
        problem = f"expected {self.expected} numbers, as the vectors before it have, found {found}"
        if self._others >= MOST_OTHERS:
            raise EngineRefused(
                f"{self._others} vectors in a row: {problem}; check the engine's model and sampling.dimensions, and "
                "regenerate the batches whose vectors are of the wrong length"
            )
        return problem
