"""Addresses of engines as people write them, and names that become words of a command line."""

from __future__ import annotations

from urllib.parse import urlsplit

MAX_ADDRESS = 2000


class AddressProblem(ValueError):
    """A text that is no address of an engine: `expected` and `found`; a user and password are never quoted."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}, found {found}")
        self.expected, self.found = expected, found


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port of http://host:port or https://host:port, with their default ports. Raises AddressProblem."""
    expected = "a URL like http://127.0.0.1:8000"
    if len(address) > MAX_ADDRESS or not address.isprintable() or " " in address:
        raise AddressProblem(expected, "a text that is too long, or has blanks or control characters in it")
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
    except ValueError as error:
        raise AddressProblem(expected, f"one that cannot be read ({error})") from None
    if parts.scheme not in ("http", "https"):
        raise AddressProblem(expected, "one that begins neither with http:// nor with https://")
    try:
        host.encode("idna" if not host.isascii() else "ascii")
    except UnicodeError:
        host = ""
    if not host or any(not 0 < len(label) < 64 for label in host.rstrip(".").split(".")) or len(host) > 253:
        raise AddressProblem(f"{expected} with a host", "none, or one that no host can have")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise AddressProblem(f"{expected} with a port from 1 to 65535", "another one")
    return host, port or (443 if parts.scheme == "https" else 80)


def name_problem(name: str) -> str | None:
    """Why a name cannot be given to `vllm serve` as a word; None when it can."""
    if name.startswith("-"):
        return "it begins with -, so that it would be an option of vllm serve"
    if not name.isprintable() or any(sign.isspace() for sign in name):
        return "it has blanks or control characters in it"
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            return "it has no UTF-8 form"
    return None if name else "it is empty"
