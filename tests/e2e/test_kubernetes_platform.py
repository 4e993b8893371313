"""deploy/kubernetes on a real cluster: a dataset by run workers that rent engine pods, through faults; no row is lost.

Needs the tool `kube-cluster`, and a Docker engine with an image to build on. One test, because there is one cluster on
a machine; its parts follow one another on the same dataset. Another has engine pods with a real small model. What each
part took is printed: more than ten minutes in all.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.kubernetes_cluster import TOOL
from support.kubernetes_platform import (
    CAPITALS,
    COUNTRIES,
    DATASET,
    ENGINES,
    PLATFORM,
    ROWS,
    Platform,
    docker_engine,
    installed_platform,
    write_images,
)
from support.kubernetes_vllm import real_model
from support.pod_meter import PodMeter

from batch_assets.tags import INSTANCES_TAG, OBJECTIVE_TAG

pytestmark = [
    pytest.mark.soak("kubernetes"),
    pytest.mark.timeout(2700),
]

AWAY_SECONDS = 60.0
INSTANCES = 3
APART_SECONDS = 3.0  # of a pod: times of Kubernetes are whole seconds, and a busy kubelet tells its end late


def told(what: str, seconds: float) -> None:
    print(f"{seconds:6.1f} s  {what}", flush=True)


def everything_comes_up_from_nothing(site: Platform) -> None:
    told("all pods ready, definitions loaded", site.wait_installed())


def run_workers_rent_engine_pods(site: Platform) -> None:
    site.launch(f"{DATASET}_refresh", **{OBJECTIVE_TAG: "fastest", INSTANCES_TAG: str(INSTANCES)})
    told("first engine pod", site.until(lambda: site.pods(ENGINES), 300))  # two run workers start before it
    told("first batch committed", site.until(lambda: site.batches() > 0, 240))
    started = {run["runId"] for run in site.range_runs("STARTED")}
    pod = next(pod for run, pod in site.workers().items() if run in started)
    assert pod["spec"]["serviceAccountName"] == "run-worker"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 60
    assert pod["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "500m", "memory": "1Gi"}
    (engine, *_) = site.pods(ENGINES)
    assert engine["spec"]["automountServiceAccountToken"] is False


def a_plan_of_three_instances_is_three_engine_pods(site: Platform) -> None:
    """A range is smaller than an engine's window here: it is in flight as a whole, and handed on at once."""

    def running() -> int:
        return sum(pod["status"]["phase"] == "Running" for pod in site.pods(ENGINES))

    told("three engine pods run", site.until(lambda: running() == INSTANCES, 180))
    in_use = "select count(distinct instance) from leases where released_at is null"
    told("each of them is leased", site.until(lambda: site.database(in_use) == [str(INSTANCES)], 60))
    assert running() == INSTANCES


def leased(site: Platform) -> str:
    """The run that holds an engine."""
    (run, *_) = site.database("select run_id from batch_runs where state = 'leased' order by started_at")
    return run


def a_deleted_run_worker_is_replaced_after_it_has_ended(site: Platform) -> None:
    run = leased(site)
    pod = site.workers()[run]["metadata"]["name"]
    began = time.monotonic()
    site.kubectl("-n", PLATFORM, "delete", "pod", pod, "--wait=false")
    site.until(lambda: site.status_of(run) == "FAILURE", 90)
    told("deleted run worker: run failed", time.monotonic() - began)  # it says so itself, when it has cleaned up
    site.until(lambda: run not in site.workers(), 90)
    told("deleted run worker: its pod has ended", time.monotonic() - began)
    site.until(lambda: site.replacement_of(run), 90)
    told("deleted run worker: another does its batches", time.monotonic() - began)


def an_api_server_that_is_away_stops_no_run(site: Platform) -> None:
    runs = {run["runId"] for run in site.range_runs("STARTED")}
    failed, committed = site.failed(), site.batches()
    began = time.monotonic()
    site.cluster.tool("stop", "apiserver")
    try:
        (run, *_) = runs
        site.until(lambda: "cannot be seen" in site.said(run), 40)
        told("API server away: told in the run's log", time.monotonic() - began)
        time.sleep(max(0.0, AWAY_SECONDS - (time.monotonic() - began)))
        assert site.failed_beside(failed) == {}
        assert site.batches() > committed
        told(f"API server away: {site.batches() - committed} batches committed meanwhile", time.monotonic() - began)
    finally:
        site.cluster.tool("start", "apiserver")
    back = time.monotonic()
    site.until(lambda: site.status_of(run) != "STARTED" or "has not ended" in site.said(run), 60)
    told("API server back: worker seen again", time.monotonic() - back)
    assert site.failed_beside(failed) == {}


