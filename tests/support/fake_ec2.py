"""EC2 for tests: moto's server with what it lacks (idempotent orders, capacity, spot requests), and VMs that obey their
user data: the host key, the one key that is let in, and the engine with its API key are read from it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import Instance, InstanceBackend
from moto.ec2.models.spot_requests import SpotRequestBackend
from moto.ec2.responses.spot_instances import SpotInstances
from moto.server import ThreadedMotoServer

from gpu_runner.providers.base import ProviderError
from gpu_runner.providers.cloud.tunnels import TunnelTarget
from gpu_runner.providers.ec2.api import Clients
from gpu_runner.providers.ec2.config import Ec2ProviderConfig
from gpu_runner.providers.ec2.launch import NAME_TAG
from gpu_runner.providers.ec2.provider import Ec2Provider
from gpu_runner.reachability import Reachability
from support.guarded_engine import GuardedEngine
from support.timing import PATIENCE

HOME_REGION, OTHER_REGION = "eu-central-1", "us-east-1"
ZONES = {"eu-central-1": ("eu-central-1a", "eu-central-1b"), "us-east-1": ("us-east-1a", "us-east-1b")}
PARTS = ("listed", "now", "clients", "words")  # of a provider, beside its configuration
SPOT_FIELDS = {"type": "one-time", "state": "active"}


class Throttled(EC2ClientError):
    """EC2's answer that leaves open whether an order was taken. moto answers every error with status 400."""

    code, message = "RequestLimitExceeded", "Request limit exceeded."


class Engine(Protocol):
    """What runs on a VM."""

    url: str

    def close(self) -> None: ...


@dataclass(frozen=True)
class Orders:
    """What a VM's user data has it do: the whole document, the engine's words and its environment."""

    document: dict[str, Any]
    words: list[str]
    variables: dict[str, str]

    @classmethod
    def read(cls, user_data: str) -> Orders:
        head, text = user_data.split("\n", 1)
        assert head == "#cloud-config"
        document = json.loads(text)
        files = {one["path"]: one["content"] for one in document["write_files"]}
        variables = dict(line.split("=", 1) for line in files["/etc/batch-assets/engine.env"].splitlines())
        words = files["/etc/systemd/system/batch-assets-engine.service"].split('"')[1::2]
        return cls(document, words[words.index("--model") :], variables)


