"""What processes that are forked from a code server have in common: their sockets, files and orders.

Imports nothing but the standard library, as first_daemon does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def bound_socket(address: Path) -> socket.socket:
    """A socket that listens at `address`, for our user alone; what is there goes."""
    listener = socket.socket(socket.AF_UNIX)
    address.unlink(missing_ok=True)
    umask = os.umask(0o177)
    try:
        listener.bind(str(address))
    finally:
        os.umask(umask)
    listener.listen()
    return listener


def keep_only(descriptor: int) -> None:
    """Close all files but this one and the standard ones, as subprocess does: what shows that the code server lives is
    not for others.
    """
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))


def order_for(program: str, options: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """What a forked process is told to be; `program`: its `sys.argv[0]`."""
    return json.dumps({"arguments": [program, *options], "environment": dict(environment)}).encode()


def take_order(told: bytes) -> None:
    """Be what `order_for` says, in arguments and environment."""
    order = json.loads(told)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = list(order["arguments"])
