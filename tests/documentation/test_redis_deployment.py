"""The Redis of deploy/redis: its settings start a server that the service takes, and its manifests name them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import yaml
from support.documents import REPOSITORY
from support.redis_server import needs_redis, redis_server

from batch_assets.api.online.queues.redis_checks import Durability, durability_of
from batch_assets.api.online.queues.redis_commands import client

DEPLOY = REPOSITORY / "deploy" / "redis"
OURS = ("appendonly", "appendfsync", "maxmemory-policy")


@needs_redis
def test_a_server_with_these_settings_keeps_what_it_accepts(tmp_path: Path) -> None:
    async def durability(url: str) -> Durability:
        async with client(url) as found:
            return await durability_of(found)

    with redis_server(tmp_path, "--include", str(DEPLOY / "redis.conf")) as server:
        assert asyncio.run(durability(server.url)) is Durability.ALWAYS


def test_the_page_shows_the_same_settings() -> None:
    settings = dict(re.findall(r"^([a-z-]+) (\S+)$", (DEPLOY / "redis.conf").read_text(), re.MULTILINE))
    page = (REPOSITORY / "docs" / "online.md").read_text()
    assert all(f"\n{name} {settings[name]}\n" in page for name in OURS)


def test_manifests_read_the_settings_and_a_password_from_files() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    (stateful,) = (one for one in documents if one["kind"] == "StatefulSet")
    pod: dict[str, Any] = stateful["spec"]["template"]["spec"]
    for command in (*(one["command"] for one in compose.values()), pod["containers"][0]["command"]):
        assert command[1] == "/etc/redis/redis.conf" and "--requirepass" not in command
    assert not any(one.get("ports") for one in compose.values()), "nothing of it is published"
    assert pod["securityContext"]["runAsNonRoot"] and pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    assert {one["metadata"]["namespace"] for one in documents} == {"batch-assets"}


def test_the_server_has_a_disk_and_an_address_of_its_own() -> None:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    disks = [one["volumes"][0].partition(":") for one in found["services"].values()]
    assert {disk for disk, _, _ in disks} == set(found["volumes"]) and {place for _, _, place in disks} == {"/data"}
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    (service,) = (one for one in documents if one["kind"] == "Service")
    (stateful,) = (one for one in documents if one["kind"] == "StatefulSet")
    assert service["spec"]["clusterIP"] == "None" and stateful["spec"]["serviceName"] == service["metadata"]["name"]
    assert stateful["spec"]["volumeClaimTemplates"] and stateful["spec"]["replicas"] == 1