@dataclass
class Vm:
    """A VM as its user data made it. Unix seconds. `address`: where its sshd listens, if it has one."""

    document: dict[str, Any]
    engine: Engine
    boots: bool = True
    address: str | None = None
    booted_at: float = field(default_factory=time.time)
    ended_at: float | None = None

    @classmethod
    def boot(cls, user_data: str) -> Vm:
        """A VM with a small engine, without sshd."""
        orders = Orders.read(user_data)
        return cls(orders.document, GuardedEngine(orders.variables["VLLM_API_KEY"], orders.words[1]))

    def power_off(self) -> None:
        """Nothing of it runs any more."""
        if self.ended_at is None:
            self.ended_at = time.time()
            self.engine.close()

    def lets_in(self, target: TunnelTarget) -> bool:
        """Whether sshd would: our host key is the pinned one, and the client's key is the user's."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

        public = load_ssh_private_key(target.client_key.encode(), None).public_key()
        line = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        (user,) = self.document["users"]
        return (
            target.host_key == self.document["ssh_keys"]["ed25519_public"]
            and target.user == user["name"]
            and user["ssh_authorized_keys"][0].endswith(line)
            and f'permitopen="127.0.0.1:{target.engine_port}"' in user["ssh_authorized_keys"][0]
        )


@dataclass
class FakeEc2:
    """The cloud. `full`: subnets without capacity. `statuses`: of spot requests, by id.

    `most`: VMs at once, for which it has room. `spot_usd`: an hour of any spot VM. `boot`: makes a VM of its user data.
    `faults`: what goes wrong with the next call of a kind: `create: lost` (taken, no answer), `create: unavailable`,
    `list: unavailable`.
    `met`: faults that a call has met.
    """

    url: str
    home: Path
    subnets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)
    most: int | None = None
    spot_usd: float = 0.00001
    boot: Callable[[str], Vm] = Vm.boot
    faults: list[str] = field(default_factory=list)
    met: list[str] = field(default_factory=list)
    orders: dict[tuple[str, str], Any] = field(default_factory=dict)
    statuses: dict[str, tuple[str, float]] = field(default_factory=dict)
    vms: dict[str, Vm] = field(default_factory=dict)
    asked: list[str | None] = field(default_factory=list)
    guard: threading.RLock = field(default_factory=threading.RLock)
    clients: Clients = field(default_factory=lambda: Clients(None, PATIENCE * 12))
    opened: int = 0
    closed: int = 0

    def provider(self, **settings: Any) -> Ec2Provider:
        """The provider, opened anew."""
        parts = {"clients": self.clients, **{name: settings.pop(name) for name in PARTS if name in settings}}
        return Ec2Provider(self.home, self.config(**settings), tunnel=self.tunnel, **parts)

    def config(self, **settings: Any) -> Ec2ProviderConfig:
        regions = settings.get("in_regions", (HOME_REGION,))
        given = {
            "regions": [
                {
                    "region": region,
                    "image": self.images[region],
                    "subnets": self.subnets[region],
                    "security_groups": [self.groups[region]],
                }
                for region in regions
            ],
            "instance_types": [{"instance_type": "g6e.xlarge", "price_per_hour": 3.6}],
            "engine_image": "vllm/vllm-openai@sha256:" + "0" * 64,
            **{name: value for name, value in settings.items() if name != "in_regions"},
        }
        return Ec2ProviderConfig.model_validate(given)

    def tunnel(self, target: TunnelTarget) -> Any:
        """A way to the VM at the address, if it has the keys. Raises ProviderError."""
        found = [
            self.vms[one.id]
            for one in self.instances()
            if target.host in (one.private_ip, one.public_ip) and one.id in self.vms and self._runs(one)
        ]
        if not found or not found[0].lets_in(target):
            raise ProviderError("the host does not answer, or has another key")
        self.opened += 1
        url = found[0].engine.url if found[0].boots else "http://127.0.0.1:1"
        return SimpleNamespace(endpoint=url, close=self._close, reachability=Reachability.OPEN)

    def _close(self) -> None:
        self.closed += 1

    # what moto knows

    def backend(self, region: str) -> Any:
        return ec2_backends[DEFAULT_ACCOUNT_ID][region]

    def instances(self, region: str | None = None) -> list[Instance]:
        """All instances, in the order of their start."""
        found = []
        for one in [region] if region else ZONES:
            for reservation in self.backend(one).reservations.values():
                found += reservation.instances
        return found

    def named(self, name: str) -> list[Instance]:
        """All instances of a name."""
        return [one for one in self.instances() if self.tags(one)[NAME_TAG] == name]

    @staticmethod
    def tags(one: Instance) -> dict[str, str]:
        return {tag["key"]: tag["value"] for tag in one.get_tags()}

    def running(self) -> list[Instance]:
        return [one for one in self.instances() if self._runs(one)]

    @staticmethod
    def _runs(one: Instance) -> bool:
        return one._state.name in ("pending", "running")

    def interrupt(self, name: str, since: float) -> None:
        """EC2 gives notice to a spot VM."""
        (one,) = self.named(name)
        self.statuses[one.spot_instance_request_id] = ("marked-for-termination", since)

    def take(self, name: str, code: str = "Server.SpotInstanceTermination") -> None:
        """EC2 takes a VM away, or it powers itself off."""
        (one,) = self.named(name)
        one.terminate()
        one.state_reason.code = code

    def take_if_running(self, name: str) -> None:
        """EC2 takes a VM away of which it had given notice, unless it has ended before."""
        if any(self._runs(one) for one in self.named(name)):
            self.take(name)

    def close(self) -> None:
        for vm in self.vms.values():
            vm.power_off()

    def fault(self, kind: str) -> bool:
        """Whether this kind of fault was due; it is met once."""
        with self.guard:
            if kind not in self.faults:
                return False
            self.faults.remove(kind)
            self.met.append(kind)
            return True

    def powered_off(self, one: Instance) -> None:
        """A VM was terminated."""
        if (vm := self.vms.get(one.id)) is not None:
            vm.power_off()

    # what moto lacks

    def run_instances(
        self, original: Any, backend: Any, image: str, count: int, data: Any, *words: Any, **more: Any
    ) -> Any:
        token, region = more["client_token"], backend.region_name
        subnet = (more.get("nics") or [{}])[0].get("SubnetId")
        shown = json.dumps([image, data, more.get("instance_type"), more.get("tags")], default=str)
        with self.guard:
            self.asked.append(subnet)
            if (known := self.orders.get((f"{region}{subnet}", token))) is not None:
                if known[1] != shown:
                    raise EC2ClientError("IdempotentParameterMismatch", "other parameters than before")
                return known[0]
            if self.fault("create: unavailable"):
                raise Throttled
            if subnet in self.full or (self.most is not None and len(self.running()) >= self.most):
                raise EC2ClientError("InsufficientInstanceCapacity", "We currently do not have sufficient capacity.")
            made = original(backend, image, count, data, *words, **more)
            self.orders[f"{region}{subnet}", token] = made, shown
            (one,) = made.instances
            if one.lifecycle == "spot":
                one.spot_instance_request_id = f"sir-{one.id[2:10]}"
                self.statuses[one.spot_instance_request_id] = ("fulfilled", time.time())
            vm = self.vms[one.id] = self.boot(data.decode())
            if vm.address is not None:
                one.nics[0].private_ip_address = vm.address
            if self.fault("create: lost"):
                raise Throttled
            return made

    def spot_requests(self, backend: Any, filters: Any = None, spot_instance_ids: Any = None) -> list[Any]:
        return [
            SimpleNamespace(
                spot_instance_request_id=request,
                status=SimpleNamespace(code=code, update_time=dt.datetime.fromtimestamp(since, dt.UTC), message=""),
                **SPOT_FIELDS,
            )
            for request, (code, since) in self.statuses.items()
            if request in (spot_instance_ids or [])
        ]


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """moto's server in this process, for a module of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        patch.setattr(logging.getLogger("werkzeug"), "level", logging.ERROR)
        try:
            host, port = server.get_host_and_port()
            yield f"http://{host}:{port}"
        finally:
            server.stop()


