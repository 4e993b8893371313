"""Makes an SSH connection to a host: only pinned host keys are accepted, no agent and no file of ~/.ssh is asked.

The host is asked for a TCP connection first, so that one that is silent is told from one that lets nobody in.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import asyncssh

from gpu_runner.providers.base import ProviderError
from gpu_runner.providers.ssh.config import SshHostConfig, SshProviderConfig
from gpu_runner.providers.ssh.host_silence import PROBE_GAP_SECONDS, PROBE_SECONDS, SILENT_PROBES, HostSilence

CONNECT_SECONDS = 6.0
KEEPALIVE_SECONDS = 2.0
KEEPALIVES = 3

Pause = Callable[[float], Awaitable[object]]


class ConnectProblem(Enum):
    """Why there is no connection."""

    SILENT = "silent"  # its kernel does not answer
    UNREACHABLE = "unreachable"  # it answers, and there is no connection all the same
    HOST_KEY = "host key"
    LOGIN = "login"
    KEY = "key"


class NotConnected(ProviderError):
    """There is no connection to the host; nothing was sent."""

    def __init__(self, problem: ConnectProblem, text: str) -> None:
        super().__init__(text)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class HostAddress:
    """Where a host is, and how it and we are known."""

    name: str
    address: str
    port: int
    user: str
    host_keys: tuple[str, ...]
    known_hosts: Path | None
    key_file: Path | None
    key_env: str | None
    private_key: str | None = field(default=None, repr=False)  # the key itself; then no other place is looked at

    @classmethod
    def of(cls, config: SshProviderConfig, host: SshHostConfig) -> HostAddress:
        """As fleet.yaml says."""
        return cls(
            host.name,
            host.address,
            host.port,
            host.user or config.user,
            host.host_keys,
            config.known_hosts,
            config.key_file,
            config.key_env,
        )

    @property
    def text(self) -> str:
        """What a person calls it."""
        return f"host {self.name} ({self.user}@{self.address}:{self.port})"


async def connect(address: HostAddress, silence: HostSilence) -> asyncssh.SSHClientConnection:
    """A connection that keeps itself alive. `silence` hears whether the host answered. Raises NotConnected."""
    key, known_hosts = _private_key(address), _known_hosts(address)
    reached = await _reach(address, silence)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            return await _with(reached, address, key, known_hosts)
    except asyncssh.HostKeyNotVerifiable:
        said = f"{address.text}: expected one of the pinned host keys, found another; nothing was sent to it"
        raise NotConnected(ConnectProblem.HOST_KEY, said) from None
    except asyncssh.PermissionDenied:
        said = f"{address.text}: expected that the key may log in, and it may not"
        raise NotConnected(ConnectProblem.LOGIN, said) from None
    except (OSError, asyncssh.Error) as error:  # TimeoutError among them
        said = f"{address.text} does not answer: {type(error).__name__}"
        raise NotConnected(ConnectProblem.UNREACHABLE, said) from error


async def _reach(address: HostAddress, silence: HostSilence, pause: Pause = asyncio.sleep) -> socket.socket:
    """A TCP connection to its SSH server, asked for SILENT_PROBES times. Raises NotConnected.

    Probes begin PROBE_GAP_SECONDS after each other at the earliest; `pause` waits so long.
    """
    loop = asyncio.get_running_loop()
    problem: OSError = TimeoutError()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            found = await loop.getaddrinfo(address.address, address.port, type=socket.SOCK_STREAM)
    except OSError as error:  # TimeoutError among them
        said = f"{address.text}: its name leads nowhere: {type(error).__name__}"
        raise NotConnected(ConnectProblem.UNREACHABLE, said) from error
    began = loop.time()
    for probe in range(SILENT_PROBES):
        if probe and (early := began + PROBE_GAP_SECONDS - loop.time()) > 0:
            await pause(early)
        began = loop.time()
        try:
            reached = await _first_of(found)
        except ConnectionRefusedError:
            silence.probed(answered=True)
            said = f"{address.text}: it is there, and its SSH server does not listen"
            raise NotConnected(ConnectProblem.UNREACHABLE, said) from None
        except OSError as error:  # TimeoutError among them
            silence.probed(answered=False)
            problem = error
        else:
            silence.probed(answered=True)
            return reached
    said = f"{address.text} does not answer: {type(problem).__name__}"
    raise NotConnected(ConnectProblem.SILENT, said) from problem


async def _first_of(found: Sequence[Any]) -> socket.socket:
    """A connection to the first of these addresses (as getaddrinfo has them) that takes one. Raises OSError."""
    problem: OSError = ConnectionRefusedError()
    for family, kind, protocol, _, where in found:
        reached = socket.socket(family, kind, protocol)
        reached.setblocking(False)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await asyncio.get_running_loop().sock_connect(reached, where)
            return reached
        except OSError as error:  # TimeoutError among them
            reached.close()
            problem = error
        except BaseException:
            reached.close()
            raise
    raise problem


async def _with(reached: socket.socket, address: HostAddress, key: Any, known: Any) -> asyncssh.SSHClientConnection:
    """SSH over a connection to the host. Raises OSError, asyncssh.Error."""
    try:
        return await asyncssh.connect(
            address.address,
            address.port,
            sock=reached,
            username=address.user,
            client_keys=[key],
            known_hosts=known,
            agent_path=None,
            config=None,
            preferred_auth="publickey",
            client_version="batch-assets",
            keepalive_interval=KEEPALIVE_SECONDS,
            keepalive_count_max=KEEPALIVES,
        )
    except BaseException:
        reached.close()
        raise


def _private_key(address: HostAddress) -> asyncssh.SSHKey:
    try:
        if address.private_key is not None:
            return asyncssh.import_private_key(address.private_key)
        if address.key_env is not None:
            if not (text := os.environ.get(address.key_env)):
                said = f"{address.key_env}: expected the private key for {address.text} in this environment variable"
                raise NotConnected(ConnectProblem.KEY, said)
            return asyncssh.import_private_key(text)
        assert address.key_file is not None
        return asyncssh.read_private_key(address.key_file)
    except (OSError, asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        where = address.key_env or address.key_file or "private key"
        said = f"{where}: expected a private key without a passphrase for {address.text}, found {type(error).__name__}"
        raise NotConnected(ConnectProblem.KEY, said) from None


def _known_hosts(address: HostAddress) -> Any:
    """What asyncssh takes: a file's content, or the trusted keys."""
    try:
        if not address.host_keys:
            return asyncssh.read_known_hosts(str(address.known_hosts))
        return [asyncssh.import_public_key(key) for key in address.host_keys], [], []
    except (OSError, ValueError, asyncssh.KeyImportError) as error:
        where = "host_keys" if address.host_keys else address.known_hosts
        said = f"{where}: expected public host keys for {address.text}, found {type(error).__name__}"
        raise NotConnected(ConnectProblem.HOST_KEY, said) from None
