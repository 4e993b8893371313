"""JSON Web Tokens: what is let in, and every known way to forge one."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from functools import cache
from typing import Any

import jwt
import orjson
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from batch_assets.api.access.jwks import KeySet, KeysUnavailable, VerifyingKey, parse_key_set
from batch_assets.api.access.jwt_tokens import MOST_BYTES, JwtPolicy, TokenRefused, looks_like_token, verify
from batch_assets.api.requests.callers import Caller, Scope

NOW = 1_800_000_000
POLICY = JwtPolicy("https://issuer.example", "batch-assets")
CLAIMS = {
    "iss": POLICY.issuer,
    "aud": POLICY.audience,
    "exp": NOW + 600,
    "tenant": "acme",
    "scope": "files.read inference unknown.scope",
}


@cache
def rsa_key(bits: int = 2048, number: int = 0) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, bits)


@cache
def ec_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def jwk(private: Any, **more: Any) -> dict[str, Any]:
    algorithm: Any = RSAAlgorithm
    if isinstance(private, ec.EllipticCurvePrivateKey):
        algorithm = ECAlgorithm
    elif isinstance(private, ed25519.Ed25519PrivateKey):
        algorithm = OKPAlgorithm
    return {**algorithm.to_jwk(private.public_key(), as_dict=True), **more}


def public_pem(private: Any) -> bytes:
    return private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


class Issuer:
    """An issuer's key set, as `verify` asks for it."""

    def __init__(self, *keys: dict[str, Any]) -> None:
        self.keys = parse_key_set(orjson.dumps({"keys": list(keys)}))

    async def find(self, key_id: str) -> VerifyingKey | None:
        return self.keys.get(key_id)


@cache
def issuer() -> Issuer:
    return Issuer(jwk(rsa_key(), kid="rsa"), jwk(ec_key(), kid="ec"))


def check(token: str, *, now: float = NOW, keys: Issuer | None = None) -> Caller:
    return asyncio.run(verify(token, POLICY, keys or issuer(), lambda: now))


def signed(changes: Mapping[str, Any] = {}, *, header: Mapping[str, Any] | None = None) -> str:
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not ...}
    payload = json.dumps(claims).encode()  # not jwt.encode, which refuses to write some of these claims
    return jwt.PyJWS().encode(payload, rsa_key(), "RS256", headers={"kid": "rsa", **(header or {})})


def by_hand(header: Mapping[str, Any], claims: Any, secret: bytes | None = None) -> str:
    """A token that no library would make; with `secret`: signed with HMAC."""
    parts = [urlsafe_b64encode(orjson.dumps(part)).rstrip(b"=") for part in (dict(header), claims)]
    signature = b"" if secret is None else hmac.digest(secret, b".".join(parts), hashlib.sha256)
    return b".".join([*parts, urlsafe_b64encode(signature).rstrip(b"=")]).decode()


def test_a_good_token_names_tenant_and_scopes() -> None:
    assert check(signed()) == Caller("acme", None, frozenset({Scope.FILES_READ, Scope.INFERENCE}))
    without = {name: value for name, value in CLAIMS.items() if name != "scope"}
    listed = jwt.encode({**without, "scp": ["batches.read", 7]}, ec_key(), "ES256", headers={"kid": "ec"})
    assert check(listed).scopes == {Scope.BATCHES_READ}
    assert looks_like_token(listed)


