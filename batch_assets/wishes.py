"""What is wanted of one request: deadline, budget, objective, from the dataset's YAML and tags of its run or backfill.

A *request* is what makes batches now: a refresh or re-drive (its run), a backfill, or batches that somebody
materialized by hand (their run).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, get_args

from batch_assets.launcher import REQUEST_TAG
from batch_assets.moments import Deadline, MomentProblem, parse_deadline
from batch_assets.spec import GeneratedDatasetSpec
from gpu_runner.offers import Objective
from gpu_runner.targets import DatasetTarget, Targets

DEADLINE_TAG = "batch/deadline"
BUDGET_TAG = "batch/budget_usd"
OBJECTIVE_TAG = "batch/objective"
INSTANCES_TAG = "batch/max_instances"
WISH_TAGS = (DEADLINE_TAG, BUDGET_TAG, OBJECTIVE_TAG, INSTANCES_TAG)
BACKFILL_TAG = "dagster/backfill"  # dagster/_core/storage/tags.py

BY_HAND = "run:"


class WishError(ValueError):
    """A tag that says what cannot be wanted."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """Deadline, budget in US dollars, objective and most instances; None: nothing was said."""

    deadline: Deadline | None = None
    budget_usd: float | None = None
    objective: Objective = "cheapest"
    max_instances: int | None = None


def wishes(spec: GeneratedDatasetSpec, tags: Mapping[str, str]) -> Wishes:
    """The spec's wishes, overridden by those in the tags. Raises WishError naming the tag."""
    found = Wishes(
        parse_deadline(spec.deadline, spec.timezone) if spec.deadline else None,
        spec.budget_usd,
        spec.objective,
        spec.max_instances,
    )
    if (text := tags.get(DEADLINE_TAG)) is not None:
        try:
            found = dataclasses.replace(found, deadline=parse_deadline(text, spec.timezone))
        except MomentProblem as error:
            raise WishError(
                f"tag {DEADLINE_TAG}: expected {error.expected}, found {text[:80]!r}. {error.hint}"
            ) from None
    if (text := tags.get(BUDGET_TAG)) is not None:
        found = dataclasses.replace(found, budget_usd=_amount(text))
    if (text := tags.get(OBJECTIVE_TAG)) is not None:
        if text not in get_args(Objective):
            raise WishError(f"tag {OBJECTIVE_TAG}: expected {', '.join(get_args(Objective))}, found {text[:80]!r}")
        found = dataclasses.replace(found, objective=cast(Objective, text))
    if (text := tags.get(INSTANCES_TAG)) is not None:
        if not (text.isdecimal() and 1 <= int(text) <= 999):
            raise WishError(f"tag {INSTANCES_TAG}: expected a whole number from 1 to 999, found {text[:80]!r}")
        found = dataclasses.replace(found, max_instances=int(text))
    return found


def _amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not 0 < amount < math.inf:
        raise WishError(f"tag {BUDGET_TAG}: expected US dollars above 0, found {text[:80]!r}")
    return amount


def tags_of(
    deadline: str | None, budget_usd: float | None, objective: str | None, max_instances: int | None
) -> dict[str, str]:
    """The tags that say this; what is None is left out."""
    said = zip(WISH_TAGS, (deadline, budget_usd, objective, max_instances), strict=True)
    return {tag: str(value) for tag, value in said if value is not None}


def request_of(run_id: str, tags: Mapping[str, str]) -> str:
    """The request that a range run belongs to."""
    return tags.get(REQUEST_TAG) or tags.get(BACKFILL_TAG) or f"{BY_HAND}{run_id}"


def begin(book: Targets, spec: GeneratedDatasetSpec, request: str, tags: Mapping[str, str]) -> DatasetTarget:
    """Write down what is wanted of the request; again for one that is known, its time and command stay.

    Its time begins when the books first hear of it, by the database's clock. Raises WishError.
    """
    wanted = wishes(spec, tags)
    known = book.target(spec.name)
    since = known.since if known is not None and known.request == request else book.now()
    return book.begin_request(
        spec.name,
        request,
        deadline_at=wanted.deadline.at(since) if wanted.deadline else None,
        budget_usd=wanted.budget_usd,
        objective=wanted.objective,
        max_instances=wanted.max_instances,
    )


def begin_unless_busy(book: Targets, spec: GeneratedDatasetSpec, request: str, tags: Mapping[str, str]) -> None:
    """Begin the request, unless another one is under way: its budget and its time go on, until the capacity sensor sees
    that it is over. Raises WishError, also then."""
    wishes(spec, tags)
    known = book.target(spec.name)
    if known is None or known.request in ("", request):
        begin(book, spec, request, tags)
