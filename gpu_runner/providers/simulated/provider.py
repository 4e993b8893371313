"""One simulated provider: the five calls, with its market, its capacity and its faults."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gpu_runner.offers.gpus import find_sheet
from gpu_runner.offers.offer import Hardware, Offer, hardware_of
from gpu_runner.offers.speed import GIB, Assumptions, ModelFacts, default_slots
from gpu_runner.providers.base import EngineOrder, Machine, NoCapacity, ProviderError, ProviderUnclear
from gpu_runner.providers.machine_host.manager import Hosting, new_record
from gpu_runner.providers.machine_host.registry import HostPlan, MachineRecord, MachineRegistry
from gpu_runner.providers.simulated.config import FaultRule, OfferChange, SimulatedCloudConfig, SimulatedProviderConfig
from gpu_runner.providers.simulated.offers_at import Prices, offers_at, taken_at
from gpu_runner.providers.simulated.provider_faults import FaultPicker, count, share

KEEP_CALLS = 100_000
ASSUMED = Assumptions()


def slots(offer: Offer, order: EngineOrder) -> int:
    """max_num_seqs of the engine: as ordered, or vLLM's default for the GPU."""
    sheet = find_sheet(offer.gpu, offer.gpu_memory_gib)
    if sheet is None:
        raise ProviderError(f"no datasheet for {offer.gpu} with {offer.gpu_memory_gib:g} GiB: it cannot be simulated")
    return order.max_num_seqs or default_slots(sheet, offer.gpu_memory_gib)


def engine_command(
    offer: Offer,
    order: EngineOrder,
    facts: ModelFacts,
    max_model_len: int,
    clock: float,
    assumed: Assumptions = ASSUMED,
) -> tuple[str, ...]:
    """Command line with `{model}` and `{port}` open.

    One engine over the largest split s the instance allows, worth s × 0.9^log2(s) single GPUs. Seconds of a step, as
    in `gpu_runner.offers.speed.estimate_speed`: weights = bytes / (0.8 bandwidth), a token = 2 active / (0.5 FLOP/s), a
    token of context = KV bytes / (0.8 bandwidth). KV cache: what 0.9 of the memory less 2 GiB per GPU leaves beside the
    weights; the context is no longer than that. A model that does not fit gets an engine that ends at its start, as
    vLLM does.
    """
    running = slots(offer, order)
    sheet = find_sheet(offer.gpu, offer.gpu_memory_gib)
    assert sheet is not None
    split = max((size for size in facts.tensor_parallel if size <= offer.gpus), default=0)
    room = split * (offer.gpu_memory_gib * assumed.memory - assumed.reserve_gib) * GIB - facts.weight_bytes
    kv_tokens = max(0, int(room / facts.kv_bytes_per_token))
    worth = split * assumed.split ** math.log2(split) if split else 1.0
    bandwidth = sheet.bandwidth * 1e9 * assumed.bandwidth * worth
    flops = (sheet.fp8 if facts.fp8 and sheet.fp8 else sheet.half) * 1e12 * assumed.compute * worth
    options = {
        "--model": "{model}",
        "--port": "{port}",
        "--speed": f"{clock:g}",
        "--max-num-seqs": str(running),
        "--max-num-batched-tokens": str(assumed.batched_tokens),
        "--max-model-len": str(min(max_model_len, kv_tokens) if kv_tokens else max_model_len),
        "--kv-tokens": str(kv_tokens),
        "--weights-ms": f"{facts.weight_bytes / bandwidth * 1e3:.6g}",
        "--token-us": f"{2 * facts.active_parameters / flops * 1e6:.6g}",
        "--context-ns": f"{facts.kv_bytes_per_token / bandwidth * 1e9:.6g}",
        "--overhead-ms": f"{assumed.overhead_seconds * 1e3:g}",
    }
    words = [word for option in options.items() for word in option]
    return (sys.executable, "-m", "gpu_runner.simulator", *words, *order.arguments)


