"""Machines of one name at a cloud that lets several have it: one is kept, the others are ended by their ids.

Everybody keeps the same one, whatever he has seen before: the oldest, and of equally old ones that with the smaller id.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from gpu_runner.providers.base import ProviderError, ProviderUnclear


class Named(Protocol):
    """What a cloud says of one machine. `created_at`: Unix seconds by the cloud's clock."""

    @property
    def name(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def created_at(self) -> float: ...
    @property
    def ended(self) -> bool: ...


N = TypeVar("N", bound=Named)


def one_of_each_name(found: Iterable[N]) -> tuple[list[N], list[N]]:
    """The machines to keep, one for each name, and those to end: further ones that run.

    Of a name whose machines have all ended, the one that ended is kept that was created last.
    """
    by_name: dict[str, list[N]] = {}
    for one in found:
        by_name.setdefault(one.name, []).append(one)
    kept: list[N] = []
    surplus: list[N] = []
    for same in by_name.values():
        first, *others = sorted((one for one in same if not one.ended), key=lambda one: (one.created_at, one.id)) or [
            max(same, key=lambda one: (one.created_at, one.id))
        ]
        kept.append(first)
        surplus += others
    return kept, surplus


def settle(found: Iterable[N], end: Callable[[N], None]) -> list[N]:
    """One machine for each name; the others are told to end. What cannot be ended now is met again by the next look."""
    kept, surplus = one_of_each_name(found)
    for one in surplus:
        with contextlib.suppress(ProviderError, ProviderUnclear):
            end(one)
    return kept
