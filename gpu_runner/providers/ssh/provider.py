"""The provider `ssh`: see `gpu_runner.providers.base.Provider`, and the package for its parts.

A host's own folder is the record of its machines: there is nothing to lose here. A name belongs to the host of the
offer that it was created from. Calls ask all hosts at once; a host that does not answer offers nothing and its machines
are not listed. Machines that hear of no sweep for `orphan_seconds` end themselves, so those of a host that was silent
for longer count as ended.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from pathlib import Path
from typing import Any, TypeVar

from gpu_runner.offers.offer import Hardware, Offer, hardware_of
from gpu_runner.providers.base import EngineAccess, EngineOrder, Machine, NoCapacity, ProviderError, ProviderUnclear
from gpu_runner.providers.checks import CheckResult
from gpu_runner.providers.engine_keys import engine_key, engine_secret
from gpu_runner.providers.engine_process import EngineStartError
from gpu_runner.providers.ssh import host_requests
from gpu_runner.providers.ssh.config import SshHostConfig, SshProviderConfig
from gpu_runner.providers.ssh.connections import HostConnection, connections
from gpu_runner.providers.ssh.host_requests import HostMachine, HostReply, HostRequest, Result
from gpu_runner.providers.ssh.inspection import inspect_host
from gpu_runner.providers.ssh.login import HostAddress
from gpu_runner.providers.ssh.tunnel import Tunnel

STEP_SECONDS = 0.1
LOST_SECONDS = 15.0  # a host that is silent for so long while it boots an engine is given up
ORPHAN_MARGIN_SECONDS = 30.0  # a supervisor looks twice a second and ends its engine within its grace

_KEEP_ALIVE = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120"}
_ENDPOINT = re.compile(r"ssh://([a-z0-9][a-z0-9._-]{0,62})/(\d{4,5})")

T = TypeVar("T")
Failure = ProviderError | ProviderUnclear
Results = list[CheckResult]


class SshProvider:
    """Hosts of one inventory. `home` holds the secret of the engines' keys."""

    clock = 1.0

    def __init__(self, home: Path, config: SshProviderConfig) -> None:
        self.name = config.name
        self.config = config
        self._home = Path(home)
        self._hosts = {host.name: host for host in config.hosts}

    # the five calls

    def offers(self) -> list[Offer]:
        """One offer per host that answers, with the sets of GPUs that are free now."""
        replies = self._ask_all(host_requests.list_request(self.config.folder, "", sign_of_life=False))
        found = []
        for name, reply in self._answered(replies).items():
            host = self._hosts[name]
            free = sum(not reply.taken.intersection(one) for one in host.gpu_sets)
            found.append(self._offer(host, free))
        return found

    def _offer(self, host: SshHostConfig, capacity: int | None = None) -> Offer:
        return Offer(
            provider=self.name,
            region=host.name,
            instance_type=f"{host.gpus_per_instance}x{host.gpu}",
            gpu=host.gpu,
            gpus=host.gpus_per_instance,
            gpu_memory_gib=host.gpu_memory_gib,
            spot=False,
            price_per_hour=host.price_per_hour,
            boot_seconds=host.boot_seconds,
            reliability=1.0,
            observed_at=time.time(),
            source="fleet.yaml",
            capacity=capacity,
        )

    def create(self, offer: Offer, name: str, order: EngineOrder) -> str:
        """Start an engine on the offer's host. `max_num_seqs` and further arguments are added to the command."""
        host = self._hosts.get(offer.region)
        own = None if host is None else self._offer(host)
        if (
            host is None
            or own is None
            or (offer.instance_type, offer.price_per_hour)
            != (
                own.instance_type,
                own.price_per_hour,
            )
        ):
            raise ProviderError(f"{offer.name}: there is no such offer at {offer.price_per_hour:.4g} $/h")
        _check_name(name)
        reply = self._ask(host, host_requests.create_request(self.config.folder, self._plan(host, name, order)))
        if reply.result is Result.NO_CAPACITY:
            raise NoCapacity(f"{own.name}: all {len(host.gpu_sets)} are taken")
        return _only(_checked(host.name, reply), name, host.name).id

    def _plan(self, host: SshHostConfig, name: str, order: EngineOrder) -> host_requests.EnginePlan:
        config = self.config
        key = {"VLLM_API_KEY": self._key(name)}
        command, end_command = config.commands(order.server)
        if not command:
            raise ProviderError(f"{self.name}: expected sglang_image or sglang_command for SGLang, found neither")
        return host_requests.EnginePlan(
            name=name,
            model=order.model,
            command=(*command, *order.words),
            end_command=end_command,
            environment={**_KEEP_ALIVE, **config.environment, **key},
            gpu_sets=host.gpu_sets,
            slots=order.max_num_seqs,
            orphan_seconds=config.orphan_seconds,
            first_port=config.first_port,
        )

    def _key(self, name: str) -> str:
        return engine_key(engine_secret(self._home), name)

    def wait_ready(self, name: str, seconds: float, pause: Callable[[float], None]) -> Machine:
        """Wait for the engine; a host that is silent for LOST_SECONDS has ended it."""
        deadline = time.monotonic() + seconds
        host = self._patiently(self._find(name), pause)
        if host is None:
            raise EngineStartError(f"{self.name} has no machine {name}")
        log = f"{host}:{self.config.folder}/*/machines/{name}/{name}.log"
        silent_since: float | None = None
        while True:
            try:
                machine = self._patiently(self._look(host, name), pause)
                silent_since = None
            except (ProviderError, ProviderUnclear) as error:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > LOST_SECONDS:
                    raise EngineStartError(f"{name} at {self.name} is lost: {error}") from error
            else:
                if machine is None:
                    raise EngineStartError(f"{self.name} has no machine {name}")
                if machine.state == "ended":
                    raise EngineStartError(
                        f"{name} at {self.name} has ended: {machine.machine(host).describe_end()}; its log: {log}"
                    )
                if machine.state == "running":
                    return machine.machine(host)
            if time.monotonic() >= deadline:
                raise EngineStartError(f"{name} at {self.name} was not ready after {seconds:.0f} s; its log: {log}")
            for _ in range(3):
                pause(STEP_SECONDS)

    async def _look(self, host: str, name: str) -> HostMachine | None:
        """The machine as it is now; its engine is asked, and that it has answered is written down."""
        connection = self._connection(host)
        reply = _checked(host, await connection.ask(host_requests.show_request(self.config.folder, name, ready=False)))
        machine = _named(reply, name)
        if machine is None or machine.state != "booting" or not await connection.engine_answers(machine.port):
            return machine
        reply = _checked(host, await connection.ask(host_requests.show_request(self.config.folder, name, ready=True)))
        return _named(reply, name)

    async def _find(self, name: str) -> str | None:
        """The host that has the machine. Raises what a host said that did not answer, when no other has it."""
        request = host_requests.list_request(self.config.folder, name, sign_of_life=False)
        replies = await self._gather(request)
        for host, reply in replies.items():
            if not isinstance(reply, Exception) and _named(reply, name) is not None:
                return host
        if failures := [reply for reply in replies.values() if isinstance(reply, Exception)]:
            raise failures[0]
        return None

    def list(self, tag: str) -> list[Machine]:
        """Machines by tag on hosts that answer, ended ones for a day, or until their end is finished.

        For them it is the sign of life.

        Raises when no host answers.
        """
        replies = self._ask_all(host_requests.list_request(self.config.folder, tag, sign_of_life=True))
        found = [(host, one) for host, reply in self._answered(replies).items() for one in reply.machines]
        return [
            one.machine(host)
            for host, one in found
            if one.name.startswith(tag) and (one.failed_ends or (one.ended_seconds or 0) < host_requests.KEEP_SECONDS)
        ]

    def terminate(self, name: str) -> None:
        """End the machine of this name, wherever it is."""
        if not host_requests.NAME.fullmatch(name):
            return
        replies = self._ask_all(host_requests.terminate_request(self.config.folder, name))
        if any(not isinstance(reply, Exception) and _named(reply, name) for reply in replies.values()):
            return
        enough = self.config.orphan_seconds + ORPHAN_MARGIN_SECONDS
        for host, reply in replies.items():
            if isinstance(reply, Exception) and self._connection(host).silent_seconds < enough:
                raise reply

    # beyond the five calls

    def access(self, name: str, endpoint: str) -> EngineAccess:
        """A tunnel to the engine, and its key."""
        found = _ENDPOINT.fullmatch(endpoint)
        if found is None or found[1] not in self._hosts:
            raise ProviderError(f"{self.name}: expected an address at one of its hosts, found {endpoint!r:.80}")
        key = self._key(name)
        thread = connections().thread
        host, port = self._connection(found[1]), int(found[2])

        async def opened() -> Tunnel:
            tunnel = Tunnel(host, port)
            await tunnel.open()
            return tunnel

        tunnel = thread.run(opened())
        return EngineAccess(tunnel.endpoint, key, lambda: thread.run(tunnel.close()), lambda: tunnel.reachability)

    def all_hardware(self) -> frozenset[Hardware]:
        """See `gpu_runner.providers.base.HardwareProvider`."""
        return frozenset(hardware_of(one.gpu, one.gpus_per_instance, one.gpu_memory_gib) for one in self.config.hosts)

    def check(self) -> Results:
        """Look at every host: connection, host key, tools, engine command, GPUs, disk, clock."""
        return connections().thread.run(self._check())

    async def _check(self) -> Results:
        hosts = self._hosts.values()
        looked = await asyncio.gather(*(inspect_host(self._connection(one.name), self.config, one) for one in hosts))
        return [result for results in looked for result in results]

    # asking hosts

    def _connection(self, host: str) -> HostConnection:
        return connections().host(HostAddress.of(self.config, self._hosts[host]))

    def _ask(self, host: SshHostConfig, request: HostRequest) -> HostReply:
        return connections().thread.run(self._connection(host.name).ask(request))

    def _ask_all(self, request: HostRequest) -> dict[str, HostReply | Failure]:
        return connections().thread.run(self._gather(request))

    async def _gather(self, request: HostRequest) -> dict[str, HostReply | Failure]:
        """What each host answers, or why it does not."""

        async def one(host: str) -> HostReply | Failure:
            try:
                return _checked(host, await self._connection(host).ask(request))
            except (ProviderError, ProviderUnclear) as error:
                return error

        names = list(self._hosts)
        return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))

    @staticmethod
    def _answered(replies: dict[str, HostReply | Failure]) -> dict[str, HostReply]:
        """The answers. Raises when there is none."""
        found = {host: reply for host, reply in replies.items() if not isinstance(reply, Exception)}
        failures = [reply for reply in replies.values() if isinstance(reply, Exception)]
        if not found:
            raise failures[0]
        return found

    @staticmethod
    def _patiently(asked: Coroutine[Any, Any, T], pause: Callable[[float], None]) -> T:
        """The result; `pause` is called while it is awaited, and may raise."""
        future: Future[T] = connections().thread.submit(asked)
        try:
            while True:
                try:
                    return future.result(STEP_SECONDS)
                except NotDone:
                    if future.done():
                        raise
                pause(STEP_SECONDS)
        except BaseException:
            future.cancel()
            raise


def _check_name(name: str) -> None:
    if not host_requests.NAME.fullmatch(name):
        raise ProviderError(f"machine name: expected {host_requests.NAME.pattern}, found {name!r:.80}")


def _checked(host: str, reply: HostReply) -> HostReply:
    """The reply of a request that was done. Raises ProviderError."""
    if reply.result is not Result.OK:
        raise ProviderError(f"host {host}: {host_requests.RESULT_TEXTS[reply.result]}")
    return reply


def _named(reply: HostReply, name: str) -> HostMachine | None:
    return next((one for one in reply.machines if one.name == name), None)


def _only(reply: HostReply, name: str, host: str) -> HostMachine:
    if (machine := _named(reply, name)) is None:
        raise ProviderUnclear(f"host {host}: its answer does not say what became of {name}")
    return machine
