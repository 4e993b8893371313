"""EC2 as a provider: VMs in several regions and zones, found again by their tags.

An order carries its name as ClientToken, so a second order of it in the same zone is the same VM. Before each order the
name is looked for in every region: tokens count for one zone only. Should a name have two VMs all the same, the younger
one is ended at the next look (`gpu_runner.providers.cloud.same_name`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpu_runner.offers.offer import Hardware, Offer, hardware_of
from gpu_runner.providers.base import EngineAccess, EngineOrder, Machine, NoCapacity, ProviderError, ProviderUnclear
from gpu_runner.providers.checks import CheckResult
from gpu_runner.providers.cloud.engine_container import container_environment, container_image, container_words
from gpu_runner.providers.cloud.listed_machine import listed_machine
from gpu_runner.providers.cloud.machine_names import check_machine_name
from gpu_runner.providers.cloud.tunnels import HostWords, OpenTunnel, Tunnel, TunnelTarget, no_words
from gpu_runner.providers.ec2 import launch
from gpu_runner.providers.ec2.api import MISMATCH, Clients, Refused, call, shared_clients
from gpu_runner.providers.ec2.checks import check_account
from gpu_runner.providers.ec2.config import Ec2ProviderConfig, Ec2RegionConfig
from gpu_runner.providers.ec2.inventory import Inventory
from gpu_runner.providers.ec2.machines import Vm, endpoint, machine, rebalance_recommended
from gpu_runner.providers.ec2.prices import Price, Prices, listed_prices, make_offers
from gpu_runner.providers.ec2.ssh_keys import ssh_keys
from gpu_runner.providers.ec2.user_data import Boot, user_data
from gpu_runner.providers.engine_keys import engine_key, engine_secret
from gpu_runner.providers.engine_process import EngineStartError, answers
from gpu_runner.providers.sglang_server import SGLANG_ENTRY

CALL_SECONDS = 4.5  # of one call of ours; each request has at most 4
PRICE_SECONDS = 60.0
LOOK_SECONDS = 3.0  # between two looks at a VM that boots
STEP_SECONDS = 0.25


def nothing_listed() -> list[Offer]:
    """No price list says anything of AWS."""
    return []


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the last order of a name went, and the VM's id once EC2 has said it."""

    region: str
    subnet: str | None
    id: str | None = None


