"""RunPod as a provider. It has no token for orders, so names are kept single by `ordered_once` and `same_name`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from gpu_runner.bounded_http.addresses import engine_url
from gpu_runner.offers.offer import Hardware, Offer, hardware_of
from gpu_runner.providers.base import (
    EndReason,
    EngineAccess,
    EngineOrder,
    Machine,
    NoCapacity,
    ProviderError,
    ProviderUnclear,
)
from gpu_runner.providers.checks import CheckResult
from gpu_runner.providers.cloud.engine_container import (
    ENGINE_PORT,
    container_environment,
    container_image,
    container_words,
)
from gpu_runner.providers.cloud.listed_machine import listed_machine
from gpu_runner.providers.cloud.machine_names import check_machine_name, may_begin_a_name
from gpu_runner.providers.cloud.ordered_once import OrderBook
from gpu_runner.providers.cloud.same_name import one_of_each_name, settle
from gpu_runner.providers.engine_keys import engine_key, engine_secret
from gpu_runner.providers.engine_process import EngineStartError, answers
from gpu_runner.providers.runpod.api import RunPodApi
from gpu_runner.providers.runpod.checks import check_account
from gpu_runner.providers.runpod.config import RunPodConfig, RunPodGpuConfig
from gpu_runner.providers.runpod.pods import Pod, pod_order, read_pod
from gpu_runner.providers.sglang_server import SGLANG_ENTRY

LIST_SECONDS, ORDER_SECONDS = 2.0, 3.0
PRICE_SECONDS = 60.0
LOOK_SECONDS, STEP_SECONDS = 2.0, 0.25
CONFIRM_SECONDS = 60.0
_ROUNDING = 1.001


def https_proxy(pod_id: str) -> str:
    """RunPod's HTTPS address of a pod's engine. Anybody may ask it: the engine's key is what protects it."""
    return f"https://{pod_id.lower()}-{ENGINE_PORT}.proxy.runpod.net"


def nothing_listed() -> list[Offer]:
    """No price list says anything of RunPod."""
    return []


