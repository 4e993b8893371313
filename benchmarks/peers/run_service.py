"""A user of the service: start `batch-assets serve`, upload a file, wait for its batch, download, stop the service.

A second start in the same folder goes on with the batch that the first one created.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from openai import APIConnectionError, OpenAI

from gpu_runner.providers.engine_process import free_port

ENDED = ("completed", "failed", "expired", "cancelled")


def started(client: OpenAI) -> None:
    """Wait until the service answers."""
    for _ in range(1200):
        try:
            client.models.list()
            return
        except APIConnectionError:
            time.sleep(0.05)
    raise SystemExit("the service did not start")


def answered(client: OpenAI, task: dict[str, str], folder: Path) -> None:
    """The batch's output, in the folder."""
    mark = folder / "batch"
    if mark.exists():
        batch = client.batches.retrieve(mark.read_text())
    else:
        file = client.files.create(file=Path(task["lines"]), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        mark.write_text(batch.id)
    while batch.status not in ENDED:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    if batch.output_file_id is None:
        raise SystemExit(f"the batch {batch.status} without an output")
    with (folder / "output.jsonl").open("wb") as out:
        for part in client.files.content(batch.output_file_id).iter_bytes():
            out.write(part)
        out.flush()
        os.fsync(out.fileno())


def main() -> None:
    """Entry point."""
    task = json.loads(Path(sys.argv[1]).read_text())
    port = free_port()
    command = [str(Path(sys.executable).with_name("batch-assets")), "serve", "--port", str(port)]
    service = subprocess.Popen([*command, "--endpoint", task["url"]])
    try:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        started(client)
        answered(client, task, Path(task["folder"]))
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait(60)


if __name__ == "__main__":
    main()
