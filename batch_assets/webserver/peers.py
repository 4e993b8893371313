"""Which user of this machine is at the other end of a loopback connection, as the kernel says it.

A browser, a tunnel of ssh and our own commands connect as the user who started Dagster. Other users of the machine can
reach the port as well, so without this they would get the UI's cookie by asking for a page.
"""

from __future__ import annotations

import ipaddress
import os
import struct
from pathlib import Path

from batch_assets import file_permissions

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ROOT = 0


def own_connection(client: tuple[str, int] | None, server: tuple[str, int] | None) -> bool:
    """Whether the connection was made by our user, a member of BATCH_ASSETS_GROUP, or root.

    True where the system does not tell (not Linux).
    """
    if not TABLES[0].exists():
        return True
    if client is None or server is None:
        return False
    uid = peer_uid(client, server)
    return uid is not None and (uid in (ROOT, os.geteuid()) or file_permissions.in_group(uid))


def peer_uid(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """User id of the process that holds the client's end; None when its socket is closed or not on this machine.

    The columns are those of proc_net_tcp.rst: 1 local address, 2 remote address, 7 uid, 9 inode. A socket that its
    process has closed has inode 0 and the uid of root, so such a row says nothing.
    """
    for table, spell in zip(TABLES, (_ipv4, _mapped), strict=True):
        try:
            lines = table.read_text().splitlines()[1:]
            ends = (spell(*client), spell(*server))
        except (OSError, ValueError):
            continue
        for line in lines:
            columns = line.split()
            if (columns[1], columns[2]) == ends:
                return int(columns[7]) if columns[9] != "0" else None
    return None


def _ipv4(host: str, port: int) -> str:
    """An address as the kernel prints it: each 32-bit word in the byte order of this machine."""
    (word,) = struct.unpack("=I", ipaddress.IPv4Address(host).packed)
    return f"{word:08X}:{port:04X}"


def _mapped(host: str, port: int) -> str:
    """The same in the table of IPv6 sockets, where an IPv4 address stands as ::ffff:a.b.c.d."""
    words = struct.unpack("=4I", ipaddress.IPv6Address(f"::ffff:{ipaddress.IPv4Address(host)}").packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
