"""The provider on a real Kubernetes: the five calls, ways in, and faults, each told apart.

One test, because there is one cluster on a machine and it takes longer to start than any of this; each part leaves the
namespace empty.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from support.kubernetes_cluster import NAMESPACE, OFFER, ROLE, RealCluster, cluster_provider, real_cluster
from support.machines import ORDER, eventually, first_offer
from support.machines import get as look
from support.processes import command_line
from support.timing import PATIENCE

from gpu_runner.providers.base import EngineAccess, Machine, NoCapacity, ProviderError, ProviderUnclear, open_access
from gpu_runner.providers.checks import CheckOutcome, CheckSubject
from gpu_runner.providers.engine_process import EngineStartError, answers
from gpu_runner.providers.kubernetes.provider import KubernetesProvider

SECONDS = 60.0 * PATIENCE


Answer = TypeVar("Answer")


@dataclass
class ClusterProviders:
    """The cluster, and providers on it with the account of docs/providers.md."""

    cluster: RealCluster
    home: Path
    kubeconfig: Path

    def provider(self, offer: dict[str, Any] | None = None, **settings: Any) -> KubernetesProvider:
        return cluster_provider(self.home, self.kubeconfig, offers=[{**OFFER, **(offer or {})}], **settings)


def patiently(call: Callable[[], Answer]) -> Answer:
    """As the fleet does it: what was not answered in the seconds of a call, on a busy machine, is asked again."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return call()
        except ProviderUnclear:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def create(provider: KubernetesProvider, name: str) -> str:
    return patiently(lambda: provider.create(first_offer(provider), name, ORDER))


def get(provider: KubernetesProvider, name: str) -> Machine:
    return patiently(lambda: look(provider, name))


@contextmanager
def machine(site: ClusterProviders, name: str, **settings: Any) -> Iterator[tuple[KubernetesProvider, EngineAccess]]:
    """A machine that is ready, and the way to it; ended afterwards."""
    provider = site.provider(**settings)
    create(provider, name)
    ready = provider.wait_ready(name, SECONDS, time.sleep)
    assert ready.endpoint is not None
    access = open_access(provider, name, ready.endpoint)
    try:
        yield provider, access
    finally:
        access.close()


