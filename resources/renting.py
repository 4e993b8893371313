"""A run's dealings with the fleet: get an engine, give it back, say when another one would be worth moving to.

The order of choice: an engine of fleet.yaml that stands there anyway, then a warm instance, whose boot is paid, then
the offer of least cost for the work in hand. Blocking, made for threads: `pause` is called in steps of at most half a
second and may raise to give up, and then nothing is held any more.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from gpu_runner.choice import LOST, MEMORY, OfferFailure, choose, explain, shunned
from gpu_runner.fleet import BudgetReached, FleetBook, Instance, Lease
from gpu_runner.heart import Heart
from gpu_runner.offers import Ranking
from gpu_runner.providers.base import Provider
from gpu_runner.providers.local import EngineStartError, answers, served_length
from gpu_runner.speed import Measurement
from gpu_runner.workload import Workload
from resources.fleet_config import EngineConfig, FleetConfig
from resources.leased import WARM, LeasedEngine, Look, Requirement, StandingEngine, instance_offer
from resources.market import Market
from resources.moving import Decision, Present, find_move
from resources.ordering import NotRented, Orders, Pause, Say
from resources.preference import Allowance, prefer

__all__ = ["NoneStart", "NotRented", "Pause", "Renter", "Say"]

WAIT_SECONDS = 0.2
BUDGET_WAITS = 10  # a budget is raised by people, and each refusal holds the fleet's lock
FAILED_STARTS = 3
HEALTH_TRIES = 3
UNKNOWN_SLOTS = 256
MEASURE_SECONDS = 10.0
# Rows per slot before an instance's own speed is believed: those in flight count in its time and not in its rows.
MEASURED_SLOTS = 8


class NoneStart(EngineStartError):
    """Several instances in a row did not come up: it is not for want of trying."""


class Renter:
    """One run's hand in the fleet. Used from the op's main thread and, while it moves, from one more."""

    def __init__(
        self,
        config: FleetConfig,
        providers: Mapping[str, Provider],
        market: Market,
        book: FleetBook,
        heart: Heart,
        start: Callable[[EngineConfig, Requirement, Pause], StandingEngine],
    ) -> None:
        self.config, self.providers, self.market, self.book, self.heart = config, providers, market, book, heart
        self._start = start
        self._orders = Orders(config, providers, market, book, heart)
        self._measured: Sequence[Measurement] | None = None
        self._measure_at = 0.0

    def acquire(
        self, need: Requirement, *, say: Say, pause: Pause, replaces: LeasedEngine | None = None
    ) -> LeasedEngine:
        """Wait, visibly, until an engine is ours and answers. `replaces` does not count against the dataset's limit.

        Raises FleetConfigError, EngineStartError when several engines in a row did not come up, and RunEnded for a run
        declared dead.
        """
        failed = 0

        def note(text: str) -> None:
            if text != self.heart.note:
                self.heart.note = text
                say(text)

        while True:
            allowed = self._allowance(need)
            try:
                if allowed.instances < 1:
                    found, waits_for = None, f"waiting: {allowed.why_none()}"
                else:
                    found, waits_for = self._standing(need, allowed.instances, note, pause)
                    if found is None and self.providers and not need.endpoint:
                        found, waits_for = self._rented(need, allowed, note, pause, replaces)
            except NotRented as error:
                failed += error.started
                note(str(error))
                if failed >= FAILED_STARTS:
                    raise NoneStart(f"{failed} instances in a row did not start; the last: {error}") from None
                pause(WAIT_SECONDS)
                continue
            except BudgetReached as error:
                note(f"waiting: paused: {error}")
                for _ in range(BUDGET_WAITS):
                    pause(WAIT_SECONDS)
                continue
            if found is not None:
                note(f"on {found.name}")
                return found
            note(waits_for)
            pause(WAIT_SECONDS)

    def _allowance(self, need: Requirement) -> Allowance:
        """What the dataset may lease now."""
        target = self.book.target(need.dataset)
        if target is None:
            return Allowance()
        leave = tuple(target.plan.get("leave", ())) if target.deadline_at is not None else ()
        return Allowance(target.instances, target.offers, target.pause, leave, target.plan.get("reason", ""))

    def release(self, leased: LeasedEngine, *, reason: str = "", retire: bool = False, lost: bool = False) -> None:
        """Give it back once. `retire`: the instance is of no more use, whoever asks; it is ended at once.

        `lost`: its engine was, and its offer is trusted less for a while.
        """
        self.heart.let_go(leased.lease)
        leased.close()
        spent = leased.spending.spent()
        if leased.offer is None:
            self.book.release(leased.lease)
        elif retire:
            # A lease that is not ours any more was ended by the reaper, which saw the loss first and remembers it.
            if self.book.release(leased.lease, spent, reason=reason, retire=True) and lost:
                self.book.offer_failed(leased.offer.provider, leased.offer.name, LOST)
            self._orders.end(leased.name, reason)
        else:
            self.book.release(leased.lease, spent, reason=reason)
            self._orders.end(leased.name, reason)  # if it was to end with this lease

    def hand_on(self, leased: LeasedEngine) -> bool:
        """Only the last rows are with the engine: the next run may have it beside them. True once that is said."""
        return leased.own or self.book.drain(leased.lease)

    def look(self, leased: LeasedEngine) -> Look:
        """What is to happen to the instance."""
        instance = self.book.instance(leased.name)
        if instance is None:
            return Look()
        leave = (instance.reason or "it is to end") if instance.retiring else ""
        return Look(instance.notice_seconds, instance.epoch > leased.epoch, leave)

    # engines that stand in fleet.yaml

    def _standing(self, need: Requirement, limit: int, note: Say, pause: Pause) -> tuple[LeasedEngine | None, str]:
        engines = self.config.engines_for(need.model, need.endpoint)
        asked_at = self.heart.now()
        for engine in engines:
            lease = self.book.try_lease(engine.name, self.heart.run_id, need.dataset, self.heart.ttl, limit=limit)
            if lease is not None:
                return self._start_standing(engine, need, lease, asked_at, note, pause), ""
        if self.book.leases_of(need.dataset) >= limit:
            return None, f"waiting: {need.dataset} already holds all instances it may lease"
        notes = [f"{engine.name} is held by run {self.book.holder(engine.name)}" for engine in engines]
        return None, "waiting: " + ", ".join(notes)

    def _start_standing(
        self, engine: EngineConfig, need: Requirement, lease: Lease, asked_at: float, note: Say, pause: Pause
    ) -> LeasedEngine:
        self.heart.hold(lease, asked_at)
        note(f"starting {engine.name}" if engine.url is None else f"waiting for {engine.url}")
        try:
            standing = self._start(engine, need, pause)
        except BaseException:
            self.heart.let_go(lease)
            self.book.release(lease)
            raise
        return LeasedEngine(
            lease=lease,
            endpoint=standing.endpoint,
            api_key=os.environ.get(engine.api_key_env) if engine.api_key_env else None,
            max_num_seqs=engine.max_num_seqs,
            provider=engine.provider,
            instance_type=engine.instance_type,
            request_seconds=engine.request_seconds,
            own=standing.own,
            close=standing.close,
        )

    # instances

    def _rented(
        self, need: Requirement, allowed: Allowance, note: Say, pause: Pause, replaces: LeasedEngine | None
    ) -> tuple[LeasedEngine | None, str]:
        limit = allowed.instances
        old = None if replaces is None else replaces.lease
        if warm := self._warm(need, limit, old):
            return warm, ""
        if self.book.leases_of(need.dataset) - (old is not None) >= limit:
            return None, f"waiting: {need.dataset} already holds all instances it may lease"
        ranking, failures = self.ranking(need, need.work()), self.book.offer_failures(MEMORY.horizon)
        held = self._held(need, old) if allowed.offers else {}
        avoided = shunned(failures, held)  # lost since the command was given
        named = [(name, count) for name, count in allowed.offers if name not in avoided]
        order = prefer(choose(ranking, failures), named, held)
        if not order:
            return None, f"waiting: {_why_none(ranking, failures)}"
        leased = self._orders.rent(need, order[0].offer, limit=limit, note=note, pause=pause, replaces=old)
        if leased is not None:
            leased.why = f"{need.objective} of {len(order)} offers: {explain(order[0], failures)}"
            leased.why += "; the capacity plan names it" if order[0].offer.name in (allowed.names or ()) else ""
            leased.why += f"; next: {explain(order[1], failures)}" if len(order) > 1 else ""
        return leased, "waiting: the fleet holds all instances that it may have"

    def _held(self, need: Requirement, without: Lease | None) -> Counter[str]:
        """How many instances of each offer the dataset's runs hold, without those that are to end."""
        found = [one for one in self.book.fleet() if one.lease is not None and one.lease.dataset == need.dataset]
        return Counter(instance_offer(one).name for one in found if not one.retiring and one.lease != without)

    def ranking(self, need: Requirement, work: Workload, measurements: Sequence[Measurement] | None = None) -> Ranking:
        """What can be rented now for this work, best first, and everything else with its reason."""
        with self._orders.market_guard:
            return self.market.ranking(
                need.model,
                need.task,
                work.mix,
                work.tokens,
                accept=need.accept,
                objective=need.objective,
                measurements=self._measurements() if measurements is None else measurements,
                longest=work.longest,
                max_model_len=need.max_model_len,
                declared=need.declared,
            )

    def _measurements(self) -> Sequence[Measurement]:
        """How fast instances were; read again now and then, because all leases there ever were are added up."""
        if self._measured is None or time.monotonic() >= self._measure_at:
            self._measured, self._measure_at = self.book.measurements(), time.monotonic() + MEASURE_SECONDS
        return self._measured

    # moving

    def better(self, need: Requirement, leased: LeasedEngine, rows_left: int) -> Decision | None:
        """A move that pays (resources/moving.py), to an offer that the command names if it names any.

        `rows_left` are this run's.
        """
        assert leased.offer is not None
        allowed = self._allowance(need)
        work, spent = need.work(), leased.spending.spent()
        slots = leased.max_num_seqs or UNKNOWN_SLOTS
        speed = None
        if spent.rows >= MEASURED_SLOTS * slots and spent.useful_seconds > 0:
            speed = (spent.prompt_tokens + spent.completion_tokens) / (spent.useful_seconds * leased.clock)
        standing = self._held(need, None)
        tokens = work.tokens / max(1, min(allowed.instances, standing.total()))
        present = Present(leased.name, leased.offer, speed, tokens, rows_left * work.mix.tokens)
        warm = [instance_offer(one) for one in self._warm_instances(need) if one.name != leased.name]
        failures = self.book.offer_failures(MEMORY.horizon)
        ranked, estimated = self.ranking(need, work), self.ranking(need, work, ())
        if allowed.names is None:
            return find_move(present, ranked, estimated, warm, failures)
        must = allowed.successor(leased.name, standing)
        if must is not None:
            return find_move(present, ranked, estimated, warm, failures, {must}, must=f"the plan: {allowed.reason}")
        wanted_here = standing[leased.offer.name] <= dict(allowed.offers).get(leased.offer.name, 0)
        if wanted_here and (speed is None or not self._has_all_work(need)):
            return None
        return find_move(present, ranked, estimated, warm, failures, set(allowed.missing(standing)))

    def _has_all_work(self, need: Requirement) -> bool:
        """Whether nobody else will rent what is wanted beside this run's instance, so that this run may change to it.

        Without a deadline all batches may be in one run. With one, or in a hurry, they are in small runs, the next of
        which waits.
        """
        target = self.book.target(need.dataset)
        if target is None or target.deadline_at is not None or (target.objective or need.objective) != "cheapest":
            return False
        return not any(one.dataset == need.dataset and one.run_id != self.heart.run_id for one in self.book.runs())

    def move(
        self, need: Requirement, leased: LeasedEngine, decision: Decision, *, say: Say, pause: Pause
    ) -> LeasedEngine:
        """Lease what the decision names, beside the engine that is to be left. Raises NotRented: then stay."""
        limit = self._allowance(need).instances
        try:
            if decision.new.boot_seconds == 0 and decision.new.source == WARM:
                found = self._warm(need, limit, leased.lease, decision.new.price_per_hour)
            else:
                found = self._orders.rent(need, decision.new, limit=limit, note=say, pause=pause, replaces=leased.lease)
        except BudgetReached as error:
            raise NotRented(str(error)) from None
        if found is None:
            raise NotRented("the fleet holds all instances that it may have")
        found.why = decision.sentence
        return found

    def _warm(
        self, need: Requirement, limit: int, old: Lease | None, most_per_hour: float = math.inf
    ) -> LeasedEngine | None:
        """The cheapest warm instance that answers and takes rows as long as ours; a dead one is ended."""
        for instance in self._warm_instances(need):
            if instance.price_per_hour > most_per_hour or (old is not None and instance.name == old.instance):
                continue
            assert instance.endpoint is not None
            asked_at = self.heart.now()
            lease = self.book.try_lease(
                instance.name,
                self.heart.run_id,
                need.dataset,
                self.heart.ttl,
                limit=limit,
                replaces=old,
                drain_seconds=self.heart.drain_seconds(),
            )
            if lease is None:
                continue
            self.heart.hold(lease, asked_at)
            if any(answers(instance.endpoint) for _ in range(HEALTH_TRIES)):
                leased = self._orders.leased(lease, instance, instance_offer(instance))
                leased.why = f"warm: it serves {instance.model} already, at {instance.price_per_hour:.2f} $/h"
                return leased
            self.heart.let_go(lease)
            self.book.give_up(lease, "its engine does not answer")
            self._orders.end(instance.name, "its engine does not answer")
        return None

    def _warm_instances(self, need: Requirement) -> list[Instance]:
        """Instances that may be leased at once for this work, cheapest first."""
        found = [one for one in self.book.warm(need.engine_key) if one.provider in self.providers]
        found = [one for one in found if not need.accept.reasons(instance_offer(one))]
        return [one for one in found if self._takes_rows(one, need)]

    def _takes_rows(self, instance: Instance, need: Requirement) -> bool:
        """Whether its engine takes rows as long as ours: it may have been started with less context than the model has.

        What a new instance of the same kind would take is enough: longer rows fit nowhere. Of a model that is not
        known, and of machines of one's own, whoever set them up knows.
        """
        if self.market.trusts(instance.provider) or instance.endpoint is None:
            return True
        with self._orders.market_guard:
            known = self.market.model(need.model, need.declared)
        if known.knowledge == "assumed" or (served := served_length(instance.endpoint)) is None:
            return True
        if (placed := self._orders.placement(need, instance_offer(instance))) is None:
            return False
        longest, most = need.work().longest, placed.max_model_len or known.context
        return served >= (longest if most is None else min(longest, most))


def _why_none(ranking: Ranking, failures: Sequence[OfferFailure]) -> str:
    """Why nothing can be rented, by the most frequent reasons; without times, so that it stays the same for a while."""
    if ranking.ranked:
        said = sorted({failure.reason for failure in failures})
        return f"{len(ranking.ranked)} suitable offers failed a moment ago: {'; '.join(said)}"[:280]
    counts = Counter(refusal.reason for refusal in ranking.refused)
    return "no suitable offer" + "".join(f"; {number} × {reason}" for reason, number in counts.most_common(2))
