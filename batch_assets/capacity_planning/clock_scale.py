"""Words for clocks that are not ours: simulated providers run faster, so that their hours pass in our seconds."""

from __future__ import annotations

from collections.abc import Mapping


def scale_words(clocks: Mapping[str, float]) -> str:
    """What a duration and a price mean beside each other; "" where every clock is ours.

    `clocks`: simulated seconds per real second, by provider.
    """
    scaled: dict[float, list[str]] = {}
    for provider, clock in sorted(clocks.items()):
        if clock != 1.0:
            scaled.setdefault(clock, []).append(provider)
    return "; ".join(_words(clock, providers) for clock, providers in sorted(scaled.items()))


def _words(clock: float, providers: list[str]) -> str:
    names = ", ".join(providers)
    return (
        f"simulated clock: {names} {'runs' if len(providers) == 1 else 'run'} {clock:g} × as fast as real time; "
        f"a second here is {clock:g} s there, and is billed as such"
    )
