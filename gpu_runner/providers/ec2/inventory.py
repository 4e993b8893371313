"""VMs of a provider in all its regions: found by their tags, ended by their ids; and what EC2 says of spot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from gpu_runner.providers.base import ProviderError, ProviderUnclear
from gpu_runner.providers.cloud.machine_names import may_begin_a_name
from gpu_runner.providers.cloud.same_name import settle
from gpu_runner.providers.ec2 import launch
from gpu_runner.providers.ec2.api import NOT_FOUND, Clients, Refused, call
from gpu_runner.providers.ec2.config import Ec2ProviderConfig, Ec2RegionConfig
from gpu_runner.providers.ec2.machines import SpotStatus, Vm, read_spot_status, read_vm
from gpu_runner.providers.ec2.prices import HISTORY_SECONDS, PRODUCTS, Price, spot_prices

PAGES, PAGE_SIZE = 50, 1000

T = TypeVar("T")
Failures = Mapping[str, ProviderError | ProviderUnclear]  # by region


class Inventory:
    """What an account has, as far as it is this provider's. Raises ProviderError and ProviderUnclear."""

    def __init__(self, config: Ec2ProviderConfig, clients: Clients) -> None:
        self.config, self.clients = config, clients

    def one_of_each_name(self, tag: str) -> list[Vm]:
        """VMs whose names begin so, one for each name: what runs beside it is ended."""
        return settle(self.vms(tag), self.end_vm)

    def named(self, name: str, *, new_in: str = "") -> Vm | None:
        """The VM of this name. `new_in`: where a name that was never ordered is to be; other regions may be silent."""
        found, failures = self.vms_that_answer(name)
        if failures and (not new_in or new_in in failures):
            raise next(iter(failures.values()))
        return next((vm for vm in settle(found, self.end_vm) if vm.name == name), None)

    def vms(self, tag: str) -> list[Vm]:
        """All VMs whose names begin so, also several of a name. A part of a list is none: raises the first failure."""
        found, failures = self.vms_that_answer(tag)
        if failures:
            raise next(iter(failures.values()))
        return found

    def vms_that_answer(self, tag: str) -> tuple[list[Vm], Failures]:
        """As `vms`, of the regions that answer."""
        if not may_begin_a_name(tag):
            return [], {}
        answers, failures = self.each_region(lambda region: self._vms_in(region, tag))
        return [vm for vms in answers.values() for vm in vms], failures

    def _vms_in(self, region: Ec2RegionConfig, tag: str) -> list[Vm]:
        ec2 = self.clients.get("ec2", region.region)
        reservations = self._pages(
            ec2.describe_instances,
            "Reservations",
            Filters=[
                {"Name": f"tag:{launch.NAME_TAG}", "Values": [f"{tag}*"]},
                {"Name": f"tag:{launch.PROVIDER_TAG}", "Values": [self.config.name]},
            ],
            MaxResults=PAGE_SIZE,
        )
        vms = (read_vm(one, region.region) for several in reservations for one in several.get("Instances", []))
        return [vm for vm in vms if vm is not None and vm.name.startswith(tag)]

    def spot_statuses(self, vms: list[Vm]) -> dict[str, SpotStatus]:
        """Status of spot requests by id. Without an answer there is no notice, which is what silence means."""
        by_region: dict[str, list[str]] = {}
        for vm in vms:
            by_region.setdefault(vm.region, []).append(str(vm.spot_request))
        found: dict[str, SpotStatus] = {}
        for region, requests in by_region.items():
            ec2 = self.clients.get("ec2", region)
            for start in range(0, len(requests), PAGE_SIZE):
                some = requests[start : start + PAGE_SIZE]
                with contextlib.suppress(ProviderError, ProviderUnclear):
                    answer = call(
                        f"DescribeSpotInstanceRequests in {region}",
                        partial(ec2.describe_spot_instance_requests, SpotInstanceRequestIds=some),
                    )
                    read = (read_spot_status(one) for one in answer.get("SpotInstanceRequests", []))
                    found |= dict(one for one in read if one is not None)
        return found

    def _pages(self, method: Callable[..., Mapping[str, Any]], key: str, **request: Any) -> list[Mapping[str, Any]]:
        """All pages of a list. Raises ProviderUnclear when it does not end."""
        found: list[Mapping[str, Any]] = []
        token: str | None = None
        for _ in range(PAGES):
            more = {"NextToken": token} if token else {}
            page = call(key, partial(method, **request, **more))
            found += page.get(key, [])
            token = page.get("NextToken") or None
            if token is None:
                return found
        raise ProviderUnclear(f"{key}: expected at most {PAGES} pages, found more")

    def each_region(self, ask: Callable[[Ec2RegionConfig], T]) -> tuple[dict[str, T], Failures]:
        """The answers of the regions, asked at once, and the failures of those that gave none, by region."""

        def asked(region: Ec2RegionConfig) -> T | ProviderError | ProviderUnclear:
            try:
                return ask(region)
            except (ProviderError, ProviderUnclear) as error:
                return error

        regions = self.config.regions
        if len(regions) == 1:
            found = [asked(regions[0])]
        else:
            with ThreadPoolExecutor(min(8, len(regions)), thread_name_prefix="ec2") as pool:
                found = list(pool.map(asked, regions))
        answers: dict[str, T] = {}
        failures: dict[str, ProviderError | ProviderUnclear] = {}
        for region, one in zip(regions, found, strict=True):
            if isinstance(one, (ProviderError, ProviderUnclear)):
                failures[region.region] = one
            else:
                answers[region.region] = one
        return answers, failures

    def spot_prices(self, region: Ec2RegionConfig, now: float) -> dict[tuple[str, str, bool], Price]:
        """What spot costs now in a region, as far as fleet.yaml rents it there."""
        kinds = [one.instance_type for one in self.config.instance_types if one.spot]
        if not kinds:
            return {}
        ec2 = self.clients.get("ec2", region.region)
        history = self._pages(
            ec2.describe_spot_price_history,
            "SpotPriceHistory",
            InstanceTypes=kinds,
            ProductDescriptions=list(PRODUCTS),
            StartTime=now - HISTORY_SECONDS,
        )
        return spot_prices(region.region, history, now)

    def end_vm(self, vm: Vm) -> None:
        """End a VM. One that is gone has ended."""
        self.end(vm.region, vm.id)

    def end(self, region: str, machine_id: str) -> None:
        """End the VM of this id."""
        ec2 = self.clients.get("ec2", region)
        try:
            call(f"TerminateInstances in {region}", lambda: ec2.terminate_instances(InstanceIds=[machine_id]))
        except Refused as refused:
            if refused.code != NOT_FOUND:
                raise

    def mark_ready(self, vm: Vm) -> None:
        """Tag a VM whose engine has answered, so that others see it. Without an answer it stays unmarked."""
        ec2, tag = self.clients.get("ec2", vm.region), {"Key": launch.READY_TAG, "Value": "yes"}
        with contextlib.suppress(ProviderError, ProviderUnclear):
            call("CreateTags", lambda: ec2.create_tags(Resources=[vm.id], Tags=[tag]))