class RunPodProvider:
    """See `gpu_runner.providers.base.Provider`. `listed`: what the price sources say of RunPod; asked once a minute."""

    clock = 1.0

    def __init__(
        self,
        home: Path,
        config: RunPodConfig,
        *,
        listed: Callable[[], list[Offer]] = nothing_listed,
        proxy: Callable[[str], str] = https_proxy,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.name, self.config = config.name, config
        self._home, self._listed, self._proxy, self._now = Path(home), listed, proxy, now
        self._api = RunPodApi(config.api, config.api_key_env)
        self._book = OrderBook(self._home, config.name, now)
        self._prices: tuple[float, dict[str, Offer]] | None = None

    def offers(self) -> list[Offer]:
        """What fleet.yaml rents. What has no price is left out."""
        priced = ((one, self._price(one)) for one in self.config.gpus)
        return [self._offer(one, *found) for one, found in priced if found is not None]

    def all_hardware(self) -> frozenset[Hardware]:
        """See `gpu_runner.providers.base.HardwareProvider`."""
        return frozenset(hardware_of(one.gpu, one.gpus, one.gpu_memory_gib) for one in self.config.gpus)

    def _price(self, gpu: RunPodGpuConfig) -> tuple[float, float, str] | None:
        """US dollars an hour, when that was seen, and who says so: fleet.yaml, else the dearest of the price lists."""
        if gpu.price_per_hour is not None:
            return gpu.price_per_hour, self._now(), "fleet.yaml"
        now = self._now()
        if self._prices is None or not 0 <= now - self._prices[0] < PRICE_SECONDS:
            dearest: dict[str, Offer] = {}
            for one in self._listed():
                before = dearest.get(f"{one.gpus}x {one.instance_type}")
                if not one.spot and (before is None or one.price_per_hour > before.price_per_hour):
                    dearest[f"{one.gpus}x {one.instance_type}"] = one
            self._prices = now, dearest
        found = self._prices[1].get(f"{gpu.gpus}x {gpu.gpu_type}")
        return None if found is None else (found.price_per_hour, found.observed_at, found.source)

    def _offer(self, gpu: RunPodGpuConfig, usd: float, seen_at: float, source: str) -> Offer:
        return Offer(
            provider=self.name,
            region="",
            instance_type=gpu.instance_type,
            gpu=gpu.gpu,
            gpus=gpu.gpus,
            gpu_memory_gib=gpu.gpu_memory_gib,
            spot=False,
            price_per_hour=usd,
            boot_seconds=self.config.boot_seconds,
            reliability=self.config.reliability,
            observed_at=seen_at,
            source=source,
        )

    # create

    def create(self, offer: Offer, name: str, order: EngineOrder) -> str:
        """Rent a pod. One that costs more than its offer is ended at once, and was not to be had."""
        check_machine_name(name)
        if (known := self._book.get(name).id) is not None:
            return known
        gpu = self._had(offer)
        secret = engine_secret(self._home)
        environment = container_environment(self.config.environment, self.config.environment_from, secret, name)
        words = container_words(self.config.engine_words, order)
        image = container_image(self.config.engine_image, self.config.sglang_image, order)
        command = SGLANG_ENTRY if order.server == "sglang" else self.config.engine_command
        body = pod_order(self.config, gpu, name, image, (*command, *words), environment, order.max_num_seqs)

        def find() -> str | None:
            found = self._named(name)
            return found.id if found else None

        return self._book.create(name, find, lambda: self._ordered(body, offer))

    def _had(self, offer: Offer) -> RunPodGpuConfig:
        for gpu in self.config.gpus:
            price = self._price(gpu)
            if gpu.instance_type == offer.instance_type and price and price[0] == offer.price_per_hour:
                return gpu
        raise ProviderError(f"{offer.name}: there is no such offer at {offer.price_per_hour:.4g} $/h")

    def _ordered(self, body: object, offer: Offer) -> str:
        answer = self._api.call("POST", "/pods", body, ORDER_SECONDS)
        if answer.status == 404:
            raise ProviderError("POST /pods: status 404: expected version 1 of RunPod's REST API under `api`")
        pod = read_pod(answer.body)
        if pod is None:
            raise ProviderUnclear("POST /pods: an answer without a pod")
        if pod.usd_per_hour is not None and pod.usd_per_hour > offer.price_per_hour * _ROUNDING:
            try:
                self._end(pod)
            except ProviderError as error:
                raise ProviderUnclear(f"{pod.id} costs more than its offer, and was not ended: {error}") from error
            raise NoCapacity(f"{offer.name}: costs {pod.usd_per_hour:.4g} $/h now, {offer.price_per_hour:.4g} expected")
        return pod.id

    def _pods(self, tag: str) -> list[Pod]:
        answer = self._api.call("GET", "/pods", seconds=LIST_SECONDS)
        if answer.status == 404 or not isinstance(answer.body, list):
            raise ProviderUnclear("GET /pods: expected a list of pods, found something else")
        pods = (read_pod(one) for one in answer.body)
        return [pod for pod in pods if pod is not None and pod.name.startswith(tag)]

    def check(self) -> list[CheckResult]:
        """See `gpu_runner.providers.checks`."""
        return check_account(self.config, lambda: self._pods(""), self.offers)

    # list and terminate

    def list(self, tag: str) -> list[Machine]:
        """Pods by tag, and those that were ended from here within a day. Ends doubles.

        An end may be accepted and not done, and a list be empty by error. So a pod that was ended less than
        `CONFIRM_SECONDS` ago is gone when two lists in a row are without it.
        """
        if not may_begin_a_name(tag):
            return []
        listed, lately, now = self._pods(tag), self._book.ended_lately(tag), self._now()
        names = {pod.name for pod in listed if not pod.ended}
        if any(one.name not in names and now - (one.ended_at or now) < CONFIRM_SECONDS for one in lately):
            listed = [*{pod.id: pod for pod in (*listed, *self._pods(tag))}.values()]
        pods = settle(listed, self._end)
        alive = {pod.name for pod in pods if not pod.ended}
        ended = [one for one in lately if one.name not in alive]
        gone = {one.name for one in ended}
        machines = [self._machine(pod) for pod in pods if pod.name not in gone]
        for one in ended:
            seconds = max(0.0, now - (one.ended_at or now))
            reason = EndReason.TERMINATED
            machines.append(Machine(one.name, one.id or "", "ended", None, ended_seconds=seconds, reason=reason))
        return sorted(machines, key=lambda machine: machine.name)

    def _named(self, name: str) -> Pod | None:
        return next((pod for pod in settle(self._pods(name), self._end) if pod.name == name), None)

    def _machine(self, pod: Pod) -> Machine:
        ready = self._book.get(pod.name).ready
        return Machine(
            name=pod.name,
            id=pod.id,
            state="ended" if pod.ended else "running" if ready else "booting",
            endpoint=None if pod.ended else self._endpoint(pod),
            max_num_seqs=pod.max_num_seqs,
            reason=EndReason.TERMINATED if pod.ended else None,
            # Of one that has ended RunPod does not say when.
            billed_seconds=max(0.0, self._now() - pod.created_at) if pod.created_at and not pod.ended else None,
        )

    def _endpoint(self, pod: Pod) -> str | None:
        if self.config.reach == "proxy":
            return self._proxy(pod.id)
        if pod.address is None or pod.port is None:
            return None
        host = f"[{pod.address}]" if ":" in pod.address else pod.address
        with contextlib.suppress(ValueError):  # an address that no engine has
            return engine_url(f"http://{host}:{pod.port}")
        return None

    def terminate(self, name: str) -> None:
        """End every pod of this name, each by its id."""
        if not may_begin_a_name(name):
            return
        pods = [pod for pod in self._pods(name) if pod.name == name and not pod.ended]
        there = [pod for pod in pods if self._delete(pod.id)]
        known = self._book.get(name)
        if not pods and known.id is not None and known.ended_at is None:  # its list is behind
            self._delete(known.id)
        kept, _ = one_of_each_name(pods if known.id is None else there)
        self._book.ended(name, kept[0].id if kept else None)

    def _end(self, pod: Pod) -> None:
        self._delete(pod.id)

    def _delete(self, pod_id: str) -> bool:
        """End a pod. False: it was gone."""
        return self._api.call("DELETE", f"/pods/{pod_id}", seconds=LIST_SECONDS).status != 404

    # the way to an engine

    def access(self, name: str, endpoint: str) -> EngineAccess:
        """The engine's address as it stands, and its key."""
        return EngineAccess(endpoint, engine_key(engine_secret(self._home), name))

    def wait_ready(self, name: str, seconds: float, pause: Callable[[float], None]) -> Machine:
        """Wait until the engine answers."""
        deadline, look_at = time.monotonic() + seconds, 0.0
        seen: Machine | None = None
        while True:
            if time.monotonic() >= look_at:
                seen = listed_machine(self, name, seen, ordered=self._book.get(name).id is not None)
                look_at = time.monotonic() + LOOK_SECONDS
            if seen is not None and seen.endpoint is not None and answers(seen.endpoint):
                self._book.ready(name)
                return Machine(name, seen.id, "running", seen.endpoint, seen.max_num_seqs)
            if time.monotonic() >= deadline:
                raise EngineStartError(f"{name} at {self.name} was not ready after {seconds:.0f} s")
            pause(STEP_SECONDS)
