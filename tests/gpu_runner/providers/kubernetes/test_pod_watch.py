"""One copy of all pods: what lists and events, late and early ones, do to it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from support.fake_kubernetes import fake_cluster, pod_provider
from support.machines import ORDER, eventually, first_offer, get

from gpu_runner.providers.base import EndReason
from gpu_runner.providers.kubernetes.pod_status import PodState
from gpu_runner.providers.kubernetes.pod_watch import PodCopy

POD = PodState("ba-1", "u1", "1", "h100", 0.0, True, True, "10.0.0.1")


def test_a_list_that_was_asked_for_before_an_event_is_older_than_the_event():
    copy = PodCopy()
    before = time.monotonic()
    copy.event("ADDED", POD, now=10)
    copy.replace([], before, now=11)
    assert copy.find("ba-1") is not None and copy.find("ba-1").end is None

    copy.event("DELETED", POD, now=12)
    copy.replace([POD], before, now=13)
    found = copy.find("ba-1")
    assert found is not None and found.end is not None
    assert (found.end.reason, found.end.at) == (EndReason.VANISHED, 12)


def test_a_pod_that_a_later_list_does_not_have_is_gone():
    copy = PodCopy()
    copy.put(replace(POD, gone_at=5.0), time.monotonic())
    copy.replace([], time.monotonic(), now=11)
    (found,) = copy.all()
    assert found.end is not None and found.end.reason is EndReason.DELETED


def test_a_new_pod_of_an_old_name_takes_its_place():
    copy = PodCopy()
    copy.event("DELETED", POD, now=1)
    copy.put(replace(POD, uid="u2"), time.monotonic())
    assert [one.uid for one in copy.all()] == ["u2"]
    copy.event("DELETED", replace(POD, uid="u2"), now=2)
    assert [one.uid for one in copy.all()] == ["u2"]


def test_what_we_ended_is_told_so_unless_it_was_not_deleted_after_all():
    copy = PodCopy()
    copy.ends_by_us("u1")
    assert copy.ended_by_us("u1")
    copy.lives_on("u1")
    copy.event("DELETED", POD, now=1)
    assert copy.find("ba-1").end.reason is EndReason.VANISHED


def test_it_memorises_a_bounded_number_of_pods_that_are_gone():
    copy = PodCopy()
    for number in range(1100):
        copy.event("DELETED", replace(POD, name=f"ba-{number}", uid=str(number)), now=1)
    assert len(copy.all()) == 1000


def test_events_arrive_and_after_any_end_of_the_stream_the_list_is_read_again(tmp_path: Path):
    with fake_cluster() as cluster:
        provider = pod_provider(tmp_path, cluster)
        for name in ("ba-1", "ba-2", "ba-3"):  # more than a page of the fake has
            provider.create(first_offer(provider), name, ORDER)
        watch = provider._watch
        assert len(provider.list("ba-")) == 3
        eventually(lambda: cluster.watched)
        cluster.run("ba-1")
        eventually(lambda: watch.copy.find("ba-1").answered)
        for end in (cluster.cut_watches, cluster.expire_watches):
            lists = cluster.asked.count(("GET", watch.path))
            end()
            eventually(lambda before=lists: cluster.asked.count(("GET", watch.path)) > before)
            eventually(lambda: cluster.watched)
        cluster.disrupt("ba-1", "PreemptionByScheduler")
        eventually(lambda: watch.copy.find("ba-1").disruption)
        cluster.remove("ba-1")
        eventually(lambda: watch.copy.find("ba-1").end)
        assert get(provider, "ba-1").reason == "preempted"
        eventually(lambda: cluster.watched == 1)  # what was broken off is gone a moment later


def test_an_api_server_that_is_away_for_a_while_is_asked_again(tmp_path: Path):
    with fake_cluster() as cluster:
        provider = pod_provider(tmp_path, cluster)
        provider.create(first_offer(provider), "ba-1", ORDER)
        provider.list("")
        eventually(lambda: cluster.watched)
        cluster.fault = lambda method, path: "cut"
        cluster.cut_watches()
        eventually(lambda: provider._watch.trouble)
        cluster.run("ba-1")
        cluster.fault = lambda method, path: None
        eventually(lambda: provider._watch.copy.find("ba-1").answered and not provider._watch.trouble)


def test_all_providers_of_a_process_share_one_watch(tmp_path: Path):
    with fake_cluster() as cluster:
        for _ in range(5):
            pod_provider(tmp_path, cluster).list("")
        eventually(lambda: cluster.watched == 1)
        assert pod_provider(tmp_path, cluster)._watch is pod_provider(tmp_path, cluster)._watch
        assert pod_provider(tmp_path, cluster, name="other")._watch is not pod_provider(tmp_path, cluster)._watch
