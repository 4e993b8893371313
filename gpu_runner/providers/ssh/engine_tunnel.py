"""A tunnel to one engine of a rented host, with keys of its own: `gpu_runner.providers.cloud.tunnels.OpenTunnel`.

Its connection ends with it: a rented VM takes connections for signs of life of its fleet.
"""

from __future__ import annotations

from gpu_runner.providers.cloud.tunnels import TunnelTarget
from gpu_runner.providers.ssh.connections import HostConnection, LoopThread, connections
from gpu_runner.providers.ssh.login import HostAddress
from gpu_runner.providers.ssh.tunnel import Tunnel
from gpu_runner.reachability import Reachability


class EngineTunnel:
    """See `gpu_runner.providers.cloud.tunnels.Tunnel`."""

    def __init__(self, thread: LoopThread, host: HostConnection, tunnel: Tunnel) -> None:
        self._thread, self._host, self._tunnel = thread, host, tunnel
        self.endpoint = tunnel.endpoint

    @property
    def reachability(self) -> Reachability:
        """What is known of the way to the host."""
        return self._tunnel.reachability

    def close(self) -> None:
        """End the tunnel and its connection."""

        async def closed() -> None:
            await self._tunnel.close()
            await self._host.close()

        self._thread.run(closed())


def address_of(target: TunnelTarget) -> HostAddress:
    """Where its host is, with keys of its own."""
    return HostAddress(
        name=target.host,
        address=target.host,
        port=target.port,
        user=target.user,
        host_keys=(target.host_key,),
        known_hosts=None,
        key_file=None,
        key_env=None,
        private_key=target.client_key,
    )


def open_engine_tunnel(target: TunnelTarget) -> EngineTunnel:
    """Connect and open the tunnel, within some seconds. Raises NotConnected, a ProviderError."""
    address = address_of(target)
    thread = connections().thread

    async def opened() -> EngineTunnel:
        host = HostConnection(address)
        tunnel = Tunnel(host, target.engine_port)
        try:
            await tunnel.open()
        except BaseException:
            await host.close()
            raise
        return EngineTunnel(thread, host, tunnel)

    return thread.run(opened())
