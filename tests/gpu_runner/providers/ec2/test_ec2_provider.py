"""EC2 as a provider against moto's server: lost replies, zones, spot, orphans, prices, and what is looked at first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import botocore.awsrequest
import botocore.exceptions
import pytest
from support.fake_ec2 import HOME_REGION, OTHER_REGION, FakeEc2, fake_ec2, moto_server
from support.machines import ORDER

from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.reaper import sweep
from gpu_runner.offers.offer import Offer
from gpu_runner.providers.base import EngineOrder, NoCapacity, ProviderError, ProviderUnclear, open_access
from gpu_runner.providers.checks import CheckOutcome, CheckSubject
from gpu_runner.providers.cloud.tunnels import TunnelTarget
from gpu_runner.providers.ec2.api import Clients
from gpu_runner.providers.ec2.config import GPUS_OF
from gpu_runner.providers.ec2.provider import Ec2Provider
from gpu_runner.providers.engine_process import EngineStartError

pytestmark = pytest.mark.slow  # moto: half a second of CPU for each account

SPOT = [{"instance_type": "g6e.xlarge", "price_per_hour": 3.6, "spot": True}]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def site(server: str, tmp_path: Path) -> Iterator[FakeEc2]:
    with fake_ec2(server, tmp_path) as made:
        yield made


def on_demand(provider: Ec2Provider, region: str = HOME_REGION) -> Offer:
    (found,) = [one for one in provider.offers() if not one.spot and one.region == region]
    return found


def spot_offer(provider: Ec2Provider) -> Offer:
    (found,) = [one for one in provider.offers() if one.spot]
    return found


def lose_replies(provider: Ec2Provider, operation: str, error: Exception, region: str = HOME_REGION) -> None:
    """EC2's yes to an operation is lost on its way; the request was taken."""

    def lose(http_response: Any, **_: Any) -> None:
        if http_response.status_code == 200:
            raise error

    provider.clients.get("ec2", region).meta.events.register(f"after-call.ec2.{operation}", lose)


def answer_with(provider: Ec2Provider, operation: str, status: int, code: str, service: str = "ec2") -> None:
    """The operation is answered so; nothing is sent."""

    def answer(**_: Any) -> Any:
        body = f"<Response><Errors><Error><Code>{code}</Code><Message>no</Message></Error></Errors></Response>"
        found = botocore.awsrequest.AWSResponse("http://ec2", status, {}, None)
        found._content = body.encode()
        return found

    provider.clients.get(service, HOME_REGION).meta.events.register(f"before-send.{service}.{operation}", answer)


LOST = botocore.exceptions.ReadTimeoutError(endpoint_url="http://ec2")


def test_a_create_with_a_lost_reply_and_its_repeat_are_one_vm(site: FakeEc2):
    provider = site.provider()
    offer = on_demand(provider)
    lose_replies(provider, "RunInstances", LOST)
    with pytest.raises(ProviderUnclear):
        provider.create(offer, "ba-1", ORDER)
    (vm,) = site.named("ba-1")
    assert provider.create(offer, "ba-1", ORDER) == vm.id  # found by its tag
    assert site.provider().create(offer, "ba-1", ORDER) == vm.id  # by another provider, too
    assert len(site.named("ba-1")) == 1


def test_a_repeat_before_the_list_shows_anything_is_the_same_vm_by_its_token(site: FakeEc2, monkeypatch: Any):
    """Also where the first zone had no room at first, and has some now: the token counts in the zone that was asked."""
    first, second = site.subnets[HOME_REGION]
    site.full = {first}
    provider = site.provider()
    offer = on_demand(provider)
    monkeypatch.setattr(provider.inventory, "vms_that_answer", lambda tag: ([], {}))
    lose_replies(provider, "RunInstances", LOST)
    with pytest.raises(ProviderUnclear):
        provider.create(offer, "ba-1", ORDER)
    site.full = set()
    with pytest.raises(ProviderUnclear):
        provider.create(offer, "ba-1", ORDER)
    assert site.asked == [first, second, second]
    assert len(site.named("ba-1")) == 1