def models(access: EngineAccess, key: str | None) -> int:
    """HTTP status of /v1/models."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{access.endpoint}/v1/models", headers=headers), timeout=SECONDS
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def a_machine_boots_serves_with_its_key_and_ends_without_a_trace(site: ClusterProviders) -> None:
    provider = site.provider()
    with ThreadPoolExecutor(4) as pool:
        ids = set(pool.map(lambda _: create(site.provider(), "ba-1-a"), range(4)))
    assert len(ids) == 1
    assert get(provider, "ba-1-a").state in ("booting", "running")
    ready = provider.wait_ready("ba-1-a", SECONDS, time.sleep)
    assert (ready.id, ready.state, ready.max_num_seqs) == (*ids, "running", 8)
    access = open_access(provider, "ba-1-a", ready.endpoint or "")
    assert models(access, access.api_key) == 200
    assert models(access, None) == 401
    assert [one.name for one in patiently(lambda: provider.list("ba-1-"))] == ["ba-1-a"]
    assert not patiently(lambda: provider.list("ba-2-"))

    other = site.provider()
    patiently(lambda: other.terminate("ba-1-a"))
    eventually(lambda: get(other, "ba-1-a").state == "ended")
    assert get(other, "ba-1-a").reason == "terminated"
    patiently(lambda: other.terminate("ba-1-a"))
    patiently(lambda: other.terminate("ba-1-never"))
    assert create(other, "ba-1-a") in ids
    eventually(lambda: not site.cluster.run("get", "secrets", "-o", "name"))


def an_engine_is_reached_from_outside_and_its_tunnel_comes_again(site: ClusterProviders) -> None:
    with machine(site, "ba-2", reach="port_forward") as (_, access):
        assert access.endpoint.startswith("http://127.0.0.1:")
        assert models(access, access.api_key) == 200
        (kubectl,) = forwards()
        kubectl.kill()
        eventually(lambda: answers(access.endpoint))
        assert models(access, access.api_key) == 200
    assert forwards() == []


def forwards() -> list[psutil.Process]:
    """Our kubectl processes; their guards have the same words behind others."""
    found = []
    for process in psutil.Process().children(recursive=True):
        words = command_line(process)
        if words and Path(words[0]).name.startswith("kubectl") and "port-forward" in words:
            found.append(process)
    return found


def boots_that_cannot_work_say_why(site: ClusterProviders) -> None:
    missing = site.provider(image="no-such-image:1")
    create(missing, "ba-3-image")
    huge = site.provider({"gpus": 8, "capacity_wait_seconds": 2})
    create(huge, "ba-3-room")
    greedy = site.provider(
        {"memory": "64Mi"},
        command=["/bin/sh", "-c", "x=0123456789abcdef; while :; do x=$x$x; done", "{port}"],
    )
    create(greedy, "ba-3-oom")
    ends = site.provider(command=["/bin/sh", "-c", "exit 3", "{port}"])
    create(ends, "ba-3-ends")
    with pytest.raises(NoCapacity, match="no node has room"):
        huge.wait_ready("ba-3-room", SECONDS, time.sleep)
    with pytest.raises(EngineStartError, match=r"no-such-image:1 cannot be pulled: (ErrImagePull|ImagePullBackOff)"):
        missing.wait_ready("ba-3-image", SECONDS, time.sleep)
    with pytest.raises(EngineStartError, match="its engine ended: exit status 3"):
        ends.wait_ready("ba-3-ends", SECONDS, time.sleep)
    with pytest.raises(EngineStartError, match="out of memory"):
        greedy.wait_ready("ba-3-oom", SECONDS, time.sleep)


def what_the_api_server_refuses_is_told_apart(site: ClusterProviders) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus", "namespace": NAMESPACE}}
    provider = site.provider()
    create(provider, "ba-4-a")
    site.cluster.apply({**quota, "spec": {"hard": {"requests.nvidia.com/gpu": "1"}}})
    try:
        eventually(lambda: "exceeded quota: gpus" in refusal_of_another(site, "ba-4-a"), SECONDS)
        with pytest.raises(NoCapacity, match="exceeded quota: gpus"):
            create(provider, "ba-4-b")
    finally:
        site.cluster.run("delete", "resourcequota", "gpus")
        eventually(lambda: not refusal_of_another(site, "ba-4-a"), SECONDS)

    grant(site, [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}])
    try:
        with pytest.raises(ProviderError, match="give its account the verb create on pods"):
            create(provider, "ba-4-c")
        with pytest.raises(ProviderError, match="give its account the verb delete on pods"):
            patiently(lambda: provider.terminate("ba-4-a"))
        failed = [one for one in provider.check() if one.outcome is CheckOutcome.FAILED]
        assert [one.subject for one in failed] == [CheckSubject.PERMISSIONS]
        assert failed[0].found == "missing: create pods, delete pods, create secrets"
    finally:
        grant(site, ROLE["rules"])


def grant(site: ClusterProviders, rules: list[dict[str, Any]]) -> None:
    """Give the account these rights and no other."""
    site.cluster.apply({**ROLE, "rules": rules})
    wait_for_rights(site, rules)


def wait_for_rights(site: ClusterProviders, rules: list[dict[str, Any]]) -> None:
    """Wait until the API server decides by these rules.

    It learns of a role some time after the role was stored, and some time after its own start; until then it refuses.
    Asking what it would allow changes nothing.
    """
    known, given = rights(ROLE["rules"]), rights(rules)
    eventually(lambda: {right for right in known if site.cluster.allows(*right)} == given, SECONDS)


def rights(rules: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Verb and resource of every right in these rules."""
    return {(verb, resource) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def refusal_of_another(site: ClusterProviders, name: str) -> str:
    """What the API server says against one more pod like this one, which is not made; empty: nothing."""
    pod = json.loads(site.cluster.run("get", "pod", name, "-o", "json"))
    spec = {key: value for key, value in pod["spec"].items() if key != "nodeName"}
    copy = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{name}-copy"}, "spec": spec}
    words = ["create", "--dry-run=server", "-o", "name", "-f", "-", "-n", NAMESPACE, "--kubeconfig", site.cluster.admin]
    done = subprocess.run([site.cluster.kubectl, *words], input=json.dumps(copy), capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def a_drain_is_a_notice_in_which_the_engine_answers(site: ClusterProviders) -> None:
    with machine(site, "ba-5", notice_seconds=15) as (provider, access):
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "ba-5", "namespace": NAMESPACE}}
        site.cluster.run(
            "create", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods/ba-5/eviction", "-f", "-", given=eviction
        )
        noticed = get(provider, "ba-5")
        assert noticed.state == "running"
        assert noticed.notice_seconds is not None and 0 < noticed.notice_seconds <= 15 + 5 + 2  # seconds of two clocks
        assert models(access, access.api_key) == 200
        eventually(lambda: get(provider, "ba-5").state == "ended", SECONDS)
        assert get(provider, "ba-5").reason.startswith("drained")


