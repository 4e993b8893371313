"""What a provider needs of an SSH tunnel to an engine that listens on its machine's loopback only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gpu_runner.reachability import Reachability


@dataclass(frozen=True, slots=True)
class TunnelTarget:
    """An engine behind sshd. `host_key`: the one public key that the host may have, as in `authorized_keys`.

    `client_key`: our private key for it, as in a key file of OpenSSH. `engine_port`: on the host's 127.0.0.1.
    """

    host: str
    port: int
    user: str
    host_key: str
    client_key: str = field(repr=False)
    engine_port: int


class Tunnel(Protocol):
    """A way to one engine. It connects by itself, and again when its connection is lost, behind the same address."""

    @property
    def endpoint(self) -> str:
        """The engine's base URL on this computer: `http://127.0.0.1:port`."""
        ...

    @property
    def reachability(self) -> Reachability:
        """Whether it stands, is opened anew, or leads nowhere. Any thread may ask."""
        ...

    def close(self) -> None:
        """End it. More than once does no harm, and any thread may call it."""
        ...


# Opens a tunnel, within some seconds. Raises gpu_runner.providers.base.ProviderError when the host does not answer, has
# another key than the pinned one, or does not let ours in.
OpenTunnel = Callable[[TunnelTarget], Tunnel]


# What the one command that a host lets us run printed last, asked for in the background: it never waits. "": nothing
# yet, or nothing at all. The first argument is the machine's id.
HostWords = Callable[[str, TunnelTarget], str]


def no_words(machine_id: str, target: TunnelTarget) -> str:
    """Hosts are not asked."""
    return ""
