"""SSH keys of a rented VM, made from the fleet's secret and the machine's name: stored nowhere, the same everywhere.

Every process that has the secret knows which host key a machine must have, and has the one key that it lets in. Each
machine has keys of its own, so one that leaks them says nothing about another's. Ed25519 (RFC 8032); private keys in
OpenSSH's own format (`PROTOCOL.key` of OpenSSH), public ones as in RFC 4253, section 6.6.
"""

from __future__ import annotations

import base64
import hmac
import struct
from dataclasses import dataclass, field

_TYPE = b"ssh-ed25519"


@dataclass(frozen=True, slots=True)
class SshKey:
    """`public`: a line as in `authorized_keys`, without a comment. `private`: a key file of OpenSSH, not encrypted."""

    public: str
    private: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class SshKeys:
    """What the VM proves itself with, and what lets us in."""

    host: SshKey
    client: SshKey


def ssh_keys(secret: str, name: str) -> SshKeys:
    """Both keys of the machine `name`. The same secret and name give the same bytes."""
    return SshKeys(_key(_seed(secret, "ssh host key", name)), _key(_seed(secret, "ssh client key", name)))


def _seed(secret: str, purpose: str, name: str) -> bytes:
    """32 bytes that no other purpose gets: no machine's name has a space, `engine_key` takes names alone."""
    return hmac.new(secret.encode(), f"{purpose} {name}".encode(), "sha256").digest()


def _key(seed: bytes) -> SshKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    blob = _text(_TYPE) + _text(public)
    # The two equal numbers tell a wrong passphrase; here they only have to be the same each time.
    check = hmac.new(seed, b"check", "sha256").digest()[:4] * 2
    secret = check + _text(_TYPE) + _text(public) + _text(seed + public) + _text(b"")
    secret += bytes(range(1, 1 + -len(secret) % 8))
    body = b"openssh-key-v1\0" + _text(b"none") + _text(b"none") + _text(b"") + struct.pack(">I", 1)
    body += _text(blob) + _text(secret)
    lines = base64.b64encode(body).decode()
    wrapped = "\n".join(lines[start : start + 70] for start in range(0, len(lines), 70))
    begin, end = (f"-----{word} OPENSSH PRIVATE KEY-----" for word in ("BEGIN", "END"))
    return SshKey(f"{_TYPE.decode()} {base64.b64encode(blob).decode()}", f"{begin}\n{wrapped}\n{end}\n")


def _text(given: bytes) -> bytes:
    return struct.pack(">I", len(given)) + given