def a_pod_that_somebody_deletes_ends_with_that_reason(site: ClusterProviders) -> None:
    with machine(site, "ba-6", notice_seconds=0) as (provider, _):
        site.cluster.run("delete", "pod", "ba-6", "--wait=false", "--grace-period=1")
        eventually(lambda: get(provider, "ba-6").state == "ended")
        assert get(provider, "ba-6").reason == "deleted by somebody else"


def an_api_server_that_is_away_leaves_engines_alone(site: ClusterProviders) -> None:
    with machine(site, "ba-7") as (provider, access):
        create(provider, "ba-7-b")
        site.cluster.tool("stop", "apiserver")
        try:
            for call in (
                lambda: provider.list(""),
                lambda: provider.terminate("ba-7"),
                lambda: provider.create(first_offer(provider), "ba-7-c", ORDER),
            ):
                with pytest.raises(ProviderUnclear):
                    call()
            assert models(access, access.api_key) == 200
        finally:
            site.cluster.tool("start", "apiserver")
        wait_for_rights(site, ROLE["rules"])
        assert provider.wait_ready("ba-7-b", SECONDS, time.sleep).state == "running"
        assert get(provider, "ba-7").state == "running"
        assert [one.name for one in patiently(lambda: provider.list("ba-7"))] == ["ba-7", "ba-7-b"]


def everything_that_renting_needs_is_found(site: ClusterProviders) -> None:
    found = site.provider().check()
    assert CheckOutcome.FAILED not in {one.outcome for one in found}
    assert "system:serviceaccount:engines:fleet" in found[0].found
    admin = cluster_provider(site.home, site.cluster.admin).check()
    assert [one.found for one in admin if one.subject is CheckSubject.MACHINES] == ["h100: 1 nodes, 4 nvidia.com/gpu"]


PARTS: list[Callable[[ClusterProviders], None]] = [
    a_machine_boots_serves_with_its_key_and_ends_without_a_trace,
    an_engine_is_reached_from_outside_and_its_tunnel_comes_again,
    boots_that_cannot_work_say_why,
    what_the_api_server_refuses_is_told_apart,
    a_drain_is_a_notice_in_which_the_engine_answers,
    a_pod_that_somebody_deletes_ends_with_that_reason,
    everything_that_renting_needs_is_found,
    an_api_server_that_is_away_leaves_engines_alone,
]


@pytest.mark.soak("kubernetes")
@pytest.mark.timeout(600)
def test_the_provider_on_a_real_cluster(
    tmp_path: Path, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    with real_cluster() as cluster:
        monkeypatch.setenv("PATH", f"{cluster.kubectl.parent}{os.pathsep}{os.environ['PATH']}")
        site = ClusterProviders(cluster, tmp_path, cluster.account("fleet", tmp_path / "kubeconfig"))
        for part in PARTS:
            began = time.monotonic()
            with subtests.test(part.__name__.replace("_", " ")):
                part(site)
            print(f"{time.monotonic() - began:6.1f} s  {part.__name__}")
            cluster.run("delete", "pods", "--all", "--grace-period=1", "--wait=true")