class Ec2Provider:
    """See `gpu_runner.providers.base.Provider`. `listed`: what the price sources say of AWS; asked once a minute."""

    clock = 1.0

    def __init__(
        self,
        home: Path,
        config: Ec2ProviderConfig,
        *,
        tunnel: OpenTunnel,
        words: HostWords = no_words,
        listed: Callable[[], list[Offer]] = nothing_listed,
        clients: Clients | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.name, self.config = config.name, config
        self._home, self._tunnel, self._words, self._listed, self._now = Path(home), tunnel, words, listed, now
        self.clients = clients or shared_clients(config.profile)
        self.inventory = Inventory(config, self.clients)
        self._guard = threading.Lock()
        self._places: dict[str, _Place] = {}
        self._prices: tuple[float, Prices, Prices] | None = None

    # offers

    def offers(self) -> list[Offer]:
        """What fleet.yaml rents, at prices that are at most a minute old."""
        return make_offers(self.config, *self.prices(), self._now())

    def prices(self) -> tuple[Prices, Prices]:
        """Prices of price lists, and EC2's own of spot. Raises as `Provider.offers`."""
        now = self._now()
        with self._guard:
            if self._prices is not None and 0 <= now - self._prices[0] < PRICE_SECONDS:
                return self._prices[1], self._prices[2]
        listed = listed_prices(self._listed())
        spot: dict[tuple[str, str, bool], Price] = {}
        answers, failures = self.inventory.each_region(lambda region: self.inventory.spot_prices(region, now))
        if not answers:  # else there is no spot in those that are silent
            raise next(iter(failures.values()))
        for found in answers.values():
            spot |= found
        with self._guard:
            self._prices = now, listed, spot
        return listed, spot

    # without renting

    def all_hardware(self) -> frozenset[Hardware]:
        """See `gpu_runner.providers.base.HardwareProvider`."""
        return frozenset(hardware_of(*kind.hardware) for kind in self.config.instance_types)

    def check(self) -> list[CheckResult]:
        """See `gpu_runner.providers.checks`."""
        return check_account(self)

    # create

    def create(self, offer: Offer, name: str, order: EngineOrder) -> str:
        """Rent a VM. A zone without capacity is followed by the next one of the region; an unclear answer by none."""
        check_machine_name(name)
        ends = time.monotonic() + CALL_SECONDS
        if known := self._known_id(name):
            return known
        with self._guard:
            is_new = name not in self._places
        if existing := self.inventory.named(name, new_in=offer.region if is_new else ""):
            return existing.id
        region = self._had(offer)
        data = self.user_data_of(name, order)
        refusal: NoCapacity | None = None
        for subnet in self._zones(region, name):
            if refusal is not None and time.monotonic() > ends:
                raise refusal
            request = launch.run_instances(self.config, region, subnet, offer, name, data, order.max_num_seqs)
            try:
                return self._ordered(region, subnet, name, request)
            except NoCapacity as error:
                refusal = error
        assert refusal is not None
        raise refusal

    def _had(self, offer: Offer) -> Ec2RegionConfig:
        """The region of an offer that is still had at its price. Raises ProviderError."""
        for one in self.offers():
            same = (one.region, one.instance_type, one.spot) == (offer.region, offer.instance_type, offer.spot)
            # A spot price moves by itself: what costs less than was said is the same offer.
            if same and (
                one.price_per_hour == offer.price_per_hour or (one.spot and one.price_per_hour < offer.price_per_hour)
            ):
                region = self.config.region(one.region)
                assert region is not None
                return region
        raise ProviderError(f"{offer.name}: there is no such offer at {offer.price_per_hour:.4g} $/h")

    def user_data_of(self, name: str, order: EngineOrder) -> str:
        """What the VM of this name does when it starts. Raises ProviderError."""
        secret = engine_secret(self._home)
        boot = Boot(
            image=container_image(self.config.engine_image, self.config.sglang_image, order),
            entry=SGLANG_ENTRY if order.server == "sglang" else (),
            words=container_words(self.config.engine_words, order),
            environment=container_environment(self.config.environment, self.config.environment_from, secret, name),
            keys=ssh_keys(secret, name),
            orphan_seconds=self.config.orphan_minutes * 60,
        )
        return user_data(boot)

    def _zones(self, region: Ec2RegionConfig, name: str) -> tuple[str | None, ...]:
        """Subnets to try: first the one where an earlier order of this name may have been taken."""
        subnets = launch.zones(region)
        with self._guard:
            place = self._places.get(name)
        if place is None or place.region != region.region or place.subnet not in subnets:
            return subnets
        return (place.subnet, *(one for one in subnets if one != place.subnet))

    def _ordered(self, region: Ec2RegionConfig, subnet: str | None, name: str, request: Mapping[str, Any]) -> str:
        """The id of the VM that RunInstances started, or had started for this name before."""
        ec2 = self.clients.get("ec2", region.region)
        where = f"{region.region}{f'/{subnet}' if subnet else ''}"
        try:
            answer = call(f"RunInstances in {where}", lambda: ec2.run_instances(**request))
            found = str(answer["Instances"][0]["InstanceId"])
        except ProviderUnclear:
            self._remember(name, _Place(region.region, subnet))
            raise
        except (LookupError, TypeError) as error:
            raise ProviderUnclear(f"RunInstances in {where}: an answer without an instance") from error
        except Refused as refused:
            if refused.code != MISMATCH:
                raise
            if existing := self.inventory.named(name):
                return existing.id
            raise ProviderUnclear(f"{name} was ordered before, and is not listed yet") from refused
        self._remember(name, _Place(region.region, subnet, found))
        return found

    def _remember(self, name: str, place: _Place) -> None:
        with self._guard:
            self._places[name] = place

    def _known_id(self, name: str) -> str | None:
        with self._guard:
            place = self._places.get(name)
        return place.id if place else None

    # list

    def list(self, tag: str) -> list[Machine]:
        """VMs by tag in all regions; ended ones as long as EC2 lists them, an hour or so. Ends doubles.

        Spot VMs of which EC2 has given notice carry it.
        """
        vms = self.inventory.one_of_each_name(tag)
        statuses = self.inventory.spot_statuses([one for one in vms if one.spot_request and not one.ended])
        now, public = self._now(), self.config.address == "public"
        machines = [
            machine(vm, now, public=public, spot=statuses.get(vm.spot_request or ""), at_risk=self._at_risk(vm, public))
            for vm in vms
        ]
        return sorted(machines, key=lambda one: one.name)

    def _at_risk(self, vm: Vm, public: bool) -> bool:
        """Whether EC2 recommends to leave a spot VM, as the VM itself said last. Never waits."""
        address = vm.public_address if public else vm.private_address
        if not (vm.spot and vm.ready and address) or vm.ended:
            return False
        return rebalance_recommended(self._words(vm.id, self._target(vm.name, endpoint(address))))

    # terminate

    def terminate(self, name: str) -> None:
        """End every VM of this name, in all regions. One that is silent keeps none in the others; it is told then."""
        vms, failures = self.inventory.vms_that_answer(name)
        found = [vm for vm in vms if vm.name == name]
        for vm in found:
            if not vm.ended:
                self.inventory.end_vm(vm)
        with self._guard:
            place = self._places.get(name)
        if not found and place is not None and place.id is not None:  # its list is behind
            self.inventory.end(place.region, place.id)
        if failures:
            raise next(iter(failures.values()))

    # the way to an engine

    def access(self, name: str, endpoint: str) -> EngineAccess:
        """A tunnel to the engine. Only a host with the key that we gave it is talked to."""
        tunnel = self._open(name, endpoint)
        key = engine_key(engine_secret(self._home), name)
        return EngineAccess(tunnel.endpoint, key, tunnel.close, lambda: tunnel.reachability)

    def _open(self, name: str, endpoint: str) -> Tunnel:
        return self._tunnel(self._target(name, endpoint))

    def _target(self, name: str, endpoint: str) -> TunnelTarget:
        try:
            parts = urlsplit(endpoint)
            port = parts.port
            engine_port = int(parts.path.removeprefix("/"))
        except ValueError:
            parts, port, engine_port = urlsplit(""), None, 0
        if parts.scheme != "ssh" or not parts.hostname or not parts.username or port is None:
            raise ProviderError(f"{name}: expected ssh://user@host:port/engine port as its address, found another one")
        keys = ssh_keys(engine_secret(self._home), name)
        return TunnelTarget(parts.hostname, port, parts.username, keys.host.public, keys.client.private, engine_port)

    def wait_ready(self, name: str, seconds: float, pause: Callable[[float], None]) -> Machine:
        """Wait until the engine answers through a tunnel, and mark the VM so that others see it."""
        deadline, look_at = time.monotonic() + seconds, 0.0
        tunnel: Tunnel | None = None
        seen: Machine | None = None
        try:
            while True:
                if time.monotonic() >= look_at:
                    seen = listed_machine(self, name, seen, ordered=self._known_id(name) is not None)
                    look_at = time.monotonic() + LOOK_SECONDS
                if seen is not None and seen.endpoint is not None:
                    tunnel = tunnel or self._opened(name, seen.endpoint)
                    if tunnel is not None and answers(tunnel.endpoint):
                        return self._mark_ready(seen)
                if time.monotonic() >= deadline:
                    raise EngineStartError(f"{name} at {self.name} was not ready after {seconds:.0f} s")
                pause(STEP_SECONDS)
        finally:
            if tunnel is not None:
                tunnel.close()

    def _opened(self, name: str, endpoint: str) -> Tunnel | None:
        """The tunnel; None while the VM's sshd does not answer, as of one that boots."""
        with contextlib.suppress(ProviderError):
            return self._open(name, endpoint)
        return None

    def _mark_ready(self, found: Machine) -> Machine:
        with contextlib.suppress(ProviderError, ProviderUnclear):
            if (vm := self.inventory.named(found.name)) is not None and vm.id == found.id:
                self.inventory.mark_ready(vm)
        return replace(found, state="running")
