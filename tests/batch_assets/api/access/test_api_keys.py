"""API keys: made, stored as a digest, found, refused."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from batch_assets.api.access.api_keys import KeyRequestError, checked_scopes, key_digest, looks_like_key, new_secret
from batch_assets.api.access.key_store import KeyCache, KeyStore
from batch_assets.api.database.service_database import RecordsError
from batch_assets.api.requests.callers import Scope

NOW = 1_800_000_000.0


class Clock:
    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> KeyStore:
    return KeyStore(f"sqlite:///{tmp_path / 'api.db'}", clock)


def test_a_key_has_256_random_bits_and_no_two_are_equal() -> None:
    drawn: list[int] = []
    new_secret(lambda count: drawn.append(count) or b"\1" * count)  # type: ignore[func-returns-value]
    assert drawn == [32]
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100 and all(looks_like_key(secret) for secret in secrets)


@pytest.mark.parametrize(
    "text", ["", "sk-", "sk-" + "a" * 42, "sk-" + "a" * 44, "sk-" + "a" * 42 + "é", "pk-" + "a" * 43]
)
def test_what_is_no_key_is_known_by_its_form(text: str) -> None:
    assert not looks_like_key(text)


def test_the_database_holds_no_part_of_a_key(tmp_path: Path, store: KeyStore) -> None:
    _, secret = store.create("acme", frozenset(Scope))
    store.close()
    held = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert key_digest(secret).encode() in held
    for start in range(3, len(secret) - 8):
        assert secret[start : start + 8].encode() not in held


def test_a_key_is_found_by_its_secret_only(store: KeyStore) -> None:
    key, secret = store.create("acme", frozenset({Scope.FILES_READ}), name="nightly")
    assert store.find(secret) == key
    assert key.scopes == {Scope.FILES_READ} and key.tenant == "acme" and key.usable(NOW)
    assert store.find(secret[:-1] + ("A" if secret[-1] != "A" else "B")) is None
    assert store.find(key.key_id) is None
    assert store.find(key.digest) is None


def test_a_key_ends_at_its_moment(store: KeyStore, clock: Clock) -> None:
    key, _ = store.create("acme", frozenset(Scope), lifetime=60)
    assert key.usable(NOW + 59.9) and not key.usable(NOW + 60)
    assert store.any_usable()
    clock.now += 60
    assert not store.any_usable()


def test_a_revoked_key_is_refused_and_stays_listed(store: KeyStore, clock: Clock) -> None:
    key, secret = store.create("acme", frozenset(Scope))
    clock.now += 5
    assert store.revoke(key.key_id).revoked_at == NOW + 5
    clock.now += 5
    assert store.revoke(key.key_id).revoked_at == NOW + 5
    found = store.find(secret)
    assert found is not None and not found.usable(clock())
    assert [one.key_id for one in store.keys("acme")] == [key.key_id]
    assert store.keys("other") == []


def test_an_unknown_key_cannot_be_revoked(store: KeyStore) -> None:
    with pytest.raises(KeyRequestError, match="keys list"):
        store.revoke("key_0000")


@pytest.mark.parametrize("tenant", ["", "A", "a b", "a/b", "../x", "-a", "a" * 65, "a\n"])
def test_a_tenant_has_a_name_that_can_stand_anywhere(store: KeyStore, tenant: str) -> None:
    with pytest.raises(KeyRequestError, match="tenant"):
        store.create(tenant, frozenset(Scope))


def test_scopes_are_named_and_all_without_a_name() -> None:
    assert checked_scopes(["files.read"]) == {Scope.FILES_READ}
    assert checked_scopes([]) == set(Scope) - {Scope.METRICS_READ, Scope.DEAD_LETTERS}
    with pytest.raises(KeyRequestError, match="admin"):
        checked_scopes(["files.read", "admin"])


def test_a_bad_database_address_is_refused_without_its_text() -> None:
    with pytest.raises(RecordsError) as caught:
        KeyStore("nonsense secret://user:password@", Clock())
    assert "password" not in str(caught.value)


def test_a_scope_of_a_later_version_gives_nothing(tmp_path: Path, store: KeyStore) -> None:
    _, secret = store.create("acme", frozenset({Scope.FILES_READ}))
    with sqlite3.connect(tmp_path / "api.db") as connection:
        connection.execute("UPDATE api_keys SET scopes = 'files.read everything'")
    connection.close()
    found = store.find(secret)
    assert found is not None and found.scopes == {Scope.FILES_READ}


def test_the_cache_forgets_after_its_seconds_and_is_bounded(store: KeyStore) -> None:
    clock = Clock(0.0)
    cache = KeyCache(clock, seconds=5, most=3)
    made = [store.create("acme", frozenset(Scope)) for _ in range(5)]
    for key, _ in made:
        cache.put(key)
    assert len(cache) == 3
    assert cache.get(made[0][1]) is None and cache.get(made[4][1]) == made[4][0]
    clock.now = 5
    assert cache.get(made[4][1]) is None
