"""Datasets that read the tables of others: which one is before which. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.source import JUDGED, PASSED, TABLE, table_read_by
from gpu_runner.errors import ExitStatus, UserFacingError


class ChainError(UserFacingError):
    """Datasets that cannot be brought up to date one after the other."""

    exit_status = ExitStatus.WRONG_REQUEST


def upstream_of(spec: GeneratedDatasetSpec, known: Collection[str]) -> str | None:
    """The dataset, of those that are `known`, whose table a dataset reads; None: it reads none."""
    name, _, asset = (table_read_by(spec.source) or "").rpartition("/")
    return name if asset in (TABLE, JUDGED, PASSED) and name in known else None


def in_tree(specs: Mapping[str, GeneratedDatasetSpec]) -> list[tuple[str, int]]:
    """All datasets, each below the one whose table it reads, with how deep it is; those of a circle come last."""
    below: dict[str | None, list[str]] = {}
    for name in sorted(specs):
        below.setdefault(upstream_of(specs[name], specs), []).append(name)
    found: list[tuple[str, int]] = []
    waiting = [(name, 0) for name in reversed(below.get(None, []))]
    while waiting:
        name, depth = waiting.pop()
        found.append((name, depth))
        waiting += [(one, depth + 1) for one in reversed(below.get(name, []))]
    placed = {name for name, _ in found}
    return found + [(name, 0) for name in sorted(specs) if name not in placed]


def wanting(specs: Mapping[str, GeneratedDatasetSpec], name: str) -> GeneratedDatasetSpec | None:
    """The dataset that wants rows which the rules of one accept: itself, or one before it; None: none does."""
    return next((spec for spec in specs.values() if spec.want is not None and spec.accepted_by == name), None)


def round_of(specs: Mapping[str, GeneratedDatasetSpec], wants: GeneratedDatasetSpec) -> list[str]:
    """The datasets that a round takes, in their order: from the one that wants rows to the one that accepts them; none
    where these are in no row. Raises ChainError."""
    steps = steps_to(specs, wants.accepted_by) if wants.accepted_by in specs else []
    return steps[steps.index(wants.name) :] if wants.name in steps else []


def steps_to(specs: Mapping[str, GeneratedDatasetSpec], name: str) -> list[str]:
    """The datasets that are made before one, the first of all first, and it itself last. Raises ChainError."""
    found = [name]
    while (before := upstream_of(specs[found[0]], specs)) is not None:
        if before in found:
            raise ChainError(
                f"{name}: expected datasets in a row, found a circle: {' reads '.join([*found[::-1], before])}"
            )
        found.insert(0, before)
    return found
