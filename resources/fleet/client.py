"""A run's dealings with the fleet: get an engine, give it back, say when another one would be worth moving to.

The order of choice: an engine of fleet.yaml that stands there anyway, then a warm instance, whose boot is paid, then
the offer of least cost for the work in hand. Blocking, made for threads: `pause` is called in steps of at most half a
second and may raise to give up, and then nothing is held any more.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gpu_runner.cost_meter import CostMeter, TokenMeter
from gpu_runner.fleet_database.capacity_plan import PauseKind
from gpu_runner.fleet_database.database import BudgetReached, FleetDatabase, FleetFull, Lease
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.fleet_database.wait_reason import RunActivity, WaitKind
from gpu_runner.money import format_usd
from gpu_runner.offers.offer import RankedOffer, Ranking
from gpu_runner.offers.selection import MEMORY, FailureKind, choose, explain, recently_lost
from gpu_runner.offers.speed import Measurement
from gpu_runner.offers.workload import Workload
from gpu_runner.providers.base import DiagnosingProvider, Provider
from gpu_runner.providers.engine_process import EngineStartError, answers
from gpu_runner.request_limits import RequestLimits
from resources.fleet.allocation import CapacityAllocation, order_by_plan, waits, waits_for_offer
from resources.fleet.fleet_config import EngineConfig, FleetConfig
from resources.fleet.hosted_engines import BatchVerdict, weigh_batches
from resources.fleet.leased_engine import WARM, LeasedEngine, LeaseSignals, Requirement, StaticEngine, instance_offer
from resources.fleet.migration import CurrentPlacement, Migration, assigned_move, find_move
from resources.fleet.provisioning import Pause, Provisioner, ProvisioningFailed, Say
from resources.fleet.warm_instances import WarmInstances
from resources.pricing.market import Market

__all__ = ["FleetClient", "NoInstanceStarted", "Pause", "ProvisioningFailed", "Say"]

WAIT_SECONDS = 0.2
BUDGET_WAITS = 10  # a budget is raised by people, and each refusal holds the fleet's lock
FAILED_STARTS = 3
HEALTH_TRIES = 3
UNKNOWN_SLOTS = 256
MEASURE_SECONDS = 10.0
WEIGH_SECONDS = 10.0
# Rows per slot before an instance's own speed is believed: those in flight count in its time and not in its rows.
MEASURED_SLOTS = 8


class NoInstanceStarted(EngineStartError):
    """Several instances in a row did not come up: it is not for want of trying."""


class FleetClient:
    """What one run asks of the fleet. Used from the op's main thread and, while it moves, from one more."""

    def __init__(
        self,
        config: FleetConfig,
        providers: Mapping[str, Provider],
        market: Market,
        fleet_db: FleetDatabase,
        heartbeat: Heartbeat,
        start: Callable[[EngineConfig, Requirement, Pause], StaticEngine],
    ) -> None:
        self.config, self.providers, self.market, self.fleet_db, self.heartbeat = (
            config,
            providers,
            market,
            fleet_db,
            heartbeat,
        )
        self._start = start
        self._orders = Provisioner(config, providers, market, fleet_db, heartbeat)
        self._warm_instances = WarmInstances(providers, market, fleet_db, self._orders)
        self._measured: Sequence[Measurement] | None = None
        self._measure_at = 0.0
        self._batches: dict[str, BatchVerdict] = {}
        self._weigh_at = 0.0

    def acquire(
        self, need: Requirement, *, say: Say, pause: Pause, replaces: LeasedEngine | None = None
    ) -> LeasedEngine:
        """Wait, visibly, until an engine is ours and answers. `replaces` does not count against the dataset's limit.

        Raises FleetConfigError, EngineStartError when several engines in a row did not come up, and RunEnded for a run
        declared dead.
        """
        failed = 0

        def tell(activity: RunActivity) -> None:
            news = activity.note != self.heartbeat.activity.note
            self.heartbeat.tell(activity.note, activity.wait)
            if news:
                say(activity.note)

        def note(text: str) -> None:
            tell(RunActivity(text))

        while True:
            allowed = self._allowance(need)
            try:
                found = self._found(need, allowed, note, pause, replaces)
            except ProvisioningFailed as error:
                failed += error.started
                note(str(error))
                if failed >= FAILED_STARTS:
                    if shared := self._shared(need, allowed.instances, replaces):
                        return self._taken(need, shared, tell, pause)
                    raise NoInstanceStarted(f"{failed} instances in a row did not start; the last: {error}") from None
                pause(WAIT_SECONDS)
                continue
            except BudgetReached as error:
                tell(waits(WaitKind.BUDGET, f"paused: {error}", error.refusal))
                for _ in range(BUDGET_WAITS):
                    pause(WAIT_SECONDS)
                continue
            if isinstance(found, LeasedEngine):
                return self._taken(need, found, tell, pause)
            tell(found)
            pause(WAIT_SECONDS)

    def _taken(
        self, need: Requirement, leased: LeasedEngine, tell: Callable[[RunActivity], None], pause: Pause
    ) -> LeasedEngine:
        with self._orders.handing_over(leased.lease, leased.close):
            leased.user = self._user_engine(need, tell, pause)
            tell(RunActivity(f"on {leased.name}"))
            return leased

    def _user_engine(self, need: Requirement, tell: Callable[[RunActivity], None], pause: Pause) -> LeasedEngine | None:
        """The engine of the model that plays the user. Its lease keeps nobody off, nor counts as an instance: it says
        what is spent there, and what may be.
        """
        if need.user_engine is None:
            return None
        engine, asked_at = self.config.user_engine(need.user_engine, need.user_model), self.heartbeat.now()
        name, (run, ttl) = f"{engine.name}/{need.dataset}", (self.heartbeat.run_id, self.heartbeat.ttl)
        said = RunActivity()
        while (lease := self.fleet_db.try_lease(name, run, need.dataset, ttl)) is None:  # another run takes its own now
            by = "" if (holder := self.fleet_db.holder(name)) is None else f" by run {holder}"
            now = waits(WaitKind.ENGINES_HELD, f"prompt.user_model: {engine.name} is being leased{by}")
            if now != said:
                tell(said := now)
            pause(WAIT_SECONDS)
            asked_at = self.heartbeat.now()
        self.heartbeat.hold(lease, asked_at)
        with self._orders.handing_over(lease):
            self.fleet_db.drain(lease)
            return LeasedEngine(
                lease=lease,
                endpoint=engine.url or "",
                api_key=engine.api_key,
                max_num_seqs=engine.slots,
                provider=engine.provider,
                instance_type=engine.instance_type,
                spending=self._meter(engine, need, lease),
                limits=engine.limits,
                tls=engine.tls_files,
                region=engine.region,
            )

    def _found(
        self, need: Requirement, allowed: CapacityAllocation, note: Say, pause: Pause, replaces: LeasedEngine | None
    ) -> LeasedEngine | RunActivity:
        """An engine, or what is waited for."""
        if allowed.instances < 1:
            return waits(allowed.wait_kind, allowed.why_none())
        if need.user_engine is not None:
            user = self.config.user_engine(need.user_engine, need.user_model)
            if (unpaid := self._refusal(need, user)) is not None:
                raise unpaid
        rents = bool(self.providers) and not need.endpoint
        try:
            found = self._standing(need, allowed.instances, note, pause)
        except BudgetReached as refused:
            if rents and (rented := self._rented_instead(refused, need, allowed, note, pause, replaces)):
                return rented
            raise
        if isinstance(found, LeasedEngine) or not rents:
            return found
        return self._rented(need, allowed, note, pause, replaces)

    def _rented_instead(
        self,
        refused: BudgetReached,
        need: Requirement,
        allowed: CapacityAllocation,
        note: Say,
        pause: Pause,
        replaces: LeasedEngine | None,
    ) -> LeasedEngine | None:
        """What the budget pays for where it pays for no engine by the token; if nothing, the lesser sum is named."""
        try:
            rented = self._rented(need, allowed, note, pause, replaces)
        except BudgetReached as too_dear:
            raise least_refusal([refused, too_dear]) from None
        return rented if isinstance(rented, LeasedEngine) else None

    def _allowance(self, need: Requirement) -> CapacityAllocation:
        """What the dataset may lease now."""
        target = self.fleet_db.target(need.dataset)
        if target is None:
            return CapacityAllocation()
        if (plan := target.plan) is None:
            return CapacityAllocation(target.instances, target.offers, target.pause)
        return CapacityAllocation(target.instances, target.offers, target.pause, True, plan.assignments, plan.reason)

    def release(self, leased: LeasedEngine, *, reason: str = "", retire: bool = False, lost: bool = False) -> None:
        """Give it back once. `retire`: the instance is of no more use, whoever asks; it is ended at once.

        `lost`: its engine was, and its offer is trusted less for a while.
        """
        user, leased.user = leased.user, None
        try:
            if user is not None:
                self.release(user, reason=reason)
        finally:  # what is rented is given back whatever becomes of the other
            self._give_back(leased, reason=reason, retire=retire, lost=lost)

    def _give_back(self, leased: LeasedEngine, *, reason: str, retire: bool, lost: bool) -> None:
        self.heartbeat.stop_renewing(leased.lease)
        leased.close()
        spent = leased.spending.spent()
        if leased.offer is None:
            self.fleet_db.release(leased.lease, spent, reason=reason)
        elif retire:
            # A lease that is not ours any more was ended by the reaper, which saw the loss first and remembers it.
            if self.fleet_db.release(leased.lease, spent, reason=reason, retire=True) and lost:
                self.fleet_db.offer_failed(leased.offer.provider, leased.offer.name, FailureKind.LOST)
            self._orders.end(leased.name, reason)
        else:
            self.fleet_db.release(leased.lease, spent, reason=reason)
            self._orders.end(leased.name, reason)  # if it was to end with this lease

    def begin_handover(self, leased: LeasedEngine) -> bool:
        """Only the last rows are with the engine: the next run may have it beside them. True once that is said."""
        return leased.own or self.fleet_db.drain(leased.lease)

    def look(self, leased: LeasedEngine) -> LeaseSignals:
        """What is to happen to the instance."""
        instance = self.fleet_db.instance(leased.name)
        if instance is None:
            return LeaseSignals()
        retired = (instance.reason or "it is to end") if instance.retiring else None
        why = "" if instance.notice_seconds is None else instance.reason
        return LeaseSignals(instance.notice_seconds, instance.epoch > leased.epoch, retired, why)

    def look_for_dataset(self, need: Requirement, leased: LeasedEngine) -> LeaseSignals:
        """The same of an engine that is not rented: it is left when gates have paused the request, and a Batch API when
        the deadline leaves no more time than the work takes elsewhere.
        """
        target = self.fleet_db.target(need.dataset)
        if target is None:
            return LeaseSignals()
        if target.pause is not None and target.pause.kind is PauseKind.QUALITY:
            return LeaseSignals(retired=target.pause.describe())
        now = time.monotonic()
        if leased.limits.batches is None or target.deadline_in is None or now < self._weigh_at:
            return LeaseSignals()
        self._weigh_at = now + WEIGH_SECONDS
        verdicts = self._verdicts(need, self.config.engines_for(need.model, need.endpoint, need.engine))
        late = [one.why for one in verdicts if one.engine.name == leased.name and one.elsewhere and not one.in_time]
        return LeaseSignals(late=late[0] if late else None)

    def why_lost(self, leased: LeasedEngine) -> str:
        """What is known of an engine that was lost: the fleet's record of its end, else what its provider says now."""
        instance = self.fleet_db.instance(leased.name)
        if instance is not None and instance.state in ("ending", "ended") and instance.reason:
            return instance.reason
        provider = self.providers.get(leased.provider)
        return provider.diagnose(leased.name) if isinstance(provider, DiagnosingProvider) else ""

    # engines that stand in fleet.yaml

    def _standing(self, need: Requirement, limit: int, note: Say, pause: Pause) -> LeasedEngine | RunActivity:
        """The first that is free and that the budget pays for. Raises BudgetReached when it pays for none of them."""
        engines = self._weighed(
            need, self.config.engines_for(need.model, need.endpoint, need.engine, batches=need.batches)
        )
        asked_at = self.heartbeat.now()
        refused: dict[str, BudgetReached] = {}
        for engine in engines:
            if (error := self._refusal(need, engine)) is not None:
                refused[engine.name] = error
                continue
            lease = self.fleet_db.try_lease(
                engine.name, self.heartbeat.run_id, need.dataset, self.heartbeat.ttl, limit=limit
            )
            if lease is not None:
                return self._start_standing(engine, need, lease, asked_at, note, pause)
        if refused and all(engine.name in refused for engine in engines):
            raise next(iter(refused.values()))
        if self.fleet_db.leases_of(need.dataset) >= limit:
            return waits(WaitKind.DATASET_LIMIT, f"{need.dataset} already holds all instances it may lease")
        held = [engine.name for engine in engines if engine.name not in refused]
        notes = [f"{name} is held by run {self.fleet_db.holder(name)}" for name in held]
        notes += [f"{name}: {error}" for name, error in refused.items()]
        return waits(WaitKind.ENGINES_HELD, ", ".join(notes))

    def _weighed(self, need: Requirement, engines: Sequence[EngineConfig]) -> Sequence[EngineConfig]:
        """The engines without the Batch APIs that are not worth it; those that are come first."""
        verdicts = self._verdicts(need, engines)
        if not verdicts:
            return engines
        self._batches = {one.engine.name: one for one in verdicts}
        taken = [one.engine for one in verdicts if one.taken]
        return [*taken, *(engine for engine in engines if engine.name not in self._batches)]

    def _verdicts(self, need: Requirement, engines: Sequence[EngineConfig]) -> list[BatchVerdict]:
        apis = [engine for engine in engines if engine.kind == "batch_api"]
        if not apis:
            return []
        work, target = need.work(), self.fleet_db.target(need.dataset)
        rented = self.ranking(need, work).ranked if self.providers and not need.endpoint else ()
        return [
            weigh_batches(
                one,
                work,
                deadline_in=None if target is None else target.deadline_in,
                objective=need.objective,
                rivals=[engine for engine in engines if engine.kind != "batch_api"],
                rented=rented,
                sent_ago=0.0 if target is None else target.age,
            )
            for one in apis
        ]

    def _limits(self, need: Requirement, engine: EngineConfig) -> RequestLimits:
        if not engine.runs_already:
            return engine.limits
        limits, verdict = need.limits.over(engine.limits), self._batches.get(engine.name)
        if limits.batches is None or verdict is None:
            return limits
        return replace(limits, batches=replace(limits.batches, elsewhere=verdict.elsewhere))

    def _refusal(self, need: Requirement, engine: EngineConfig) -> BudgetReached | None:
        """Why the budget pays for no row on the engine; None where it does, or where its tokens cost nothing."""
        if engine.token_price is None:
            return None
        try:
            self.fleet_db.check_row(need.dataset, need.work().row_usd(engine.token_price))
        except BudgetReached as error:
            return error
        return None

    def _start_standing(
        self, engine: EngineConfig, need: Requirement, lease: Lease, asked_at: float, note: Say, pause: Pause
    ) -> LeasedEngine:
        self.heartbeat.hold(lease, asked_at)
        with self._orders.handing_over(lease):
            note(f"starting {engine.name}" if engine.url is None else f"waiting for {engine.url}")
            tls = engine.tls_files
            standing = self._start(engine, need, pause)
            spending = self._meter(engine, need, lease)
        return LeasedEngine(
            lease=lease,
            endpoint=standing.endpoint,
            api_key=engine.api_key,
            max_num_seqs=engine.slots,
            provider=engine.provider,
            instance_type=engine.instance_type,
            spending=spending,
            limits=self._limits(need, engine),
            why=self._batches[engine.name].describe() if engine.name in self._batches else "",
            own=standing.own,
            close=standing.close,
            tls=tls,
            region=engine.region,
        )

    def _meter(self, engine: EngineConfig, need: Requirement, lease: Lease) -> CostMeter:
        """The meter of an engine of fleet.yaml: where tokens are paid it is bound to what the budget grants. What it
        counts is kept of every engine, as that says how fast it is.
        """
        if (price := engine.token_price) is None:
            unpaid = CostMeter()
            self.heartbeat.account(lease, unpaid.spent)
            return unpaid
        meter = TokenMeter(price, need.work().row_usd(price))
        self.heartbeat.bound(lease, meter)
        return meter

    # instances

    def _rented(
        self, need: Requirement, allowed: CapacityAllocation, note: Say, pause: Pause, replaces: LeasedEngine | None
    ) -> LeasedEngine | RunActivity:
        """A warm instance or a new one, whichever the budget pays for.

        Raises BudgetReached, with the least sum that would do, where it pays for none.
        """
        limit, too_dear = allowed.instances, list[BudgetReached]()
        old = None if replaces is None else replaces.lease

        def full() -> bool:
            return self._held(need, old).total() >= limit

        try:
            if warm := self._warm(need, limit, old, shared=full):
                return warm
        except BudgetReached as error:  # a new one may cost less, its boot included
            too_dear.append(error)
        try:
            found = self._new(need, allowed, note, pause, old, full)
        except BudgetReached as error:
            raise least_refusal([*too_dear, error]) from None
        if too_dear and isinstance(found, RunActivity) and not _may_come(found):
            raise too_dear[0]
        return found

    def _new(
        self,
        need: Requirement,
        allowed: CapacityAllocation,
        note: Say,
        pause: Pause,
        old: Lease | None,
        full: Callable[[], bool],
    ) -> LeasedEngine | RunActivity:
        """A new instance, or what stands where none is to be had."""
        limit = allowed.instances
        dataset_limit = waits(WaitKind.DATASET_LIMIT, f"{need.dataset} already holds all instances it may lease")
        if self.fleet_db.leases_of(need.dataset) - (old is not None) >= limit or full():
            return dataset_limit
        ranking, failures = self.ranking(need, need.work()), self.fleet_db.offer_failures(MEMORY.horizon)
        held = self._held(need, old) if allowed.offers else {}
        avoided = recently_lost(failures, held)  # lost since the command was given
        named = [(name, count) for name, count in allowed.offers if name not in avoided]
        open_now = choose(ranking, failures)
        order = order_by_plan(open_now, named, held)
        if not order:
            return self._warm_or(waits_for_offer(ranking, failures), need, limit, old)
        others = [one for one in open_now if one not in order]  # where the budget pays for none that is named
        try:
            chosen, leased = self._rent_first([*order, *others], need, limit, note, pause, old)
        except BudgetReached as error:  # for a boot: what stands costs less
            try:
                if warm := self._warm(need, limit, old):
                    return warm
            except BudgetReached as standing:
                raise least_refusal([error, standing]) from None
            raise
        except FleetFull as error:
            return self._warm_or(waits(WaitKind.FLEET_LIMIT, str(error)), need, limit, old)
        if leased is None:
            return self._warm(need, limit, old) or dataset_limit
        following = [one for one in order if one is not chosen]
        why = f"{need.objective} of {len(order)} offers: {explain(chosen, failures)}"
        why += "" if chosen is order[0] else "; the budget does not pay for those before it"
        why += "; the capacity plan names it" if chosen.offer.name in (allowed.names or ()) else ""
        why += f"; next: {explain(following[0], failures)}" if following else ""
        leased.why = why
        return leased

    def _warm_or(
        self, activity: RunActivity, need: Requirement, limit: int, old: Lease | None
    ) -> LeasedEngine | RunActivity:
        """What stands, or else this. Raises BudgetReached where nothing else is waited for than what stands."""
        try:
            return self._warm(need, limit, old) or activity
        except BudgetReached:
            if _may_come(activity):
                return activity
            raise

    def _rent_first(
        self, ranked: Sequence[RankedOffer], need: Requirement, limit: int, note: Say, pause: Pause, old: Lease | None
    ) -> tuple[RankedOffer, LeasedEngine | None]:
        """The first offer that the budget pays for, rented. Raises BudgetReached where it pays for none."""
        refused: dict[tuple[float, float], BudgetReached] = {}
        for one in ranked:
            offer = one.offer
            costs = (
                offer.price_per_hour * self.providers[offer.provider].clock,
                offer.price_per_hour * offer.boot_seconds,
            )
            if any(costs[0] >= rate and costs[1] >= boot for rate, boot in refused):
                continue  # it costs more than one that was refused, whatever is counted
            try:
                return one, self._orders.rent(need, offer, limit=limit, note=note, pause=pause, replaces=old)
            except BudgetReached as error:
                refused[costs] = error
        raise least_refusal(list(refused.values()))

    def _held(self, need: Requirement, without: Lease | None) -> Counter[str]:
        """How many instances of each offer work for the dataset, without those that are to end or taken away."""
        found = [one for one in self.fleet_db.fleet() if one.works_for == need.dataset]
        found = [one for one in found if not one.retiring and one.notice_seconds is None]
        return Counter(instance_offer(one).name for one in found if without is None or one.name != without.instance)

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
            self._measured, self._measure_at = self.fleet_db.measurements(), time.monotonic() + MEASURE_SECONDS
        return self._measured

    # moving

    def better(self, need: Requirement, leased: LeasedEngine, rows_left: int) -> Migration | None:
        """The move that the plan assigns to this instance; without a plan one that pays, or None.

        `rows_left` are this run's.
        """
        assert leased.offer is not None
        allowed = self._allowance(need)
        assigned = allowed.assignment(leased.name)
        if allowed.planned and assigned is None:
            return None
        work, spent = need.work(), leased.spending.spent()
        slots = leased.max_num_seqs or UNKNOWN_SLOTS
        speed = None
        if spent.rows >= MEASURED_SLOTS * slots and spent.useful_seconds > 0:
            speed = (spent.prompt_tokens + spent.completion_tokens) / (spent.useful_seconds * leased.clock)
        standing = self._held(need, None)
        tokens = work.tokens / max(1, min(allowed.instances, standing.total()))
        present = CurrentPlacement(leased.name, leased.offer, speed, tokens, rows_left * work.mix.tokens)
        warm = [instance_offer(one) for one in self._warm_instances.usable(need) if one.name != leased.name]
        failures = self.fleet_db.offer_failures(MEMORY.horizon)
        ranked = self.ranking(need, work)
        if assigned is not None and assigned.successor is not None:
            return assigned_move(present, assigned.successor, ranked, warm, failures, allowed.reason)
        return find_move(present, ranked, self.ranking(need, work, ()), warm, failures)

    def move(
        self, need: Requirement, leased: LeasedEngine, decision: Migration, *, say: Say, pause: Pause
    ) -> LeasedEngine:
        """Lease what the decision names, beside the engine that is to be left. Raises ProvisioningFailed: then stay.

        What failed is remembered of the offer, so that the controller's next plan counts on others.
        """
        allowed = self._allowance(need)
        assigned, limit = allowed.assignment(leased.name), allowed.move_limit(leased.name)
        if allowed.planned and (assigned is None or assigned.successor != decision.new.name):
            raise ProvisioningFailed(f"the plan does not give {leased.name} up for {decision.new.name} any more")
        try:
            if warm := decision.new.boot_seconds == 0 and decision.new.source == WARM:
                found = self._warm(need, limit, leased.lease, decision.new.price_per_hour)
            else:
                found = self._orders.rent(need, decision.new, limit=limit, note=say, pause=pause, replaces=leased.lease)
        except (BudgetReached, FleetFull) as error:
            raise ProvisioningFailed(str(error)) from None
        if found is None:
            why = f"{need.dataset} already holds all instances it may lease beside {leased.name}"
            raise ProvisioningFailed(f"no warm {decision.new.name} answers, or {why}" if warm else why)
        found.why = decision.sentence
        with self._orders.handing_over(found.lease, found.close):
            found.user = self._user_engine(need, lambda waiting: say(waiting.note), pause)
        return found

    def _shared(self, need: Requirement, limit: int, replaces: LeasedEngine | None) -> LeasedEngine | None:
        """One that stands, on which others end; None, too, where the budget does not pay for it."""
        try:
            return self._warm(need, limit, None if replaces is None else replaces.lease)
        except BudgetReached:
            return None

    def _warm(
        self,
        need: Requirement,
        limit: int,
        old: Lease | None,
        most_per_hour: float = math.inf,
        shared: Callable[[], bool] = lambda: True,
    ) -> LeasedEngine | None:
        """The first of the warm instances that answers and takes rows as long as ours; a dead one is ended.

        `shared`: whether one will do on which other runs have their last rows in flight. These come after all others.
        Raises BudgetReached where there is none, and the budget does not pay for one.
        """
        refused: list[BudgetReached] = []
        for instance in self._warm_instances.usable(need):
            if instance.price_per_hour > most_per_hour or (old is not None and instance.name == old.instance):
                continue
            if instance.draining and not shared():
                break
            asked_at = self.heartbeat.now()
            try:
                lease = self.fleet_db.try_lease(
                    instance.name,
                    self.heartbeat.run_id,
                    need.dataset,
                    self.heartbeat.ttl,
                    limit=limit,
                    replaces=old,
                    drain_seconds=self.heartbeat.drain_seconds(),
                )
            except BudgetReached as error:  # one that others share comes later, and may cost less
                refused.append(error)
                continue
            if lease is None:
                continue
            self.heartbeat.hold(lease, asked_at)
            with self._orders.handing_over(lease):
                access = self._orders.access(instance)
            with self._orders.handing_over(lease, access.close if access is not None else lambda: None):
                if access is not None and any(answers(access.endpoint) for _ in range(HEALTH_TRIES)):
                    self._warm_instances.reached(instance.name)
                    leased = self._orders.leased(lease, instance, instance_offer(instance), access)
                    leased.why = (
                        f"warm: it serves {instance.model} already, at {format_usd(instance.price_per_hour)} $/h"
                    )
                    return leased
            if access is not None:
                access.close()
            self._leave(lease, reached=access is not None)
        if refused:
            raise least_refusal(refused)
        return None

    def _leave(self, lease: Lease, *, reached: bool) -> None:
        """An engine that does not answer ends. No way to it from here says nothing of the engine, unless that lasts."""
        self.heartbeat.stop_renewing(lease)
        reason = "its engine does not answer" if reached else "it cannot be reached from here"
        if reached or self._warm_instances.is_out_of_reach(lease.instance):
            self.fleet_db.give_up(lease, reason)
            self._orders.end(lease.instance, reason)
        else:
            self.fleet_db.release(lease, reason=reason)


def _may_come(activity: RunActivity) -> bool:
    """Whether an offer is waited for that the budget may pay for: it failed a moment ago, or the fleet is full."""
    return activity.wait is not None and activity.wait.kind in (WaitKind.OFFERS_FAILED, WaitKind.FLEET_LIMIT)


def least_refusal(refused: Sequence[BudgetReached]) -> BudgetReached:
    """The refusal that the smallest budget would have made none."""
    return min(refused, key=lambda error: error.refusal.enough_usd)