def test_an_order_of_a_name_with_other_parameters_is_the_vm_that_is_there(site: FakeEc2, monkeypatch: Any):
    provider = site.provider()
    offer = on_demand(provider)
    machine_id = provider.create(offer, "ba-1", ORDER)
    other = site.provider()
    listed = other.inventory.vms_that_answer
    looks: list[str] = []

    def late(tag: str) -> Any:
        looks.append(tag)
        return listed(tag) if len(looks) > 1 else ([], {})

    monkeypatch.setattr(other.inventory, "vms_that_answer", late)
    assert other.create(offer, "ba-1", EngineOrder("another", "chat")) == machine_id
    assert len(site.named("ba-1")) == 1


def test_two_vms_of_one_name_become_the_older_one(site: FakeEc2):
    provider = site.provider(in_regions=(HOME_REGION, OTHER_REGION))
    for region in (HOME_REGION, OTHER_REGION):
        blind = site.provider(in_regions=(HOME_REGION, OTHER_REGION))
        blind.inventory.vms_that_answer = lambda tag: ([], {})  # type: ignore[method-assign]  # its list is behind
        blind.create(on_demand(blind, region), "ba-1", ORDER)
    older, younger = site.named("ba-1")
    older.launch_time, younger.launch_time = "2026-01-01T00:00:00Z", "2026-01-01T00:00:05Z"
    assert [one.id for one in provider.list("ba-")] == [older.id]
    assert [one.id for one in site.running()] == [older.id]


def test_no_capacity_in_one_zone_is_followed_by_the_next_and_at_last_by_no_capacity(site: FakeEc2):
    first, second = site.subnets[HOME_REGION]
    provider = site.provider()
    site.full = {first}
    provider.create(on_demand(provider), "ba-1", ORDER)
    (vm,) = site.named("ba-1")
    assert (site.asked, vm.subnet_id) == ([first, second], second)
    site.full = {first, second}
    with pytest.raises(NoCapacity, match=f"{second}: InsufficientInstanceCapacity"):
        provider.create(on_demand(provider), "ba-2", ORDER)
    assert not site.named("ba-2")


@pytest.mark.parametrize(
    ("status", "code", "raised"),
    [
        (500, "InsufficientInstanceCapacity", NoCapacity),
        (400, "SpotMaxPriceTooLow", NoCapacity),
        (400, "MaxSpotInstanceCountExceeded", NoCapacity),
        (400, "VcpuLimitExceeded", NoCapacity),
        (400, "InvalidAMIID.NotFound", ProviderError),
        (401, "AuthFailure", ProviderError),
        (403, "UnauthorizedOperation", ProviderError),
        (503, "RequestLimitExceeded", ProviderUnclear),
        (400, "Throttling", ProviderUnclear),
        (500, "InternalError", ProviderUnclear),
        (502, "BadGateway", ProviderUnclear),
    ],
)
def test_what_ec2_refuses_is_told_apart_from_what_nobody_knows(
    site: FakeEc2, status: int, code: str, raised: type[Exception]
):
    provider = site.provider()
    offer = on_demand(provider)
    answer_with(provider, "RunInstances", status, code)
    with pytest.raises((ProviderError, ProviderUnclear)) as found:
        provider.create(offer, "ba-1", ORDER)
    assert type(found.value) is raised or (raised is ProviderError and type(found.value).__name__ == "Refused")
    assert code in str(found.value)


def test_each_request_is_sent_once(site: FakeEc2):
    """A repeat by botocore would hide a lost order behind the refusal that comes after it."""
    provider = site.provider(clients=Clients(None))
    offer = on_demand(provider)
    sent: list[int] = []
    client = provider.clients.get("ec2", HOME_REGION)
    client.meta.events.register("before-send.ec2.RunInstances", lambda **_: sent.append(1))
    answer_with(provider, "RunInstances", 500, "InternalError")
    with pytest.raises(ProviderUnclear):
        provider.create(offer, "ba-1", ORDER)
    assert sent == [1]
    assert (client.meta.config.connect_timeout, client.meta.config.read_timeout) == (1.0, 3.0)


