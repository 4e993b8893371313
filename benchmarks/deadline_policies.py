"""The policies that benchmarks/deadline.py compares. All see the same View; each is made anew for each world."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.deadline_replay import Policy, View, Wish
from gpu_runner.planner.controller import ControllerState, decide
from gpu_runner.planner.types import PlannedOffer

PERIOD = 300.0  # seconds between the steps of the simple policies
RESERVE = 1.25  # time that greedy spot and Uniform Progress plan for, over what they expect to need
BACKLOG = 3600.0  # seconds of work per instance above which the queue policy adds one


def ours() -> Policy:
    """The platform's controller, as it is."""
    memory = ControllerState()

    def policy(view: View) -> Wish:
        nonlocal memory
        command, memory, _ = decide(
            view.work,
            view.options,
            view.held,
            view.target,
            memory,
            measured=view.measured,
            pilots=3,
            detail=False,
        )
        return Wish(command.offers, command.retire, f"{command.kind}: {command.reason}")

    return policy


def on_demand() -> Policy:
    """The same controller, which knows no spot offers: the most that planning without spot can do."""
    inner = ours()

    def policy(view: View) -> Wish:
        return inner(replace(view, options=tuple(one for one in view.options if not one.spot)))

    return policy


def plain_on_demand() -> Policy:
    """The cheapest token on demand, as many as the deadline needs with a quarter in reserve. Looks every 300 s."""
    return _periodic(lambda view: _fill(view, _sure(view), _number(view, _sure(view))))


def greedy_spot() -> Policy:
    """Always the spot offer with the cheapest token, as many as the deadline needs with a quarter in reserve.

    The next cheapest where there are not enough. Where there is no spot offer at all: on demand. Looks every 300 s.
    """
    return _periodic(lambda view: _fill(view, _spot_or_all(view), _number(view, _spot_or_all(view))))


def queue_length() -> Policy:
    """One more per 300 s while there is over an hour of work per instance, one less when there is less than half.

    The cheapest token, spot or not, as SkyPilot's pools scale by queue length; it knows no deadline.
    """
    number = 1

    def step(view: View) -> Wish:
        nonlocal number
        wish = _fill(view, view.options, number)
        speed = sum(_of(view, name).tokens_per_second * count for name, count in wish.fleet)
        if speed > 0 and view.work.tokens / speed > BACKLOG:
            number = min(number + 1, view.target.max_instances)
        elif speed > 0 and view.work.tokens / speed < BACKLOG / 2:
            number = max(1, number - 1)
        return _fill(view, view.options, number)

    return _periodic(step)


def uniform_progress() -> Policy:
    """Uniform Progress (Wu et al., NSDI 2024) for a fleet: as many instances as the deadline needs with a quarter in
    reserve, spot while progress is on the line from start to deadline, on demand while it is behind, and on demand to
    the end once the time left is what on demand needs for the rest and its boot. Looks every 300 s."""
    last = False

    def step(view: View) -> Wish:
        nonlocal last
        deadline = view.target.deadline or math.inf
        sure = _sure(view)
        best = min(sure, key=_usd_per_token, default=None)
        number = _number(view, _spot_or_all(view))
        if best is not None:
            need = best.boot_seconds + view.work.tokens / (best.tokens_per_second * number) + PERIOD
            last = last or deadline <= need
        line = view.work.started_ago / max(1.0, view.work.started_ago + deadline)
        behind = 1 - view.work.tokens / view.work.total_tokens < line - 0.02
        if last or behind:
            kept = [one for one in view.held if not one.option.spot]
            return _fill(view, sure or view.options, max(number, len(kept)))
        return _fill(view, _spot_or_all(view), number)

    return _periodic(step)


POLICIES: dict[str, Callable[[], Policy]] = {
    "on demand": on_demand,
    "plain on demand": plain_on_demand,
    "greedy spot": greedy_spot,
    "queue ±1": queue_length,
    "uniform progress": uniform_progress,
    "ours": ours,
}


def _periodic(step: Callable[[View], Wish]) -> Policy:
    """Asked only every 300 s; in between what was wished for is wished again, so that lost instances come back."""
    last: Wish | None = None
    asked = -math.inf

    def policy(view: View) -> Wish:
        nonlocal last, asked
        if last is None or view.now >= asked + PERIOD:
            last, asked = step(view), view.now
            return last
        return replace(last, retire=())

    return policy


def _usd_per_token(option: PlannedOffer) -> float:
    return option.usd_per_hour / option.tokens_per_second


def _of(view: View, name: str) -> PlannedOffer:
    return next(one for one in view.options if one.name == name)


def _spot_or_all(view: View) -> Sequence[PlannedOffer]:
    return [one for one in view.options if one.spot] or view.options


def _sure(view: View) -> Sequence[PlannedOffer]:
    return [one for one in view.options if not one.spot]


def _number(view: View, options: Sequence[PlannedOffer]) -> int:
    """Instances of the offer with the cheapest token that the deadline needs, with a reserve."""
    best = min(options, key=_usd_per_token)
    time = (view.target.deadline or math.inf) / RESERVE - (0 if view.held else best.boot_seconds)
    if time <= 0:
        return view.target.max_instances
    return max(1, min(view.target.max_instances, math.ceil(view.work.tokens / best.tokens_per_second / time)))


def _fill(view: View, options: Sequence[PlannedOffer], number: int) -> Wish:
    """So many instances of the cheapest of these offers. What is held beside them works on until they are ready."""
    held: dict[str, int] = {}
    for one in view.held:
        held[one.option.name] = held.get(one.option.name, 0) + 1
    fleet: list[tuple[str, int]] = []
    left = number
    for option in sorted(options, key=_usd_per_token):
        there = held.get(option.name, 0)
        room = there + (left if option.capacity is None else option.capacity)
        take = min(left, room)
        if take:
            fleet.append((option.name, take))
            left -= take
    wanted = dict(fleet)
    retire: list[str] = []
    ready = sum(one.ready_in <= 0 and one.option.name in wanted for one in view.held)
    if ready < number - left and len(view.held) < view.target.max_instances:
        return Wish(tuple(fleet))
    for one in sorted(view.held, key=lambda one: -one.ready_in):
        if held[one.option.name] > wanted.get(one.option.name, 0):
            held[one.option.name] -= 1
            retire.append(one.instance)
    return Wish(tuple(fleet), tuple(retire))
