"""Connections to an engine: their sockets, how many there may be, and what a failure below HTTP means."""

from __future__ import annotations

import resource
import socket
from typing import Any

import aiohttp

from gpu_runner.bounded_http import addresses
from gpu_runner.client.protocol import EngineError, EngineRefused, Transient

# Well below the 5 s after which uvicorn closes an idle connection: we close first also where either side is busy.
KEEP_ALIVE_SECONDS = 2.0


def watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose kernel asks after 10 s of silence whether the peer is there, and gives up after 25 s.

    A request waits for minutes without a byte; middleboxes drop such connections without telling anybody.
    """
    family, kind, protocol, _, resolved = address
    addresses.refuse(str(resolved[0]))  # here, where it is connected to: a name may lead elsewhere each time
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


def allow_open_files(wanted: int = 65_536) -> int:
    """Raises this process's soft limit of open files as far as allowed (one connection per row in flight).

    Returns the limit in force.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return wanted if soft == resource.RLIM_INFINITY else soft


def never_connected(error: BaseException) -> bool:
    """Whether the failure came before there was a connection: the request was never taken."""
    return isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def failure_below_http(error: BaseException) -> EngineError:
    """The error of ours for a failure below HTTP. Its text names the kind only: addresses may be secret."""
    if refused := addresses.refused(error):
        return EngineRefused(str(refused))
    if isinstance(error, aiohttp.ClientSSLError):
        return EngineRefused("expected a valid TLS certificate, found one that fails verification: check the address")
    if never_connected(error):
        return Transient("connect_failed", type(error).__name__, taken=False)
    if isinstance(error, TimeoutError):
        return Transient("timeout", "no answer within the time-out")
    if isinstance(error, aiohttp.InvalidURL):
        return EngineRefused("expected a valid engine endpoint: check the address")
    return Transient("connection_lost", type(error).__name__)