def test_an_ec2_that_cannot_be_reached_was_sent_nothing(site: FakeEc2, monkeypatch: Any):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ProviderError, match="not sent"):
        site.provider(clients=Clients(None)).list("ba-")


def test_a_region_that_is_silent_makes_the_whole_list_unclear(site: FakeEc2):
    provider = site.provider(in_regions=(HOME_REGION, OTHER_REGION))
    provider.create(on_demand(provider), "ba-1", ORDER)
    lose_replies(provider, "DescribeInstances", LOST, OTHER_REGION)
    with pytest.raises(ProviderUnclear):
        provider.list("ba-")


def test_a_region_that_is_silent_stops_neither_orders_nor_ends_in_another(site: FakeEc2):
    provider = site.provider(in_regions=(HOME_REGION, OTHER_REGION), instance_types=SPOT)
    lose_replies(provider, "DescribeInstances", LOST, OTHER_REGION)
    lose_replies(provider, "DescribeSpotPriceHistory", LOST, OTHER_REGION)
    assert {one.region for one in provider.offers() if one.spot} == {HOME_REGION}
    made = provider.create(on_demand(provider), "ba-1", ORDER)
    with pytest.raises(ProviderUnclear):
        provider.create(on_demand(provider, OTHER_REGION), "ba-2", ORDER)  # a VM of that name may be there
    with pytest.raises(ProviderUnclear):
        provider.terminate("ba-1")  # one may be there, too
    (ended,) = [one for one in site.provider().list("ba-") if one.name == "ba-1"]
    assert made and ended.state == "ended"


def test_regions_that_are_all_silent_are_told(site: FakeEc2):
    provider = site.provider(in_regions=(HOME_REGION, OTHER_REGION), instance_types=SPOT)
    for region in (HOME_REGION, OTHER_REGION):
        lose_replies(provider, "DescribeSpotPriceHistory", LOST, region)
    with pytest.raises(ProviderUnclear):
        provider.offers()


def test_a_vm_is_launched_so_that_it_ends_by_itself_and_keeps_its_keys(site: FakeEc2):
    provider = site.provider(tags={"team": "data"})
    provider.create(on_demand(provider), "ba-1", ORDER)
    (vm,) = site.named("ba-1")
    assert vm.instance_initiated_shutdown_behavior == "terminate"
    assert (vm.metadata_options.http_tokens, vm.metadata_options.http_put_response_hop_limit) == ("required", 1)
    assert vm.client_token == "ba-1" and vm.key_name is None
    assert site.tags(vm) == {
        "Name": "ba-1",
        "batch-assets:name": "ba-1",
        "batch-assets:provider": "aws",
        "batch-assets:max-num-seqs": "8",
        "team": "data",
    }


def test_notice_of_an_interruption_and_then_its_end(site: FakeEc2):
    provider = site.provider(instance_types=SPOT)
    provider.create(spot_offer(provider), "ba-1", ORDER)
    (machine,) = provider.list("ba-")
    assert machine.notice_seconds is None
    site.interrupt("ba-1", time.time() - 20)
    (machine,) = provider.list("ba-")
    assert machine.notice_seconds is not None and 90 < machine.notice_seconds <= 100
    site.take("ba-1")
    (machine,) = provider.list("ba-")
    assert (machine.state, machine.reason, machine.notice_seconds) == ("ended", "interrupted", None)


