"""What renting at EC2 needs, looked at without renting: who we are, what we may do, quota, images, prices."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from gpu_runner.money import format_usd
from gpu_runner.offers.offer import Offer
from gpu_runner.providers.base import EngineOrder, NoCapacity, ProviderError, ProviderUnclear
from gpu_runner.providers.checks import CheckOutcome, CheckResult, CheckSubject
from gpu_runner.providers.ec2 import launch
from gpu_runner.providers.ec2.api import DRY_RUN, Clients, Refused, call
from gpu_runner.providers.ec2.config import Ec2ProviderConfig, Ec2RegionConfig
from gpu_runner.providers.ec2.prices import Prices, make_offers, unpriced

OK, WARNING, FAILED = CheckOutcome.OK, CheckOutcome.WARNING, CheckOutcome.FAILED
DENIED = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"})
CHECK_NAME = "ba-check"
CHECK_SECONDS = 30.0

# vCPUs that may run at once, by the first letter of the instance type: on demand, spot (Service Quotas, service ec2).
QUOTAS = {"g": ("L-DB2E81BA", "L-3819A6DF"), "p": ("L-417A185B", "L-7212CCBC")}


class Account(Protocol):
    """What is looked at: a provider, as far as it matters here."""

    name: str
    config: Ec2ProviderConfig
    clients: Clients

    def prices(self) -> tuple[Prices, Prices]: ...

    def user_data_of(self, name: str, order: EngineOrder) -> str: ...


def check_account(provider: Account) -> list[CheckResult]:
    """Every look, in the order in which one that fails explains the next. Bounded in time: what is left is said."""
    ends = time.monotonic() + CHECK_SECONDS
    looks: list[Callable[[], list[CheckResult]]] = [partial(_identity, provider)]
    for region in provider.config.regions:
        looks += [partial(_image, provider, region), partial(_permissions, provider, region)]
        looks += [partial(_quota, provider, region)]
    looks.append(partial(_prices, provider))
    found: list[CheckResult] = []
    for look in looks:
        if time.monotonic() > ends:
            words = f"not all was looked at within {CHECK_SECONDS:.0f} s"
            return [*found, CheckResult(CheckSubject.MACHINES, WARNING, words, "try again")]
        found += look()
        if found[0].outcome is FAILED:  # nobody is anybody: the rest would say the same
            break
    return found


def _identity(provider: Account) -> list[CheckResult]:
    region = provider.config.regions[0].region
    remedy = "give boto3 credentials: environment variables, a role, or `profile` of this entry"
    try:
        sts = provider.clients.get("sts", region)
        answer = call("GetCallerIdentity", sts.get_caller_identity)
    except (ProviderError, ProviderUnclear) as error:
        return [CheckResult(CheckSubject.CREDENTIALS, FAILED, str(error), remedy)]
    return [CheckResult(CheckSubject.CREDENTIALS, OK, f"{answer.get('Arn', '?')}")]


def _image(provider: Account, region: Ec2RegionConfig) -> list[CheckResult]:
    where = f"{region.region}: {region.image}"
    try:
        ec2 = provider.clients.get("ec2", region.region)
        images = call("DescribeImages", lambda: ec2.describe_images(ImageIds=[region.image])).get("Images", [])
    except (ProviderError, ProviderUnclear) as error:
        return [CheckResult(CheckSubject.IMAGE, FAILED, f"{where}: {error}", "name an AMI of this region")]
    if not images or images[0].get("State") != "available":
        return [
            CheckResult(CheckSubject.IMAGE, FAILED, f"{where}: no such image to be had", "name an AMI of this region")
        ]
    root = images[0].get("RootDeviceName")
    if root and root != provider.config.root_device:
        words = f"{where}: its root volume is {root}, root_device is {provider.config.root_device}"
        return [CheckResult(CheckSubject.IMAGE, FAILED, words, f"set root_device: {root}")]
    return [CheckResult(CheckSubject.IMAGE, OK, f"{where}: {images[0].get('Name', '')}"[:200]), *_by_digest(provider)]


def _by_digest(provider: Account) -> list[CheckResult]:
    if "@sha256:" in provider.config.engine_image:
        return []
    words = f"engine_image {provider.config.engine_image} is not named by its digest: it may change between VMs"
    return [CheckResult(CheckSubject.IMAGE, WARNING, words, "write NAME@sha256:…")]


def _permissions(provider: Account, region: Ec2RegionConfig) -> list[CheckResult]:
    """Each operation as a dry run (the order exactly as it would be sent), or as a list of nothing."""
    try:
        ec2 = provider.clients.get("ec2", region.region)
    except ProviderError as error:
        return [CheckResult(CheckSubject.PERMISSIONS, FAILED, str(error))]
    looks: list[tuple[str, Callable[[], Any], bool]] = [
        ("ec2:DescribeInstances", partial(ec2.describe_instances, DryRun=True, MaxResults=5), True)
    ]
    for spot in sorted({False, True} & {way for kind in provider.config.instance_types for way in kind.ways}):
        try:
            request = _order(provider, region, spot)
        except ProviderError as error:
            return [CheckResult(CheckSubject.PERMISSIONS, FAILED, f"{region.region}: {error}")]
        words = "ec2:RunInstances with ec2:CreateTags" + (", of spot" if spot else "")
        looks.append((words, partial(ec2.run_instances, DryRun=True, **request), True))
    nobody = "i-00000000000000000"
    looks.append(("ec2:TerminateInstances", partial(ec2.terminate_instances, DryRun=True, InstanceIds=[nobody]), True))
    if any(kind.spot for kind in provider.config.instance_types):
        requests = partial(ec2.describe_spot_instance_requests, DryRun=True)
        looks.append(("ec2:DescribeSpotInstanceRequests", requests, False))
    return [_allowed(region.region, *look) for look in looks]


def _order(provider: Account, region: Ec2RegionConfig, spot: bool) -> dict[str, Any]:
    """The order that the first instance type of this kind would be."""
    kind = next(one for one in provider.config.instance_types if spot in one.ways)
    gpu, gpus, memory = kind.hardware
    offer = Offer(
        provider.name, region.region, kind.instance_type, gpu, gpus, memory, spot, 1.0, 0.0, 1.0, 0.0, "check"
    )
    data = provider.user_data_of(CHECK_NAME, EngineOrder("model", "chat"))
    return launch.run_instances(provider.config, region, launch.zones(region)[0], offer, CHECK_NAME, data)


def _allowed(region: str, operation: str, ask: Callable[[], Any], needed: bool) -> CheckResult:
    """What a dry run says: DryRunOperation is a yes; no such instance too, as the right was looked at before."""
    said = f"{region}: {operation}"
    remedy = f"allow {operation} to this identity"
    try:
        call(operation, ask)
    except Refused as refused:
        if refused.code == DRY_RUN or refused.code.startswith("InvalidInstanceID"):
            return CheckResult(CheckSubject.PERMISSIONS, OK, f"{said}: allowed")
        outcome = FAILED if needed else WARNING
        if refused.code in DENIED:
            return CheckResult(CheckSubject.PERMISSIONS, outcome, f"{said}: denied", remedy)
        words = f"{said}: refused: {refused}"
        return CheckResult(CheckSubject.PERMISSIONS, outcome, words, "correct what is refused in this region's entry")
    except NoCapacity as none:
        return CheckResult(CheckSubject.MACHINES, WARNING, f"{said}: {none}", "other zones or instance types")
    except (ProviderError, ProviderUnclear) as error:
        return CheckResult(CheckSubject.PERMISSIONS, WARNING, f"{said}: {error}", "try again")
    return CheckResult(CheckSubject.PERMISSIONS, OK, f"{said}: allowed")


def _quota(provider: Account, region: Ec2RegionConfig) -> list[CheckResult]:
    """vCPUs that may run at once of each family that fleet.yaml rents."""
    wanted = sorted({(kind.instance_type[0], way) for kind in provider.config.instance_types for way in kind.ways})
    found = []
    for family, spot in wanted:
        if family not in QUOTAS:
            continue
        what = f"{region.region}: vCPUs of {family.upper()} instances{', spot' if spot else ''}"
        found.append(_one_quota(provider, region.region, QUOTAS[family][spot], what))
    return found


def _one_quota(provider: Account, region: str, code: str, what: str) -> CheckResult:
    try:
        quotas = provider.clients.get("service-quotas", region)
        answer = call("GetServiceQuota", partial(quotas.get_service_quota, ServiceCode="ec2", QuotaCode=code))
        value = float(answer["Quota"]["Value"])
    except (ProviderError, ProviderUnclear, LookupError, TypeError, ValueError) as error:
        words = f"{what}: not known: {error}"[:300]
        return CheckResult(CheckSubject.QUOTA, WARNING, words, "allow servicequotas:GetServiceQuota, or look by hand")
    if value <= 0:
        return CheckResult(CheckSubject.QUOTA, FAILED, f"{what}: 0", f"ask AWS to raise quota {code} in {region}")
    return CheckResult(CheckSubject.QUOTA, OK, f"{what}: {value:.0f}")


def _prices(provider: Account) -> list[CheckResult]:
    try:
        listed, spot = provider.prices()
    except (ProviderError, ProviderUnclear) as error:
        return [CheckResult(CheckSubject.PRICES, FAILED, str(error), "allow ec2:DescribeSpotPriceHistory")]
    offers = make_offers(provider.config, listed, spot, time.time())
    cheapest = min(offers, key=lambda one: one.price_per_hour, default=None)
    remedy = "set price_per_hour, or a price source under `prices` that has AWS"
    if cheapest is None:
        return [CheckResult(CheckSubject.PRICES, FAILED, "nothing that is rented has a price below its limit", remedy)]
    words = (
        f"{len(offers)} offers, from {cheapest.name} at {format_usd(cheapest.price_per_hour)} $/h ({cheapest.source})"
    )
    found = [CheckResult(CheckSubject.PRICES, OK, words)]
    if without := unpriced(provider.config, listed, spot):
        found.append(CheckResult(CheckSubject.PRICES, WARNING, f"no price: {', '.join(without[:10])}", remedy))
    return found
