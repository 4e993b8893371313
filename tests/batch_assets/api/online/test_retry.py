"""Waits between tries."""

from __future__ import annotations

import pytest

from batch_assets.api.online.consumer import RETRY
from batch_assets.api.online.online_settings import OnlineSettings, cache_groups, online_settings, redis_server
from batch_assets.settings import SettingError
from gpu_runner.inference.failures.retry import backoff


def test_waits_grow_with_jitter_and_are_bounded() -> None:
    assert [backoff(RETRY, number, None, lambda: 1.0) for number in (1, 2, 3, 4)] == [0.25, 0.5, 1.0, 2.0]
    assert backoff(RETRY, 1, None, lambda: 0.0) == pytest.approx(0.025)
    assert backoff(RETRY, 10_000, None, lambda: 1.0) == 5.0


def test_groups_of_tenants() -> None:
    assert cache_groups("") == {}
    assert cache_groups("a+b, c+d-x") == {"a": "a+b", "b": "a+b", "c": "c+d-x", "d-x": "c+d-x"}


@pytest.mark.parametrize("text", ["a", "a+", "a+A", "a+b,b+c", "a+a b"])
def test_groups_that_cannot_be(text: str) -> None:
    with pytest.raises(SettingError, match="CACHE_GROUPS"):
        cache_groups(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BATCH_ASSETS_ONLINE_REDIS", "localhost:6379"),
        ("BATCH_ASSETS_ONLINE_REDIS", "redis://"),
        ("BATCH_ASSETS_ONLINE_REDIS", "redis://:secret@a/0,redis://:secret@b/0"),
        ("BATCH_ASSETS_ONLINE_REDIS", "redis://:secret@a/0, redis://:secret@b/0"),
        ("BATCH_ASSETS_ONLINE_REDIS", "redis://:secret@a/0 http://:secret@b"),
        ("BATCH_ASSETS_ONLINE_REDIS", "redis://:secret@a/0 redis://:secret@b/0"),
        ("BATCH_ASSETS_ONLINE_REDIS", "redis://:secret@a/0,redis://:secret@b/0"),
        ("BATCH_ASSETS_ONLINE_CONCURRENCY", "-1"),
        ("BATCH_ASSETS_ONLINE_MOST_WAITING", "0"),
    ],
)
def test_wrong_settings_are_named_without_their_secret(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=name) as raised:
        online_settings()
    assert "secret" not in str(raised.value)


def test_an_address_is_not_shown() -> None:
    assert "secret" not in repr(OnlineSettings(redis="redis://user:secret@host/0"))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("", None),
        (" redis://:a,b@one:6379/0 ", "redis://:a,b@one:6379/0"),
        ("rediss://two:6380/1\n", "rediss://two:6380/1"),
    ],
)
def test_a_comma_may_be_part_of_a_password(text: str, url: str | None) -> None:
    assert redis_server(text) == url


def test_several_servers_are_refused_with_what_to_do() -> None:
    with pytest.raises(SettingError) as raised:
        redis_server("redis://one redis://two\n  redis://three")
    said = "expected the address of one Redis server, found 3 with spaces between them. Name one, the same for all"
    assert said in str(raised.value) and "answered by a service for each of them: docs/online.md" in str(raised.value)