def test_a_recommendation_to_leave_is_that_of_the_spot_vm_itself(site: FakeEc2):
    """VMs on demand and VMs that boot are not asked; the address asked is the one that tunnels lead to."""
    asked: list[str] = []

    def words(machine_id: str, target: TunnelTarget) -> str:
        asked.append(target.host)
        return '{"noticeTime": "2026-11-23T08:00:00Z"}'

    provider = site.provider(instance_types=SPOT, words=words)
    provider.create(on_demand(provider), "ba-1", ORDER)
    provider.create(spot_offer(provider), "ba-2", ORDER)
    provider.list("ba-")
    assert not asked
    for name in ("ba-1", "ba-2"):
        provider.wait_ready(name, 20, time.sleep)
    assert [(one.name, one.at_risk, one.notice_seconds) for one in provider.list("ba-")] == [
        ("ba-1", False, None),
        ("ba-2", True, None),
    ]
    (vm,) = site.named("ba-2")
    assert asked == [vm.public_ip] * len(asked)
    site.take("ba-2")
    assert not any(one.at_risk for one in provider.list("ba-"))


def test_a_boot_that_fails_ends_the_wait_and_the_tunnel(site: FakeEc2):
    provider = site.provider()
    provider.create(on_demand(provider), "ba-1", ORDER)
    (vm,) = site.named("ba-1")
    site.vms[vm.id].boots = False
    with pytest.raises(EngineStartError, match="not ready after 0 s"):
        provider.wait_ready("ba-1", 0, time.sleep)
    site.take("ba-1", "Client.InstanceInitiatedShutdown")
    with pytest.raises(EngineStartError, match="ba-1 at aws has ended: boot failed"):
        provider.wait_ready("ba-1", 20, time.sleep)
    assert site.opened == site.closed == 1


def test_a_host_with_another_key_is_not_talked_to(site: FakeEc2):
    provider = site.provider()
    provider.create(on_demand(provider), "ba-1", ORDER)
    machine = provider.wait_ready("ba-1", 20, time.sleep)
    assert machine.endpoint is not None
    (vm,) = site.named("ba-1")
    site.vms[vm.id].document["ssh_keys"]["ed25519_public"] = "ssh-ed25519 AAAA"
    with pytest.raises(ProviderError, match="another key"):
        open_access(provider, "ba-1", machine.endpoint)
    for wrong in ("http://1.2.3.4:8000", "ssh://1.2.3.4:22/8000", "ssh://u@1.2.3.4:x/8000", "ssh://u@1.2.3.4:22/"):
        with pytest.raises(ProviderError, match="expected ssh://"):
            provider.access("ba-1", wrong)


def test_an_orphan_is_found_by_its_tag_in_any_region_and_ended_by_the_reaper(site: FakeEc2, tmp_path: Path):
    provider = site.provider(in_regions=(HOME_REGION, OTHER_REGION))
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db:
        tag = fleet_db.tag()
        provider.create(on_demand(provider, OTHER_REGION), f"{tag}lost", ORDER)
        provider.create(on_demand(provider), "ba-other-fleet", ORDER)
        neighbour = site.provider(name="aws-2", in_regions=(HOME_REGION, OTHER_REGION))
        neighbour.create(on_demand(neighbour), f"{tag}theirs", ORDER)
        said = sweep(fleet_db, [provider], tag=tag, idle_seconds=60)
        assert said == [f"{tag}lost is not in the fleet's database", f"{tag}lost: told aws to end it"]
        assert sorted(one.id for one in site.running()) == sorted(
            vm.id for name in ("ba-other-fleet", f"{tag}theirs") for vm in site.named(name)
        )


def test_prices_of_fleet_yaml_of_lists_and_of_ec2_are_one_list(site: FakeEc2):
    """On demand: fleet.yaml before a list. Spot: EC2 before a list, unless it is above the highest price."""

    def listed() -> list[Offer]:
        one = on_demand(site.provider())
        dear = replace(one, instance_type="g6.xlarge", price_per_hour=0.9, observed_at=5.0, source="list")
        return [
            replace(one, price_per_hour=99.0, source="list"),
            dear,
            replace(dear, price_per_hour=0.8, observed_at=4.0),
            replace(dear, spot=True, price_per_hour=0.5),
        ]

    types = [
        {"instance_type": "g6e.xlarge", "price_per_hour": 3.6, "spot": True, "max_spot_price": 1.0},
        {"instance_type": "g6.xlarge", "spot": True},
        {"instance_type": "g5.xlarge"},
    ]
    provider = site.provider(instance_types=types, listed=listed)
    found = {(one.instance_type, one.spot): (one.price_per_hour, one.source) for one in provider.offers()}
    assert found == {
        ("g6e.xlarge", False): (3.6, "fleet.yaml"),
        ("g6e.xlarge", True): (0.00001, "EC2 spot price history"),
        ("g6.xlarge", False): (0.9, "list"),
        ("g6.xlarge", True): (0.00001, "EC2 spot price history"),
    }


