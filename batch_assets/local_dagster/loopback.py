"""Loopback never goes through a proxy, whatever `http_proxy` says.

Dagster's processes talk to each other and to local engines over 127.0.0.1. Each of their clients reads the environment
in its own way (urllib, requests, aiohttp, gRPC, reqwest in obstore and Polars), but all of them honour `no_proxy`.
"""

from __future__ import annotations

from collections.abc import MutableMapping

LOOPBACK = ("localhost", "127.0.0.1", "::1")
# gRPC reads lower case only, and `no_grpc_proxy` in place of `no_proxy` when it is set, also when it is empty; others
# prefer lower case.
NAMES = ("no_proxy", "NO_PROXY")


def keep_loopback_direct(environment: MutableMapping[str, str]) -> None:
    """Add loopback to `no_proxy`, in both spellings; what is there stays."""
    found = ",".join(environment[name] for name in NAMES if environment.get(name))
    merged = _with_loopback(found)
    for name in NAMES:
        environment[name] = merged
    if "no_grpc_proxy" in environment:
        environment["no_grpc_proxy"] = _with_loopback(environment["no_grpc_proxy"])


def _with_loopback(found: str) -> str:
    hosts = [host.strip() for host in found.split(",") if host.strip()]
    return "*" if "*" in hosts else ",".join(dict.fromkeys([*hosts, *LOOPBACK]))