def a_missing_right_is_named_and_fails_no_run(site: Platform) -> None:
    failed = site.failed()
    path = '[{"op": "remove", "path": "/rules/1"}]'
    began = time.monotonic()
    site.kubectl("-n", PLATFORM, "patch", "role", "daemon", "--type=json", "-p", path)
    site.until(lambda: any("the verb get on jobs/status" in site.said(run) for run in site.started()), 60)
    told("right taken away: named in the run's log", time.monotonic() - began)
    (daemon,) = site.pods(PLATFORM, "app.kubernetes.io/component=daemon")
    site.kubectl("-n", PLATFORM, "delete", "pod", daemon["metadata"]["name"], "--force", "--grace-period=0")
    words = ("-n", PLATFORM, "logs", "-l", "app.kubernetes.io/component=daemon", "-c", "rights")
    said = "allow the verb get on jobs/status in its Role in namespace batch-assets"
    site.until(lambda: said in site.kubectl(*words), 120)  # after an outage controllers and scheduler come back late
    told("daemon killed without the right: its successor says which", time.monotonic() - began)
    site.kubectl("apply", "-f", str(site.folder / "accounts.yaml"))
    back = time.monotonic()
    site.kubectl("-n", PLATFORM, "rollout", "status", "deployment/daemon", "--timeout=240s", seconds=250)
    told("right given back: daemon works", time.monotonic() - back)
    assert site.failed_beside(failed) == {}


def runs_were_told(site: Platform) -> None:
    runs = sorted(site.runs(), key=lambda run: run["startTime"] or 0.0)
    origin = runs[0]["startTime"] or 0.0
    for run in runs:
        start, end = ((run[key] or origin) - origin for key in ("startTime", "endTime"))
        tags = {tag["key"]: tag["value"] for tag in run["tags"]}
        parent = tags.get("dagster/parent_run_id", "")[:8]
        print(f"  {run['runId'][:8]} {run['jobName']} {run['status']}: from {start:.1f} to {end:.1f} s {parent}")


def why(site: Platform) -> None:
    """What helps to find out why a part failed."""
    runs_were_told(site)
    for run, messages in site.failed_beside(set()).items():
        print(run[:8], *messages, sep="\n    ")
    print(site.kubectl("-n", PLATFORM, "logs", "deployment/daemon", "-c", "daemon", "--tail=300", check=False))
    print(site.kubectl("-n", PLATFORM, "get", "pods,jobs", check=False))


def the_table_is_complete_and_nothing_is_left(site: Platform) -> None:
    publish = f"{DATASET}_publish"
    told("table published", site.until(lambda: (publish, "SUCCESS") in site.ended(), 360))
    runs_were_told(site)
    assert f"{ROWS:,} rows, {ROWS:,} ok, 0 dead" in site.verify()
    told("run workers have ended", site.until(lambda: not site.workers(), 60))
    assert site.overlaps == [] and site.looks > 100


def the_books_are_the_pods_lifetimes(site: Platform, meter: PodMeter) -> None:
    told("engine pods have ended", site.until(lambda: not site.pods(ENGINES), 180))
    time.sleep(5)  # until the books have heard of the last one
    books, pods = site.billed_seconds(), meter.total_seconds()
    print(f"books {books:.1f} s, {len(meter.lives)} pods {pods:.1f} s")
    assert abs(books - pods) <= 0.01 * pods + APART_SECONDS * len(meter.lives)


PARTS: list[Callable[[Platform], None]] = [
    everything_comes_up_from_nothing,
    run_workers_rent_engine_pods,
    a_plan_of_three_instances_is_three_engine_pods,
    a_deleted_run_worker_is_replaced_after_it_has_ended,
    an_api_server_that_is_away_stops_no_run,
    a_missing_right_is_named_and_fails_no_run,
    the_table_is_complete_and_nothing_is_left,
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The platform's images, and what stands in for public ones, as one tar file."""
    if not TOOL.exists():
        pytest.skip(f"no cluster: {TOOL.name} is not beside this repository (KUBE_CLUSTER names it)")
    began = time.monotonic()
    with docker_engine() as docker:
        written = write_images(docker, tmp_path_factory.mktemp("images"))
    told("images built", time.monotonic() - began)
    return written


def test_the_platform_on_a_real_cluster(images: Path) -> None:
    began = time.monotonic()
    with installed_platform(images) as site:
        told("cluster up, images on its nodes", time.monotonic() - began)
        with site.watched(), PodMeter(site.cluster.admin, ENGINES).running() as meter:
            try:
                for part in PARTS:
                    part(site)
            except BaseException:
                with contextlib.suppress(Exception):
                    why(site)
                raise
            the_books_are_the_pods_lifetimes(site, meter)


def test_engine_pods_of_real_vllm_answer_sensibly_on_the_platform(images: Path) -> None:
    """SmolLM2-135M-Instruct on vLLM's CPU build, rented by a run worker pod, as a pod of its own."""
    if not (python := os.environ.get("VLLM_PYTHON")):
        pytest.skip("needs VLLM_PYTHON: the Python of an environment with vLLM")
    with installed_platform(images, lambda cluster: real_model(cluster, ENGINES, python)) as site:
        everything_comes_up_from_nothing(site)
        with PodMeter(site.cluster.admin, ENGINES).running() as meter:
            site.launch(f"{CAPITALS}_refresh")
            told("first engine pod", site.until(lambda: site.pods(ENGINES), 300))
            told("first batch committed", site.until(lambda: site.batches(CAPITALS) > 0, 400))
            publish = f"{CAPITALS}_publish"
            told("table published", site.until(lambda: (publish, "SUCCESS") in site.ended(), 240))
            assert f"{len(COUNTRIES)} rows, {len(COUNTRIES)} ok, 0 dead" in site.verify(CAPITALS)
            answers = {line["country"]: line["output"] for line in site.published_rows(CAPITALS)}
            print(*(f"{country}: {answer}" for country, answer in sorted(answers.items())), sep="\n")
            assert "Paris" in answers["France"]
            the_books_are_the_pods_lifetimes(site, meter)