def test_a_spot_offer_may_become_cheaper_and_not_dearer(site: FakeEc2):
    provider = site.provider(instance_types=SPOT)
    offer = spot_offer(provider)
    with pytest.raises(ProviderError, match="no such offer"):
        provider.create(replace(offer, price_per_hour=offer.price_per_hour / 2), "ba-1", ORDER)
    provider.create(replace(offer, price_per_hour=offer.price_per_hour * 2), "ba-1", ORDER)
    assert len(site.named("ba-1")) == 1


def test_a_fleet_of_more_than_a_page_is_listed_whole(site: FakeEc2, monkeypatch: Any):
    monkeypatch.setattr("gpu_runner.providers.ec2.inventory.PAGE_SIZE", 5)
    provider = site.provider()
    offer = on_demand(provider)
    for number in range(12):
        provider.create(offer, f"ba-{number:02}", ORDER)
    assert [one.name for one in provider.list("ba-")] == [f"ba-{number:02}" for number in range(12)]


def subjects(found: list[Any]) -> dict[CheckSubject, list[CheckOutcome]]:
    by: dict[CheckSubject, list[CheckOutcome]] = {}
    for one in found:
        by.setdefault(one.subject, []).append(one.outcome)
    return by


def test_check_looks_at_everything_and_rents_nothing(site: FakeEc2):
    ok, warning = CheckOutcome.OK, CheckOutcome.WARNING
    found = site.provider(instance_types=SPOT).check()
    assert subjects(found) == {
        CheckSubject.CREDENTIALS: [ok],
        CheckSubject.IMAGE: [ok],
        CheckSubject.PERMISSIONS: [ok] * 5,
        CheckSubject.QUOTA: [warning] * 2,  # moto knows no quotas
        CheckSubject.PRICES: [ok],
    }
    assert not site.instances()


def test_check_says_which_permission_is_missing(site: FakeEc2):
    provider = site.provider()
    answer_with(provider, "RunInstances", 403, "UnauthorizedOperation")
    (failed,) = [one for one in provider.check() if one.outcome is CheckOutcome.FAILED]
    assert failed.subject is CheckSubject.PERMISSIONS
    assert failed.found == "eu-central-1: ec2:RunInstances with ec2:CreateTags: denied"
    assert failed.remedy == "allow ec2:RunInstances with ec2:CreateTags to this identity"


def test_check_says_that_an_image_is_not_there_that_prices_are_missing_and_a_digest(site: FakeEc2):
    site.images[HOME_REGION] = "ami-00000000000000000"
    found = site.provider(
        instance_types=[{"instance_type": "g5.xlarge"}], engine_image="vllm/vllm-openai:latest"
    ).check()
    failed = {one.subject for one in found if one.outcome is CheckOutcome.FAILED}
    assert failed == {CheckSubject.IMAGE, CheckSubject.PRICES}


def test_check_without_credentials_ends_there(site: FakeEc2, monkeypatch: Any):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (found,) = site.provider(clients=Clients(None)).check()
    assert (found.subject, found.outcome) == (CheckSubject.CREDENTIALS, CheckOutcome.FAILED)


def test_the_table_of_gpus_is_that_of_describe_instance_types():
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    for kind, (gpu, gpus, memory) in GPUS_OF.items():
        (told,) = INSTANCE_TYPES[kind]["GpuInfo"]["Gpus"]
        assert (told["Name"].replace(" ", ""), told["Count"]) == (gpu, gpus), kind
        assert told["MemoryInfo"]["SizeInMiB"] / 1024 == pytest.approx(memory, rel=0.09), kind
