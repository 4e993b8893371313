"""Addresses of engines: what an address may say, and which addresses are never connected to.

An address is written by people, in tags as well, and everything that is sent to it goes with the engine's key. So it
holds no secret of its own, and it never leads to what answers without being an engine: link-local and metadata services
hand credentials to whoever asks (RFC 3927, RFC 4291; addresses of the metadata services: the clouds' own documents).
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import urllib.request
from collections.abc import Callable
from http.client import HTTPMessage
from typing import IO
from urllib.parse import urlsplit

_REFUSED = [
    (ipaddress.ip_network(network), kind)
    for kind, networks in {
        "unspecified": ("0.0.0.0/8", "::/128"),
        "link-local": ("169.254.0.0/16", "fe80::/10"),
        "multicast": ("224.0.0.0/4", "ff00::/8"),
        "reserved": ("240.0.0.0/4",),
        # Alibaba Cloud, Azure, Oracle Cloud; AWS and Google over IPv6. Their IPv4 address is link-local.
        "metadata": ("100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32", "fd00:ec2::/32", "fd20:ce::/32"),
    }.items()
    for network in networks
]
MAX_ADDRESS = 2000
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # NAT64 (RFC 6052): the last 32 bits are an IPv4 address
_COMPATIBLE = ipaddress.ip_network("::/96")  # IPv4-compatible (RFC 4291), also the loopback address ::1


class AddressRefused(OSError):
    """The address is of a kind that no engine has; nothing was sent. Its text does not name the address."""


def refuse(address: str) -> None:
    """Raise AddressRefused when this IP address (text, as the resolver gives it) may not be connected to."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    for one in (ip, *_embedded(ip)):
        for network, kind in _REFUSED:
            if one in network:
                raise AddressRefused(
                    f"expected the address of an engine, found a {kind} address: it is never connected to"
                )


def _embedded(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """IPv4 addresses that an IPv6 address stands for."""
    if isinstance(ip, ipaddress.IPv4Address):
        return []
    found = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
    if ip in _TRANSLATED or (ip in _COMPATIBLE and int(ip) > 1):
        found.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    return [one for one in found if one is not None]


def refused(error: BaseException) -> AddressRefused | None:
    """The AddressRefused behind an error of a client library, or None."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None or isinstance(seen, AddressRefused):
            return seen
        inner = getattr(seen, "os_error", None) or getattr(seen, "reason", None)  # of aiohttp, of urllib
        seen = inner if isinstance(inner, BaseException) else seen.__cause__
    return None


def refuse_private(address: str) -> None:
    """As `refuse`, and what is not reached from the internet: loopback, addresses of private networks."""
    refuse(address)
    ip = ipaddress.ip_address(address.partition("%")[0])
    if not all(one.is_global for one in (ip, *_embedded(ip))):
        raise AddressRefused("expected a public address, found a private one: it is not connected to")


def connect(host: str, port: int, seconds: float, check: Callable[[str], None] = refuse) -> socket.socket:
    """A TCP connection to the first address of the name that accepts. Raises AddressRefused, or another OSError."""
    failure: OSError = OSError("the name has no address")
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            check(str(address[0]))
            return socket.create_connection((str(address[0]), port), timeout=seconds)
        except OSError as error:
            failure = error
    raise failure


def engine_url(text: str) -> str:
    """The address of an engine in one spelling: no trailing slash, no `/v1`, default ports left out.

    Raises ValueError, without what it found: it may hold a secret.
    """
    said = "expected a URL like http://host:8000 or https://host/v1"
    if len(text) > MAX_ADDRESS:
        raise ValueError(f"{said}, found more than {MAX_ADDRESS:,} characters")
    if text != text.strip() or not text.isprintable() or "\\" in text or " " in text:
        raise ValueError(f"{said}, found spaces or other characters that no address has")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(f"{said}, found something that cannot be read as one") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{said}, found another scheme or none")
    if "@" in parts.netloc:
        raise ValueError(f"{said}, found a user or password in it: a key belongs in the environment")
    if "?" in text or "#" in text:
        raise ValueError(f"{said}, found a query or fragment in it: a key belongs in the environment")
    host = parts.hostname
    if not host or port == 0 or not _can_be_a_host(host):
        raise ValueError(f"{said}, found no host or port, or what no host can be called")
    try:
        refuse(host)
    except AddressRefused as error:
        raise ValueError(str(error)) from None
    except ValueError:
        pass  # a name: its addresses are looked at when it is connected to
    shown = f"[{host}]" if ":" in host else host
    default = {"http": 80, "https": 443}[parts.scheme]
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{shown}{'' if port in (None, default) else f':{port}'}{path}"


def _can_be_a_host(host: str) -> bool:
    """Whether it is an IPv6 address, or a name with labels as DNS has them (RFC 1035, section 2.3.4)."""
    if ":" in host:
        return True
    try:
        host.encode("ascii" if host.isascii() else "idna")
    except UnicodeError:
        return False
    return len(host) <= 253 and all(0 < len(label) < 64 for label in host.rstrip(".").split("."))


def host_and_port(url: str) -> tuple[str, int]:
    """Host and port of an address as `engine_url` gives it."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an HTTPError: what is sent, a key among it, goes to nobody else."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class _Connection(http.client.HTTPConnection):
    """Connects to the address that was checked: a second look-up of the name may give another one."""

    timeout: float
    check: Callable[[str], None] = staticmethod(refuse)

    def connect(self) -> None:
        self.sock = connect(self.host, self.port, self.timeout, self.check)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _TlsConnection(http.client.HTTPSConnection, _Connection):
    """The same, and TLS on it: HTTPSConnection.connect goes on with `_Connection.connect`."""


class _Http(urllib.request.HTTPHandler):
    def __init__(self, kind: type[_Connection] = _Connection) -> None:
        super().__init__()
        self._kind = kind

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._kind, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, kind: type[_TlsConnection] = _TlsConnection) -> None:
        super().__init__()
        self._kind = kind

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._kind, req)


def opener(check: Callable[[str], None]) -> urllib.request.OpenerDirector:
    """As `direct`, with another check of each IP address before it is connected to: it raises AddressRefused."""
    checks = {"check": staticmethod(check)}
    plain: type[_Connection] = type("_Checked", (_Connection,), checks)
    tls: type[_TlsConnection] = type("_CheckedTls", (_TlsConnection,), checks)
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect(), _Http(plain), _Https(tls))


# For engines and for our own servers, which must be reached themselves: by no proxy of the environment, never at an
# address that no engine has. A redirect is not followed, it is an HTTPError.
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect(), _Http(), _Https())
