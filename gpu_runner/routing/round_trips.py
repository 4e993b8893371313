"""How far away engines are: round trips as measured, by engine and by region. Pure.

What is measured of an engine is the time of a small request to it on an open connection; the least of the last ones is
its round trip, because load only adds to it. An engine that was not measured yet counts as far away as the nearest one
of its region; where nobody there was measured either, an engine of the service's own region (or of none that is named)
counts as near, one of another region as `ASSUMED_SECONDS` away.
"""

from __future__ import annotations

from collections import OrderedDict, deque

ASSUMED_SECONDS = 0.05  # to another region, until something there was measured
KEPT = 30  # measurements of an engine: half a minute of them
MOST_REGIONS = 100


class RoundTrips:
    """`region`: the service's own; empty: not named."""

    def __init__(self, region: str = "") -> None:
        self._own = region
        self._engines: dict[str, str] = {}  # the region of each engine
        self._measured: dict[str, deque[float]] = {}
        self._least: dict[str, float] = {}
        self._regions: OrderedDict[str, float] = OrderedDict()  # the last measurement in each

    def known(self, engine: str, region: str) -> None:
        """This engine is in this region; empty: not named."""
        self._engines[engine] = region

    def measured(self, engine: str, seconds: float) -> None:
        """A small request to it took so long."""
        kept = self._measured.setdefault(engine, deque(maxlen=KEPT))
        kept.append(seconds)
        self._least[engine] = min(kept)
        if region := self._engines.get(engine, ""):
            self._regions[region] = min(
                self._least[name] for name, where in self._engines.items() if where == region and name in self._least
            )
            self._regions.move_to_end(region)
            if len(self._regions) > MOST_REGIONS:
                self._regions.popitem(last=False)

    def seconds(self, engine: str) -> float:
        """The round trip to this engine."""
        if engine in self._least:
            return self._least[engine]
        region = self._engines.get(engine, "")
        if region in self._regions:
            return self._regions[region]
        return ASSUMED_SECONDS if region and self._own and region != self._own else 0.0

    def regions(self) -> dict[str, float]:
        """The round trip to each region in which an engine was measured. May be called in any thread."""
        return dict(self._regions)

    def forget(self, engine: str) -> None:
        """Forget an engine that is gone. What is known of its region stays."""
        self._engines.pop(engine, None)
        self._measured.pop(engine, None)
        self._least.pop(engine, None)
