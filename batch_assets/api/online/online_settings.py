"""What the environment says of online requests."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from batch_assets.api.access.api_keys import is_tenant
from batch_assets.settings import SettingError

REDIS = "BATCH_ASSETS_ONLINE_REDIS"
CONCURRENCY = "BATCH_ASSETS_ONLINE_CONCURRENCY"
MOST_WAITING = "BATCH_ASSETS_ONLINE_MOST_WAITING"
CACHE_GROUPS = "BATCH_ASSETS_ONLINE_CACHE_GROUPS"


@dataclass(frozen=True, slots=True)
class OnlineSettings:
    """`redis`: URL of the server with the queue that processes share; None: a file of this process. `concurrency`:
    requests that this process sends to engines at a time, 0: none. `most_waiting`: accepted requests without an answer,
    of all tenants. `cache_groups`: tenants that share answers, by tenant.
    """

    redis: str | None = field(default=None, repr=False)
    concurrency: int = 256
    most_waiting: int = 20_000
    cache_groups: Mapping[str, str] = field(default_factory=dict)


def online_settings() -> OnlineSettings:
    """Read the settings of this environment. Raises SettingError."""
    defaults = OnlineSettings()
    return OnlineSettings(
        redis_server(os.environ.get(REDIS, "")),
        _whole(CONCURRENCY, defaults.concurrency, 0, 10_000),
        _whole(MOST_WAITING, defaults.most_waiting, 1, 10_000_000),
        cache_groups(os.environ.get(CACHE_GROUPS, "")),
    )


def redis_server(text: str) -> str | None:
    """An address; None where there is none. Raises SettingError, which does not show it."""
    urls = text.split()
    if len(urls) > 1:
        raise SettingError(
            f"{REDIS}: expected the address of one Redis server, found {len(urls)} with spaces between them. Name one, "
            "the same for all services. What waits on the others is answered by a service for each of them: "
            "docs/online.md, From several Redis servers to one"
        )
    if urls and (re.match(r"rediss?://[^/]", urls[0]) is None or re.search(r",(rediss?://|$)", urls[0])):
        raise SettingError(f"{REDIS}: expected one address as redis://host:6379/0 or rediss://…, found something else")
    return urls[0] if urls else None


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
