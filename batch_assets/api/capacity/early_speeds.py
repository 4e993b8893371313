"""How late the first measurement of a speed is, where a window is short, and what to ask where it is too late. Pure.

A speed is measured on lines that were answered. An engine that begins with all of its slots full answers the first of
them when it has done nearly all of all of them: that may be most of a short window, so a fleet that waits for it may
not grow in time (`until_measured`).

The planner begins with few engines while speeds are only estimated, and may count on less than P95 of them where that
is much cheaper. That is right where the fleet can still grow when it turns out slow. Where it cannot
(`is_too_late_to_measure`) the question is put again with slow speeds in place of uncertain ones (`at_slow_speed`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from batch_assets.capacity_planning.planner_input import PlannerInput
from gpu_runner.offers.gpus import find_sheet
from gpu_runner.offers.speed import default_slots
from gpu_runner.planner.command import Command
from gpu_runner.planner.feasibility import FeasibilityCheck
from gpu_runner.planner.planned_fleet import FleetCandidate
from gpu_runner.planner.search import P95
from gpu_runner.planner.speed_model import HardwareType
from gpu_runner.planner.types import ControlTiming, PlannedOffer

SLOTS = 256  # vLLM's max_num_seqs on hardware without a datasheet here


def slots_of(hardware: HardwareType) -> int:
    """Lines that an engine on this hardware has in flight at once, by vLLM's defaults."""
    sheet = find_sheet(hardware.gpu, hardware.memory_gib)
    return default_slots(sheet, hardware.memory_gib) if sheet else SLOTS


def until_measured(asked: PlannerInput, tokens: float) -> float:
    """Seconds of work until the first lines of a full engine are answered, if it is slow (P95).

    `tokens`: of a line. Of the offer whose tokens cost least, which a first fleet is mostly made of; 0 when there is
    nothing of unknown speed.
    """
    offers = [one for one in asked.options if one.capacity != 0 and one.is_unmeasured and one.tokens_per_second > 0]
    if not offers:
        return 0.0
    main = min(offers, key=lambda one: one.usd_per_token)
    slow = main.tokens_per_second * math.exp(-P95 * main.spread)
    return min(slots_of(main.hardware_type) * tokens, asked.work.tokens) / slow


def is_too_late_to_measure(asked: PlannerInput, command: Command, timing: ControlTiming) -> bool:
    """Whether this command rests on speeds that may be too slow for the deadline, known too late to add more."""
    if not any(one.is_unmeasured for one in (*asked.options, *(one.option for one in asked.held))):
        return False
    kept = tuple(one for one in asked.held if one.instance not in command.retire)
    there, known = Counter(one.option.name for one in kept), {one.name: one for one in asked.options}
    new = ((known[name], number - there[name]) for name, number in command.offers if name in known)
    fleet = FleetCandidate(kept, tuple(pair for pair in new if pair[1] > 0)).projected()
    check = FeasibilityCheck(asked.work, asked.options, asked.held, asked.target, timing)
    return not check.meets_deadline(fleet) and not check.has_fallback(fleet)


def at_slow_speed(asked: PlannerInput) -> PlannerInput:
    """The question with the speeds at P95 in place of those that are uncertain, as if they were known."""

    def slow(option: PlannedOffer) -> PlannedOffer:
        if not option.is_unmeasured:
            return option
        speed = option.tokens_per_second * math.exp(-P95 * option.spread)
        return replace(option, tokens_per_second=speed, spread=0.0)

    return replace(_with_offers(asked, slow), measured=True)


def _with_offers(asked: PlannerInput, changed: Callable[[PlannedOffer], PlannedOffer]) -> PlannerInput:
    return replace(
        asked,
        options=tuple(changed(one) for one in asked.options),
        held=tuple(replace(one, option=changed(one.option)) for one in asked.held),
    )
