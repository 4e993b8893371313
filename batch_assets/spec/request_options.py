"""What is wanted of one request: deadline, budget, objective, from the dataset's YAML and tags of its run or backfill.

A *request* is what makes batches now: a refresh or re-drive (its run), a backfill, or batches that somebody
materialized by hand (their run).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, get_args

from batch_assets.spec.deadline import Deadline, InvalidDeadline, parse_deadline
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.tags import (
    ACCEPT_GATES_TAG,
    BACKFILL_TAG,
    BUDGET_TAG,
    DEADLINE_TAG,
    INSTANCES_TAG,
    OBJECTIVE_TAG,
    REQUEST_TAG,
    SIMULATE_TAG,
    UPSTREAM_TAG,
)
from gpu_runner.errors import ExitStatus, UserFacingError
from gpu_runner.offers.offer import Objective

if TYPE_CHECKING:
    from gpu_runner.fleet_database.targets import DatasetTarget, Targets

OPTION_TAGS = (DEADLINE_TAG, BUDGET_TAG, OBJECTIVE_TAG, INSTANCES_TAG, ACCEPT_GATES_TAG)

BY_HAND = "run:"


class InvalidTag(UserFacingError, ValueError):
    """A tag that says what cannot be wanted. `tag` is its name, `problem` what was expected and found."""

    exit_status = ExitStatus.WRONG_REQUEST

    def __init__(self, tag: str, problem: str) -> None:
        super().__init__(f"tag {tag}: {problem}")
        self.tag, self.problem = tag, problem


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Deadline, budget in US dollars, objective and most instances; None: nothing was said. `accepted_gates`: those
    that do not pause the request."""

    deadline: Deadline | None = None
    budget_usd: float | None = None
    objective: Objective = "cheapest"
    max_instances: int | None = None
    accepted_gates: tuple[str, ...] = ()


def simulates(tags: Mapping[str, str]) -> bool:
    """Whether the request takes simulated providers where there is no fleet.yaml. Raises InvalidTag."""
    text = tags.get(SIMULATE_TAG, "false")
    if text not in ("true", "false"):
        raise InvalidTag(SIMULATE_TAG, f"expected true or false, found {text[:80]!r}")
    return text == "true"


def request_options(spec: GeneratedDatasetSpec, tags: Mapping[str, str]) -> RequestOptions:
    """The spec's wishes, overridden by those in the tags. Raises InvalidTag."""
    found = RequestOptions(
        parse_deadline(spec.deadline, spec.timezone) if spec.deadline else None,
        spec.budget_usd,
        spec.objective,
        spec.max_instances,
    )
    if (text := tags.get(DEADLINE_TAG)) is not None:
        try:
            found = dataclasses.replace(found, deadline=parse_deadline(text, spec.timezone))
        except InvalidDeadline as error:
            problem = f"expected {error.expected}, found {text[:80]!r}. {error.hint}"
            raise InvalidTag(DEADLINE_TAG, problem) from None
    if (text := tags.get(BUDGET_TAG)) is not None:
        found = dataclasses.replace(found, budget_usd=_amount(text))
    if (text := tags.get(OBJECTIVE_TAG)) is not None:
        if text not in get_args(Objective):
            raise InvalidTag(OBJECTIVE_TAG, f"expected {', '.join(get_args(Objective))}, found {text[:80]!r}")
        found = dataclasses.replace(found, objective=cast(Objective, text))
    if (text := tags.get(INSTANCES_TAG)) is not None:
        if not (text.isdecimal() and 1 <= int(text) <= 999):
            raise InvalidTag(INSTANCES_TAG, f"expected a whole number from 1 to 999, found {text[:80]!r}")
        found = dataclasses.replace(found, max_instances=int(text))
    if (text := tags.get(ACCEPT_GATES_TAG)) is not None:
        found = dataclasses.replace(found, accepted_gates=_gates(spec, text, of_chain=UPSTREAM_TAG in tags))
    return found


def _gates(spec: GeneratedDatasetSpec, text: str, *, of_chain: bool) -> tuple[str, ...]:
    """Of a chain, those that this dataset has: rules are of one step."""
    found = tuple(name.strip() for name in text.split(","))
    if of_chain:
        return tuple(name for name in found if name in spec.gates.names)
    on = ", ".join(spec.gates.on) or "none"
    for name in found:
        if name not in spec.gates.names:  # one that is off by now may have paused the request before
            off = ", which is off: it pauses nothing" if name in spec.gates.off else ""
            raise InvalidTag(ACCEPT_GATES_TAG, f"expected gates that are on ({on}), found {name[:80]!r}{off}")
    return found


def _amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not 0 < amount < math.inf:
        raise InvalidTag(BUDGET_TAG, f"expected US dollars above 0, found {text[:80]!r}")
    return amount


def tags_of(
    deadline: str | None,
    budget_usd: float | None,
    objective: str | None,
    max_instances: int | None,
    accepted_gates: Sequence[str] = (),
) -> dict[str, str]:
    """The tags that say this; what is None is left out."""
    values = (deadline, budget_usd, objective, max_instances, ",".join(accepted_gates) or None)
    said = zip(OPTION_TAGS, values, strict=True)
    return {tag: str(value) for tag, value in said if value is not None}


def request_of(run_id: str, tags: Mapping[str, str]) -> str:
    """The request that a range run belongs to."""
    return tags.get(REQUEST_TAG) or tags.get(BACKFILL_TAG) or f"{BY_HAND}{run_id}"


def begin(fleet_db: Targets, spec: GeneratedDatasetSpec, request: str, tags: Mapping[str, str]) -> DatasetTarget:
    """Write down what is wanted of the request; again for one that is known, its time and command stay.

    Its time begins when the fleet's database first hear of it, by the database's clock. Raises InvalidTag.
    """
    wanted = request_options(spec, tags)
    known = fleet_db.target(spec.name)
    since = known.since if known is not None and known.request == request else fleet_db.now()
    return fleet_db.begin_request(
        spec.name,
        request,
        deadline_at=wanted.deadline.at(since) if wanted.deadline else None,
        budget_usd=wanted.budget_usd,
        objective=wanted.objective,
        max_instances=wanted.max_instances,
        accepted_gates=wanted.accepted_gates,
    )


def begin_unless_busy(fleet_db: Targets, spec: GeneratedDatasetSpec, request: str, tags: Mapping[str, str]) -> None:
    """Begin the request, unless another one is under way: its budget and its time go on, until the capacity sensor sees
    that it is over. Raises InvalidTag, also then."""
    request_options(spec, tags)
    known = fleet_db.target(spec.name)
    if known is None or known.request in ("", request):
        begin(fleet_db, spec, request, tags)
