"""The five calls against an API server that refuses, fails, hangs and loses replies; with its clock off by minutes."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_kubernetes import OFFER, FakeCluster, fake_cluster, pod_provider
from support.machines import ORDER, eventually, first_offer, get

from gpu_runner.providers.base import EngineAccess, NoCapacity, ProviderError, ProviderUnclear
from gpu_runner.providers.engine_keys import engine_key, engine_secret
from gpu_runner.providers.engine_process import EngineStartError
from gpu_runner.providers.kubernetes import api as api_module
from gpu_runner.providers.kubernetes.provider import KubernetesProvider


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster() as found:
        yield found


@pytest.fixture
def make(cluster: FakeCluster, tmp_path: Path) -> Callable[..., KubernetesProvider]:
    return lambda **settings: pod_provider(tmp_path, cluster, **settings)


@pytest.fixture
def provider(make: Callable[..., KubernetesProvider]) -> KubernetesProvider:
    return make()


def no_pause(seconds: float) -> None:
    assert seconds <= 0.5
    time.sleep(0.01)


def create(provider: KubernetesProvider, name: str = "ba-1") -> str:
    return provider.create(first_offer(provider), name, ORDER)


# the contract


def test_creates_of_one_name_at_once_are_one_pod_with_one_secret(
    make: Callable[..., KubernetesProvider], cluster: FakeCluster
):
    with ThreadPoolExecutor(6) as pool:
        ids = list(pool.map(lambda _: create(make()), range(6)))
    assert len(set(ids)) == len(cluster.pods) == len(cluster.secrets) == 1


def test_a_name_that_has_ended_is_not_started_again(provider: KubernetesProvider, cluster: FakeCluster):
    first = create(provider)
    cluster.end("ba-1")
    assert create(provider) == first
    assert get(provider, "ba-1").state == "ended"


def test_the_engine_gets_the_key_that_a_client_sends(
    provider: KubernetesProvider, cluster: FakeCluster, tmp_path: Path
):
    create(provider)
    key = engine_key(engine_secret(tmp_path), "ba-1")
    assert cluster.secrets["ba-1"]["stringData"]["api-key"] == key
    access = provider.access("ba-1", "http://10.0.0.1:8000")
    assert (access.endpoint, access.api_key) == ("http://10.0.0.1:8000", key)
    assert isinstance(access, EngineAccess) and key not in repr(access)
    hidden = (key, base64.b64encode(key.encode()).decode())
    assert not any(one in str(cluster.pods) for one in hidden)


def test_an_order_that_cannot_be_taken_makes_nothing(provider: KubernetesProvider, cluster: FakeCluster):
    offer = first_offer(provider)
    for wrong, name in (
        (replace(offer, price_per_hour=1.0), "ba-1"),
        (replace(offer, instance_type="other"), "ba-1"),
        (replace(offer, spot=True), "ba-1"),
        *((offer, name) for name in ("../ba", "BA", "", "a.b", "-ba", "x" * 64)),
    ):
        with pytest.raises(ProviderError):
            provider.create(wrong, name, ORDER)
    assert not cluster.pods and not cluster.secrets


def test_machines_are_listed_by_tag_and_provider(make: Callable[..., KubernetesProvider], cluster: FakeCluster):
    provider = make()
    for name in ("ba-1-a", "ba-1-b", "ba-2-a"):
        create(provider, name)
    create(make(name="other"), "ba-1-c")
    assert [machine.name for machine in provider.list("ba-1-")] == ["ba-1-a", "ba-1-b"]
    assert [machine.name for machine in provider.list("")] == ["ba-1-a", "ba-1-b", "ba-2-a"]
    assert not provider.list("ba-%")


def test_a_pod_that_is_none_of_ours_is_neither_taken_nor_ended(provider: KubernetesProvider, cluster: FakeCluster):
    create(provider)
    cluster.pods["ba-1"]["metadata"]["labels"] = {"app": "web"}
    provider.terminate("ba-1")
    assert "ba-1" in cluster.pods
    with pytest.raises(ProviderError, match="none of ours"):
        create(provider)


# failures of a boot


def test_a_pod_that_no_node_takes_is_no_capacity_after_the_wait(
    make: Callable[..., KubernetesProvider], cluster: FakeCluster
):
    patient = make(offers=[{**OFFER, "capacity_wait_seconds": 600}])
    create(patient)
    cluster.unschedulable("ba-1")
    with pytest.raises(EngineStartError, match="not ready"):
        patient.wait_ready("ba-1", 0.1, no_pause)
    with pytest.raises(NoCapacity, match=r"no node has room after 0 s: 0/2 nodes"):
        make(offers=[{**OFFER, "capacity_wait_seconds": 0.01}]).wait_ready("ba-1", 20, no_pause)
    cluster.unschedulable("ba-1", "SchedulingGated")
    impatient = make(offers=[{**OFFER, "capacity_wait_seconds": 0.01}])
    eventually(lambda: impatient._watch.copy.find("ba-1").obstacle.name == "QUEUED")
    with pytest.raises(NoCapacity, match="held back by a queue"):
        impatient.wait_ready("ba-1", 20, no_pause)


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName"])
def test_an_image_that_cannot_be_pulled_ends_the_wait_at_once(
    provider: KubernetesProvider, cluster: FakeCluster, reason: str
):
    create(provider)
    cluster.place("ba-1", reason, "not found")
    with pytest.raises(EngineStartError, match=f"cannot be pulled: {reason}: not found"):
        provider.wait_ready("ba-1", 20, no_pause)


def test_a_secret_that_is_missing_for_a_moment_is_waited_for(
    provider: KubernetesProvider, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
):
    create(provider)
    cluster.place("ba-1", "CreateContainerConfigError", "secret not found")
    threading.Timer(0.3, cluster.run, ("ba-1",)).start()
    assert provider.wait_ready("ba-1", 20, no_pause).state == "running"
    create(provider, "ba-2")
    cluster.place("ba-2", "CreateContainerConfigError", "secret not found")
    monkeypatch.setattr("gpu_runner.providers.kubernetes.provider.CONFIGURATION_SECONDS", 0.2)
    with pytest.raises(EngineStartError, match="container cannot be started: CreateContainerConfigError"):
        provider.wait_ready("ba-2", 20, no_pause)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda cluster: cluster.end("ba-1", "OOMKilled", 137), "out of memory"),
        (lambda cluster: cluster.end("ba-1", exit_code=2), r"its engine ended: exit status 2"),
        (lambda cluster: cluster.change("ba-1", phase="Failed", reason="UnexpectedAdmissionError"), "refused by its"),
        (lambda cluster: cluster.remove("ba-1"), "vanished"),
    ],
)
def test_a_boot_that_fails_says_why(
    provider: KubernetesProvider, cluster: FakeCluster, end: Callable[[FakeCluster], None], said: str
):
    create(provider)
    cluster.place("ba-1")
    end(cluster)
    with pytest.raises(EngineStartError, match=rf"ba-1 at pods has ended: {said}"):
        provider.wait_ready("ba-1", 20, no_pause)


# notices and ends


@pytest.mark.parametrize("ahead", [0.0, 300.0, -300.0])
def test_a_drain_is_a_notice_whatever_our_clock_says(provider: KubernetesProvider, cluster: FakeCluster, ahead: float):
    cluster.ahead = ahead
    create(provider)
    cluster.run("ba-1")
    assert get(provider, "ba-1").notice_seconds is None
    cluster.disrupt("ba-1", "EvictionByEvictionAPI", 30)
    machine = get(provider, "ba-1")
    assert machine.state == "running" and machine.notice_seconds == pytest.approx(30, abs=4)
    eventually(lambda: cluster.watched)
    cluster.remove("ba-1")
    eventually(lambda: provider._watch.copy.find("ba-1").end)
    assert get(provider, "ba-1").reason == "drained"


def test_what_ended_by_itself_keeps_its_reason_when_it_is_terminated(
    provider: KubernetesProvider, cluster: FakeCluster
):
    create(provider)
    cluster.end("ba-1", "OOMKilled", 137)
    provider.terminate("ba-1")
    assert "ba-1" not in cluster.pods
    assert get(provider, "ba-1").reason.startswith("out of memory")


def test_pods_that_ended_long_ago_are_deleted(make: Callable[..., KubernetesProvider], cluster: FakeCluster):
    provider = make(keep_ended_seconds=60)
    create(provider)
    cluster.end("ba-1")
    provider.list("")
    assert "ba-1" in cluster.pods
    cluster.ahead = 90
    provider.list("")
    provider.list("")
    assert "ba-1" not in cluster.pods


# what the API server refuses


def test_a_full_quota_is_no_capacity(provider: KubernetesProvider, cluster: FakeCluster):
    cluster.gpu_quota = 1
    create(provider)
    with pytest.raises(NoCapacity, match="exceeded quota: gpus"):
        create(provider, "ba-2")
    provider.terminate("ba-1")
    create(provider, "ba-2")


@pytest.mark.parametrize(
    ("verb", "resource", "call"),
    [
        ("create", "pods", create),
        ("create", "secrets", create),
        ("list", "pods", lambda provider: provider.list("")),
        ("get", "pods", lambda provider: provider.terminate("ba-0")),
        ("delete", "pods", lambda provider: provider.terminate("ba-0")),
    ],
)
def test_a_missing_right_is_named(
    provider: KubernetesProvider,
    cluster: FakeCluster,
    verb: str,
    resource: str,
    call: Callable[[KubernetesProvider], object],
):
    create(provider, "ba-0")
    cluster.forbidden = {(verb, resource)}
    with pytest.raises(ProviderError, match=f"give its account the verb {verb} on {resource}") as raised:
        call(provider)
    assert not isinstance(raised.value, NoCapacity)
    assert list(cluster.pods) == ["ba-0"]


def test_a_policy_is_told_from_quota_and_rights(provider: KubernetesProvider, cluster: FakeCluster):
    cluster.policy = 'violates PodSecurity "restricted:latest"'
    with pytest.raises(ProviderError, match="violates PodSecurity") as raised:
        create(provider)
    assert not isinstance(raised.value, NoCapacity)


def test_wrong_credentials_are_no_and_name_no_token(make: Callable[..., KubernetesProvider]):
    with pytest.raises(ProviderError, match="does not accept the credentials") as raised:
        create(make(token="wrong-token"))
    assert "wrong-token" not in str(raised.value)


def test_credentials_that_were_renewed_are_read_again(make: Callable[..., KubernetesProvider]):
    provider = make(token="old-token")
    with pytest.raises(ProviderError):
        provider.list("")
    make()
    assert provider.list("") == []


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path, make: Callable[..., KubernetesProvider]):
    provider = make(kubeconfig=tmp_path / "none")
    with pytest.raises(ProviderError, match="none"):
        provider.list("")


# the API server is away


@pytest.mark.parametrize("fault", ["hang", "cut", 500, 503])
def test_no_answer_is_unclear(
    provider: KubernetesProvider, cluster: FakeCluster, fault: object, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(api_module, "READ_SECONDS", 0.3)
    cluster.fault = lambda method, path: fault
    for call in (create, lambda provider: provider.list(""), lambda provider: provider.terminate("ba-1")):
        with pytest.raises(ProviderUnclear):
            call(provider)
    assert not cluster.pods


def test_nobody_listens_is_unclear(tmp_path: Path):
    with fake_cluster() as cluster:
        provider = pod_provider(tmp_path, cluster)
    with pytest.raises(ProviderUnclear, match="does not answer"):
        provider.list("")


def test_a_lost_reply_leaves_one_pod_that_the_next_create_finds(provider: KubernetesProvider, cluster: FakeCluster):
    cluster.fault = lambda method, path: "lost" if (method, path) == ("POST", provider._watch.path) else None
    with pytest.raises(ProviderUnclear):
        create(provider)
    cluster.fault = lambda method, path: None
    assert create(provider) == cluster.pods["ba-1"]["metadata"]["uid"]
    assert list(cluster.secrets) == ["ba-1"]


def test_a_pod_whose_secret_cannot_be_made_is_not_left(provider: KubernetesProvider, cluster: FakeCluster):
    cluster.fault = lambda method, path: 422 if path.endswith("/secrets") else None
    with pytest.raises(ProviderError):
        create(provider)
    assert not cluster.pods


def test_a_boot_goes_on_while_the_api_server_is_away(provider: KubernetesProvider, cluster: FakeCluster):
    create(provider)
    provider.list("")
    eventually(lambda: cluster.watched)
    cluster.fault = lambda method, path: "cut"
    cluster.cut_watches()
    eventually(lambda: provider._watch.trouble)
    with pytest.raises(EngineStartError, match="the API server does not answer"):
        provider.wait_ready("ba-1", 0, no_pause)
    cluster.run("ba-1")
    cluster.fault = lambda method, path: None
    assert provider.wait_ready("ba-1", 20, no_pause).state == "running"
