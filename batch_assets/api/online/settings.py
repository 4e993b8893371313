"""What the environment says of online requests."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from batch_assets.api.access.api_keys import is_tenant
from batch_assets.api.online.queues.protocol import SHARDS
from batch_assets.settings import SettingError

REDIS = "BATCH_ASSETS_ONLINE_REDIS"
MOST_SERVERS = SHARDS
CONCURRENCY = "BATCH_ASSETS_ONLINE_CONCURRENCY"
MOST_WAITING = "BATCH_ASSETS_ONLINE_MOST_WAITING"
CACHE_GROUPS = "BATCH_ASSETS_ONLINE_CACHE_GROUPS"


@dataclass(frozen=True, slots=True)
class OnlineSettings:
    """`redis`: URLs of the servers with the queue that processes share; none: a file of this process. `concurrency`:
    requests that this process sends to engines at a time, 0: none. `most_waiting`: accepted requests without an answer,
    of all tenants. `cache_groups`: tenants that share answers, by tenant.
    """

    redis: tuple[str, ...] = field(default=(), repr=False)
    concurrency: int = 256
    most_waiting: int = 20_000
    cache_groups: Mapping[str, str] = field(default_factory=dict)


def online_settings() -> OnlineSettings:
    """Of this environment. Raises SettingError."""
    defaults = OnlineSettings()
    return OnlineSettings(
        redis_servers(os.environ.get(REDIS, "")),
        _whole(CONCURRENCY, defaults.concurrency, 0, 10_000),
        _whole(MOST_WAITING, defaults.most_waiting, 1, 10_000_000),
        cache_groups(os.environ.get(CACHE_GROUPS, "")),
    )


def redis_servers(text: str) -> tuple[str, ...]:
    """Addresses with spaces between them: a comma may be part of a password. Raises SettingError, which shows none."""
    urls = tuple(text.split())
    for number, url in enumerate(urls, 1):
        if re.match(r"rediss?://[^/]", url) is None or re.search(r",(rediss?://|$)", url):
            raise SettingError(
                f"{REDIS}: expected addresses as redis://host:6379/0 or rediss://…, with spaces between them; "
                f"found something else as address {number} of {len(urls)}"
            )
    if len(set(urls)) < len(urls):
        raise SettingError(f"{REDIS}: expected each address once, found one twice")
    if len(urls) > MOST_SERVERS:
        raise SettingError(f"{REDIS}: expected at most {MOST_SERVERS} addresses, found {len(urls)}")
    return urls


def cache_groups(text: str) -> dict[str, str]:
    """Groups as `acme+acme-labs,one+two`: tenants of a group get each other's answers. Raises SettingError."""
    groups: dict[str, str] = {}
    for group in filter(None, (part.strip() for part in text.split(","))):
        tenants = [name.strip() for name in group.split("+")]
        wrong = [name for name in tenants if not is_tenant(name) or name in groups]
        if wrong or len(tenants) < 2:
            raise SettingError(
                f"{CACHE_GROUPS}: expected tenants as acme+acme-labs,one+two, each once, found {group!r:.80}"
            )
        groups |= dict.fromkeys(tenants, "+".join(sorted(tenants)))
    return groups


def _whole(name: str, default: int, least: int, most: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or len(text) > 12 or not least <= int(text) <= most:
        raise SettingError(f"{name}: expected a whole number, {least} to {most}, found {text!r:.40}")
    return int(text)