def test_an_ed25519_key_verifies() -> None:
    private = ed25519.Ed25519PrivateKey.generate()
    token = jwt.encode(CLAIMS, private, "EdDSA", headers={"kid": "ed"})
    assert check(token, keys=Issuer(jwk(private, kid="ed"))).tenant == "acme"


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": ...},
        {"exp": None},
        {"exp": True},
        {"exp": str(NOW + 600)},
        {"exp": NOW - 31},
        {"exp": 0},
        {"exp": -1},
        {"exp": 10**400},
        {"exp": float("inf")},
        {"exp": float("nan")},
        {"nbf": float("nan")},
        {"exp": NOW + 86_400 * 365 * 100},
        {"nbf": NOW + 31},
        {"nbf": "soon"},
        {"iat": NOW + 31},
        {"iat": [NOW]},
        {"iss": ...},
        {"iss": "https://issuer.example/"},
        {"iss": ["https://issuer.example"]},
        {"iss": None},
        {"aud": ...},
        {"aud": "other"},
        {"aud": ["other"]},
        {"aud": []},
        {"aud": {"batch-assets": 1}},
        {"tenant": ...},
        {"tenant": None},
        {"tenant": ""},
        {"tenant": "Acme"},
        {"tenant": "a/../b"},
        {"tenant": ["acme"]},
        {"tenant": "a" * 65},
        {"tenant": "acme\n"},
    ],
    ids=lambda changes: orjson.dumps({k: str(v)[:30] for k, v in changes.items()}).decode(),
)
def test_a_token_with_wrong_claims_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TokenRefused):
        check(signed(changes))


def test_clocks_may_differ_by_the_skew_and_no_more() -> None:
    assert check(signed({"exp": NOW}), now=NOW + 29).tenant == "acme"
    with pytest.raises(TokenRefused):
        check(signed({"exp": NOW}), now=NOW + 30)
    assert check(signed({"nbf": NOW + 30})).tenant == "acme"
    with pytest.raises(ValueError, match="skew"):
        JwtPolicy("i", "a", skew_seconds=61)


@pytest.mark.parametrize("name", ["none", "None", "NONE", "nOnE", ""])
def test_a_token_without_a_signature_is_refused(name: str) -> None:
    with pytest.raises(TokenRefused):
        check(by_hand({"alg": name, "kid": "rsa"}, CLAIMS))


def test_a_public_key_used_as_a_secret_is_refused() -> None:
    """RS256 to HS256: whoever knows the public key could sign."""
    pem = public_pem(rsa_key())
    body = orjson.dumps(jwk(rsa_key(), kid="rsa"))
    for secret in (pem, pem.strip(), body, b""):
        for name in ("HS256", "HS384", "HS512"):
            with pytest.raises(TokenRefused):
                check(by_hand({"alg": name, "kid": "rsa"}, CLAIMS, secret))


@pytest.mark.parametrize(
    "header",
    [
        {"kid": None},
        {"kid": ""},
        {"kid": "unknown"},
        {"kid": "ec"},
        {"kid": "../../etc/passwd"},
        {"kid": "rsa' OR '1'='1"},
        {"kid": "x" * 257},
        {"crit": ["exp"], "exp": NOW},
        {"crit": ["b64"], "b64": False},
        {"alg": "RS384"},
        {"alg": "ES256"},
        {"alg": "PS256"},
    ],
    ids=lambda header: orjson.dumps({k: str(v)[:20] for k, v in header.items()}).decode(),
)
def test_a_token_with_a_wrong_header_is_refused(header: dict[str, Any]) -> None:
    good = signed().split(".")
    changed = urlsafe_b64encode(orjson.dumps({"alg": "RS256", "kid": "rsa", **header})).rstrip(b"=").decode()
    with pytest.raises(TokenRefused):
        check(".".join([changed, *good[1:]]))


@pytest.mark.parametrize("field", ["jwk", "jku", "x5u", "x5c"])
def test_a_key_that_a_token_brings_along_is_not_used(field: str) -> None:
    other = rsa_key(2048, 1)
    brought: Any = jwk(other, kid="rsa") if field == "jwk" else "https://evil.example/keys.json"
    token = jwt.encode(CLAIMS, other, "RS256", headers={"kid": "rsa", field: brought})
    with pytest.raises(TokenRefused):
        check(token)


def test_a_changed_token_is_refused() -> None:
    head, _, signature = signed().split(".")
    payload = urlsafe_b64encode(orjson.dumps({**CLAIMS, "tenant": "other"})).rstrip(b"=").decode()
    for token in (f"{head}.{payload}.{signature}", f"{head}.{payload}.", signed()[:-4] + "AAAA"):
        with pytest.raises(TokenRefused):
            check(token)