class SimulatedProvider:
    """See `gpu_runner.providers.base.Provider`. `prices`: further offers by Unix time, such as a recorded history."""

    def __init__(
        self,
        register: MachineRegistry,
        started_at: float,
        cloud: SimulatedCloudConfig,
        config: SimulatedProviderConfig,
        prices: Prices | None = None,
    ) -> None:
        self.name = config.name
        self.clock = cloud.clock
        self.config = config
        self._register = register
        self._started_at = started_at
        self._cloud = cloud
        self._prices = prices
        self._hosting = Hosting(register, config.name)
        self._faults = FaultPicker(config.name, config.faults, cloud.seed)

    def offers(self) -> list[Offer]:
        """Offers with today's prices; `capacity` is what is left now."""
        with self._call("offers"):
            self._register.close_dead()
            connection = self._register.connection()
            return [
                replace(offer, capacity=max(0, offer.capacity - self._hosting.occupied(connection, offer)))
                if offer.capacity is not None
                else offer
                for offer in self._market(connection)
            ]

    def all_hardware(self) -> frozenset[Hardware] | None:
        """See `gpu_runner.providers.base.HardwareProvider`. What it plays of recorded prices changes with time."""
        if self._prices is not None:
            return None
        return frozenset(hardware_of(one.gpu, one.gpus, one.gpu_memory_gib) for one in self.config.offers)

    def create(self, offer: Offer, name: str, order: EngineOrder) -> str:
        """Rent a machine, at the offer's price and no other."""
        with self._call("create", name) as fault:
            if fault is not None and fault.kind == "no_capacity":
                raise NoCapacity(f"{offer.name}: no capacity")
            plan = HostPlan(
                command=self._command(offer, name, order),
                model=order.model,
                boot_seconds=offer.boot_seconds / self.clock,
                orphan_seconds=self._cloud.orphan_seconds,
            )
            record = new_record(
                offer, name, plan, provider=self.name, clock=self.clock, max_num_seqs=slots(offer, order)
            )
            admitted: list[MachineRecord] = []

            def admit(connection: sqlite3.Connection, record: MachineRecord) -> MachineRecord:
                self._check(connection, offer)
                if not admitted:
                    admitted.append(self._with_fate(connection, record, offer, plan))
                return admitted[0]

            return self._hosting.rent(record, admit)

    def wait_ready(self, name: str, seconds: float, pause: Callable[[float], None]) -> Machine:
        """Wait for the machine's engine. No API faults: this asks the machine, not the provider."""
        return self._hosting.wait_ready(name, seconds, pause)

    def list(self, tag: str) -> list[Machine]:
        """Machines by tag, as late as `list_lag_seconds` says."""
        with self._call("list", tag) as fault:
            if fault is not None and fault.kind == "empty_list":
                return []
            return self._hosting.machines(tag, self.config.list_lag_seconds)

    def terminate(self, name: str) -> None:
        """End the machine of this name, if there is one."""
        with self._call("terminate", name) as fault:
            if fault is None or fault.kind != "deaf_terminate":
                self._hosting.end(name)

    # what stands behind the calls

    @contextlib.contextmanager
    def _call(self, call: str, name: str = "") -> Iterator[FaultRule | None]:
        """Log the call with its result, and have it meet its fault."""
        try:
            with self._register.transaction() as connection:
                number = connection.execute(
                    "INSERT INTO calls (at, provider, call, name) VALUES (?, ?, ?, ?)",
                    (self._register.now(), self.name, call, name),
                ).lastrowid
                connection.execute("DELETE FROM calls WHERE number <= ?", ((number or 0) - KEEP_CALLS,))
                fault = self._faults.pick(connection, call)
        except sqlite3.OperationalError as error:
            raise ProviderError(f"{self._register.path}: {error}") from error
        result = "cut short"
        try:
            if fault is not None and fault.kind in ("error", "time_out"):
                _show(fault, call, self.name)
            yield fault
            if fault is not None and fault.kind == "lost_reply":
                _show(fault, call, self.name)
            result = "ok"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._log_result(number, result if fault is None else f"{result} ({fault.kind})")

    def _log_result(self, number: int | None, result: str) -> None:
        with contextlib.suppress(sqlite3.OperationalError):
            self._register.connection().execute("UPDATE calls SET result = ? WHERE number = ?", (result[:300], number))

    def _market(self, connection: sqlite3.Connection) -> Sequence[Offer]:
        lines = connection.execute("SELECT change FROM changes WHERE provider = ? ORDER BY at, number", (self.name,))
        changes = [OfferChange.model_validate_json(text) for (text,) in lines]
        now = self._register.now()
        return offers_at(self.config, self._prices, changes, now, self._elapsed(now))

    def _elapsed(self, now: float) -> float:
        return (now - self._started_at) * self.clock

    def _check(self, connection: sqlite3.Connection, offer: Offer) -> None:
        """The offer stands at this price, and there is one left."""
        key = (offer.region, offer.instance_type, offer.spot)
        standing = [one for one in self._market(connection) if (one.region, one.instance_type, one.spot) == key]
        if not standing:
            raise ProviderError(f"{offer.name}: there is no such offer")
        if not math.isclose(standing[0].price_per_hour, offer.price_per_hour, rel_tol=1e-9):
            raise ProviderError(
                f"{offer.name}: the price is {standing[0].price_per_hour:.4g} $/h now, not {offer.price_per_hour:.4g}"
            )
        capacity = standing[0].capacity
        if capacity is not None and self._hosting.occupied(connection, offer) >= capacity:
            raise NoCapacity(f"{offer.name}: all {capacity} are taken")

    def _with_fate(
        self, connection: sqlite3.Connection, record: MachineRecord, offer: Offer, plan: HostPlan
    ) -> MachineRecord:
        """What will become of the machine: how it boots, and when it is taken away."""
        fault = self._faults.pick(connection, "boot")
        boot = {"boot_fails": "fails", "boot_hangs": "hangs"}.get(fault.kind, "works") if fault else "works"
        now = self._register.now()
        number = count(connection, f"{self.name}/machines")
        chance = share(self._cloud.seed, self.name, "interruption", number)
        taken = taken_at(self.config, offer, self._elapsed(now), chance)
        return replace(
            record,
            plan=replace(plan, boot=boot).dump(),
            take_at=now + taken[0] / self.clock if taken else None,
            notice_seconds=taken[1] if taken else None,
        )

    def _command(self, offer: Offer, name: str, order: EngineOrder) -> tuple[str, ...]:
        facts, max_model_len = self._cloud.facts(order.model)
        words = (*self._cloud.arguments, *order.arguments)
        filled = tuple(word.replace("{name}", name).replace("{home}", str(self._register.home)) for word in words)
        return engine_command(offer, replace(order, arguments=filled), facts, max_model_len, self.clock)


def _show(fault: FaultRule, call: str, provider: str) -> None:
    time.sleep(fault.delay_seconds)
    if fault.kind == "error":
        raise ProviderError(f"{provider}: {call} was answered with status 503")
    raise ProviderUnclear(f"{provider}: no answer to {call}")
