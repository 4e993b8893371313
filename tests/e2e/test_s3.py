"""The same run with the store on S3: moto's server, or a real one named by the environment.

BATCH_ASSETS_TEST_S3=bucket with AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY uses an existing server.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.timing import PATIENCE

from e2e.harness import eventually, platform
from e2e.test_losses import JOURNAL_SECONDS, ROWS, WINDOW, asked_again, check_table, gsm8k, leased_run, published
from gpu_runner.providers.engine_process import free_port
from resources.objects.opening import open_objects, self_test

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An `s3://bucket/prefix` of its own."""
    import boto3

    if named := os.environ.get("BATCH_ASSETS_TEST_S3"):
        with_server = boto3.client("s3")
        if named not in [found["Name"] for found in with_server.list_buckets()["Buckets"]]:
            with_server.create_bucket(Bucket=named)
        yield f"s3://{named}/{uuid.uuid4().hex[:8]}"
        return
    port = free_port()
    # A process of its own: in ours its threads would share the clock with what we measure.
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: _answers(port), 20, "moto's server")
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="datasets")
        yield "s3://datasets/team"
    finally:
        server.terminate()
        server.wait(timeout=10)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1):
            return True
    except OSError:
        return False


def test_gsm8k_on_s3_with_a_killed_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str) -> None:
    self_test(open_objects(bucket))
    with platform(tmp_path, monkeypatch, gsm8k(ROWS), simulator=["--speed", "4"], store_root=bucket) as site:
        started = time.monotonic()
        site.launch_job("gsm8k_refresh")
        _, pid = eventually(lambda: leased_run(site), 60, "a run that holds the engine")
        time.sleep(4)
        os.kill(pid, 9)
        killed_at = time.time()
        published(site, 240)
        print(f"\nGSM8K on {bucket.partition('//')[0]}: {time.monotonic() - started:.0f} s with one kill")
        check_table(site, ROWS)
        again = asked_again(site.simulator.events(), [killed_at])
        oldest = max(again.answer_ages, default=0.0)
        print(f"asked again {again.in_flight} in flight, {len(again.answer_ages)} answered, the oldest {oldest:.1f} s")
        assert again.in_flight <= WINDOW
        assert oldest < 2 * JOURNAL_SECONDS + PATIENCE
        assert not list(site.store.objects.list("gsm8k/journal/"))
