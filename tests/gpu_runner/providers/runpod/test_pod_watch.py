"""The dead-man's switch of a pod, as the pod runs it: a text given to python3, with the simulator as its engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_runpod import KEY, FakeRunPod, engine_words, fake_runpod
from support.machines import ORDER, eventually, first_offer

from gpu_runner.providers.engine_process import answers, free_port
from gpu_runner.providers.runpod.pod_watch import activity


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FakeRunPod]:
    with fake_runpod(tmp_path) as made:
        yield made


def test_what_a_page_of_metrics_says_of_activity():
    page = """# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{model_name="m"} 12.0
vllm:generation_tokens_total{model_name="m"} 30.0
vllm:num_requests_running{model_name="m"} 0.0
vllm:kv_cache_usage_perc{model_name="m"} 0.5
"""
    assert activity(page) == (42.0, False)
    assert activity(page + 'vllm:num_requests_waiting{model_name="m"} 1.0') == (42.0, True)
    assert activity("") == activity("no number\n\n{") == (0.0, False)


def test_a_pod_is_started_under_its_watch(site: FakeRunPod):
    site.provider(orphan_minutes=45).create(first_offer(site.provider()), "ba-1", ORDER)
    body = site.pods[0].body
    assert body["dockerEntrypoint"][:2] == ["python3", "-c"]
    assert body["dockerStartCmd"][:4] == ["2700", "8000", "vllm", "serve"]
    assert engine_words(body)[:2] == ["--model", "tiny"]
    assert KEY not in str(body), "our key stays with us"


@pytest.mark.slow
def test_a_pod_that_nobody_asks_ends_itself_with_the_key_that_runpod_gave_it(site: FakeRunPod):
    site.provider().create(first_offer(site.provider()), "ba-1", ORDER)
    (pod,) = site.pods
    port = free_port()
    site.fault("error", "terminate")  # the first time it is refused, and tried again
    engine = [sys.executable, "-m", "gpu_runner.simulator", "--model", "tiny", "--port", str(port)]
    command = [sys.executable, *pod.body["dockerEntrypoint"][1:], "2", str(port), *engine]
    given = {"RUNPOD_POD_ID": pod.id, "RUNPOD_API_KEY": KEY, "POD_WATCH_API": f"{site.url}/v1"}
    with subprocess.Popen(command, env=given, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as watch:
        try:
            eventually(lambda: pod.ended_at is not None)
            assert watch.wait(20) == 0 and not answers(f"http://127.0.0.1:{port}")
            assert watch.stderr is not None
            said = watch.stderr.read().decode()
        finally:
            watch.kill()
    assert "nobody asked the engine for 2 s" in said and KEY not in said


@pytest.mark.slow
def test_an_engine_that_ends_is_started_again_and_the_pod_ends_all_the_same(site: FakeRunPod):
    site.provider().create(first_offer(site.provider()), "ba-1", ORDER)
    (pod,) = site.pods
    command = [sys.executable, *pod.body["dockerEntrypoint"][1:], "1", str(free_port()), "false"]
    given = {"RUNPOD_POD_ID": pod.id, "RUNPOD_API_KEY": KEY, "POD_WATCH_API": f"{site.url}/v1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=given, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0 and pod.ended_at is not None
    assert done.stderr.decode().count("the engine ended with 1") > 1