@pytest.mark.parametrize(
    "token", ["..", "a.b.c", ".".join(["e30"] * 3), "é.é.é", "=" * 20 + "..", "A" * MOST_BYTES + ".a.b"]
)
def test_nonsense_is_refused(token: str) -> None:
    with pytest.raises(TokenRefused):
        check(token)


def test_deeply_nested_claims_are_refused() -> None:
    deep = urlsafe_b64encode(b"[" * 5000).rstrip(b"=").decode()
    head = urlsafe_b64encode(b'{"alg":"RS256","kid":"rsa"}').rstrip(b"=").decode()
    for token in (f"{head}.{deep}.AAAA", f"{deep}.{head}.AAAA"):
        with pytest.raises(TokenRefused):
            check(token)


# the key set


def test_keys_that_nobody_should_verify_with_are_skipped() -> None:
    weak = jwk(rsa.generate_private_key(65537, 1024), kid="weak")
    private = RSAAlgorithm.to_jwk(rsa_key(), as_dict=True) | {"kid": "private"}
    symmetric = {"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "kid": "symmetric"}
    encrypting = jwk(rsa_key(), kid="enc", use="enc")
    hmac_named = jwk(rsa_key(), kid="hs", alg="HS256")
    without_id = jwk(rsa_key())
    broken = {"kty": "RSA", "kid": "broken", "n": "AQAB"}
    good = jwk(rsa_key(), kid="good", use="sig", alg="RS256")
    text = orjson.dumps({"keys": [weak, private, symmetric, encrypting, hmac_named, without_id, broken, 7, good]})
    found = parse_key_set(text)
    assert found.keys() == {"good"} and found["good"].algorithms == ("RS256",)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"keys": 1}', b'{"keys": [' + b"{}," * 100 + b"{}]}", b"\xff"])
def test_what_is_no_key_set_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_key_set(text)


class Page:
    """A key set that is read: counts readings, can be away."""

    def __init__(self, *names: str) -> None:
        self.names, self.away, self.reads = list(names), False, 0

    def __call__(self) -> bytes:
        self.reads += 1
        if self.away:
            raise OSError
        return orjson.dumps({"keys": [jwk(ec_key(), kid=name) for name in self.names]})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_rotated_key_is_found_without_a_restart_and_the_old_one_goes() -> None:
    async def scenario() -> None:
        page, clock = Page("old"), Clock()
        keys = KeySet(page, clock)
        assert await keys.find("old") is not None
        page.names = ["new"]
        assert await keys.find("new") is None, "not asked again so soon"
        clock.now = 31
        assert await keys.find("new") is not None
        assert await keys.find("old") is None
        assert page.reads == 2

    asyncio.run(scenario())


def test_unknown_key_ids_cannot_make_us_ask_more_than_twice_a_minute() -> None:
    async def scenario() -> None:
        page, clock = Page("one"), Clock()
        keys = KeySet(page, clock)
        for number in range(1000):
            clock.now = number * 0.06
            assert await keys.find(f"forged-{number}") is None
        assert page.reads == 2

    asyncio.run(scenario())


def test_many_callers_at_once_cause_one_reading() -> None:
    async def scenario() -> None:
        page = Page("one")
        keys = KeySet(page, Clock())
        found = await asyncio.gather(*(keys.find("one") for _ in range(50)))
        assert all(found) and page.reads == 1

    asyncio.run(scenario())


def test_keys_outlive_an_outage_of_the_issuer_for_a_day_only() -> None:
    async def scenario() -> None:
        page, clock = Page("one"), Clock()
        keys = KeySet(page, clock)
        await keys.find("one")
        page.away = True
        clock.now = 86_400
        assert await keys.find("one") is not None
        clock.now = 86_401
        with pytest.raises(KeysUnavailable):
            await keys.find("one")
        page.away = False
        clock.now += 31
        assert await keys.find("one") is not None

    asyncio.run(scenario())