@contextlib.contextmanager
def fake_ec2(url: str, home: Path) -> Iterator[FakeEc2]:
    """An empty account with two zones in each of two regions."""
    import moto.backends

    site = FakeEc2(url, home)
    original = InstanceBackend.run_instances
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_CONFIG_FILE": str(home / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(home / "none"),
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        patch.setattr(
            InstanceBackend, "run_instances", lambda *words, **more: site.run_instances(original, *words, **more)
        )
        terminate, describe = Instance.terminate, InstanceBackend.describe_instances

        def end(one: Instance, *words: Any, **more: Any) -> Any:
            site.powered_off(one)
            return terminate(one, *words, **more)

        def listed(*words: Any, **more: Any) -> Any:
            if site.fault("list: unavailable"):
                raise Throttled
            return describe(*words, **more)

        def spot_prices(*words: Any) -> ActionResult:
            found = prices(*words)
            for one in found.result["SpotPriceHistory"]:
                one["SpotPrice"] = f"{site.spot_usd:.5f}"
            return found

        prices = SpotInstances.describe_spot_price_history
        patch.setattr(SpotInstances, "describe_spot_price_history", spot_prices)
        patch.setattr(Instance, "terminate", end)
        patch.setattr(InstanceBackend, "describe_instances", listed)
        patch.setattr(
            SpotRequestBackend,
            "describe_spot_instance_requests",
            lambda *words, **more: site.spot_requests(*words, **more),
        )
        for service in ("ec2", "sts", "servicequotas"):
            for account in list(moto.backends.get_backend(service).values()):
                for backend in account.values():
                    backend.reset()
        _furnish(site)
        try:
            yield site
        finally:
            site.close()


def _furnish(site: FakeEc2) -> None:
    for region, zones in ZONES.items():
        backend = site.backend(region)
        by_zone = {one.availability_zone: one.id for one in backend.describe_subnets()}
        site.subnets[region] = tuple(by_zone[zone] for zone in zones)
        group = next(one for one in backend.describe_security_groups() if one.name == "default")
        site.groups[region] = group.id
        image = backend.register_image("ami with a driver", "test")
        image.root_device_name = "/dev/sda1"
        site.images[region] = image.id
