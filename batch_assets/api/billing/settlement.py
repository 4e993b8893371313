"""The end of a batch in the ledger: what its parts did not say is added, what they said too much is taken back.

Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from batch_assets.api.billing.usage import UsageKey, Used


@dataclass(frozen=True, slots=True)
class Settlement:
    """`rest`: what the whole batch has beyond its parts. `lines`: the same by heading, as it is to be added."""

    rest: Used
    lines: dict[UsageKey, Used]


def settlement(whole: Used, parts: Sequence[tuple[UsageKey, Used]], today: UsageKey) -> Settlement:
    """What brings the lines of a batch to `whole`. `parts`: what it has added so far, the oldest first.

    More is of today. Less is taken from where it was added, from the newest part on: a heading loses no more of
    anything than the batch gave it, so none falls below 0.
    """
    said = Used()
    for _, used in parts:
        said = said.plus(used)
    rest = whole.plus(said, -1)
    lines: defaultdict[UsageKey, dict[str, int]] = defaultdict(dict)
    for name in Used.__dataclass_fields__:
        left = getattr(rest, name)
        for key, used in reversed(parts):
            back = max(0, min(-left, getattr(used, name)))
            if back:
                lines[key][name] = lines[key].get(name, 0) - back
                left += back
        if left:
            lines[today][name] = lines[today].get(name, 0) + left
    return Settlement(rest, {key: Used(**changes) for key, changes in lines.items()})
