"""Rows that an engine still had when it ended: they go back into the queue.

Those that a lost engine may have worked on bear its death: at several deaths they become suspects (poison_rows.py),
which are tried in groups, and a row that ends engines while it is alone in flight becomes a dead letter.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_runner.client.protocol import EngineLost
from gpu_runner.inference.poison_rows import Group
from gpu_runner.inference.policy import FeedPolicy
from gpu_runner.inference.row_outcomes import RowOutcomes
from gpu_runner.inference.row_queue import Work
from gpu_runner.inference.row_state import Item


def return_rows(
    work: Work,
    policy: FeedPolicy,
    outcomes: RowOutcomes,
    error: BaseException | None,
    group: Group[Item] | None,
    held: Sequence[Item],
    taken: list[Item],
) -> None:
    """Gives `held` back. `error`: why the engine ended; `group`: the suspects that it was trying.

    `taken`: those of `held` that the engine may have worked on.
    """
    blamed: list[Item] = []
    if isinstance(error, EngineLost):
        work.count_engine_death()
        blamed = taken
    if group is not None:
        _return_group(work, policy, outcomes, error, group, held, blamed)
        return
    suspects = {item for item in blamed if item.add_death() >= policy.suspect_deaths}
    work.suspect(suspects)
    work.give_back(item for item in held if item not in suspects)


def _return_group(
    work: Work,
    policy: FeedPolicy,
    outcomes: RowOutcomes,
    error: BaseException | None,
    group: Group[Item],
    held: Sequence[Item],
    blamed: list[Item],
) -> None:
    guilty = set(blamed)
    rest = [item for item in held if item not in guilty] + work.leave_group(group)
    if not blamed:
        work.put_back_group(group, rest)
        return
    if len(blamed) == 1:
        item = blamed[0]
        if item.add_alone_death() >= policy.alone_deaths:
            blamed = []
            message = f"alone in flight at {item.alone_deaths} engine deaths, the last: {error}"
            work.settle(item, outcomes.dead(item, "engine_killed", message, item.alone_deaths))
    work.group_died(group, blamed, rest)
