"""Runs in a pod, as its first process: starts the engine, and ends the pod when nobody asks it for long.

`python3 -c TEXT SECONDS PORT COMMAND...`, with the text of this file: it imports nothing of ours. An engine is asked
when the counters of its /metrics move or requests stand in it; a boot counts as silence too. One that ends is
started again, and the silence goes on. The pod is ended with
what RunPod gives every pod: RUNPOD_POD_ID, a key for this pod only in RUNPOD_API_KEY, and `runpodctl`. RunPod's API is
asked first, then runpodctl, and again every minute; the engine is ended in any case. Seconds are monotonic ones.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

API = "https://rest.runpod.io/v1"
LARGEST = 1 << 22  # bytes of /metrics
COUNTED = (
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
    *("sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:num_requests_total"),
)
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "sglang:num_running_reqs", "sglang:num_queue_reqs")


def activity(page: str) -> "tuple[float, bool]":
    """Sum of the counters, and whether requests stand in the engine, of a page of metrics."""
    total, busy = 0.0, False
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        try:
            found = float(value)
        except ValueError:
            continue
        if name.startswith(COUNTED):
            total += found
        elif name.startswith(BUSY):
            busy = busy or found > 0
    return total, busy


def look(port: int) -> "tuple[float, bool] | None":
    """What the engine says now; None while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            return activity(page.read(LARGEST).decode(errors="replace"))
    except (OSError, ValueError):
        return None


def end_pod() -> bool:
    """Whether RunPod was told to end this pod. The key is shown nowhere."""
    pod, key = os.environ.get("RUNPOD_POD_ID", ""), os.environ.get("RUNPOD_API_KEY", "")
    headers = {"Authorization": f"Bearer {key}"}
    address = f"{os.environ.get('POD_WATCH_API', API)}/pods/{pod}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, method="DELETE", headers=headers), timeout=10
        ) as answer:
            return bool(200 <= answer.status < 300)
    except (OSError, ValueError) as error:
        print(f"pod watch: RunPod's API did not end this pod: {type(error).__name__}", file=sys.stderr, flush=True)
    try:
        return subprocess.run(["runpodctl", "remove", "pod", pod], timeout=30, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError) as error:
        print(f"pod watch: runpodctl did not end it either: {type(error).__name__}", file=sys.stderr, flush=True)
    return False


def watch(engine: "subprocess.Popen[bytes]", seconds: float, port: int, step: float, asked_at: float) -> float:
    """Until the engine ends, or nobody asked it for so long: when it was asked last, `asked_at` if it was not."""
    seen = 0.0
    while engine.poll() is None:
        found = look(port)
        if found is not None and (found[1] or found[0] != seen):
            seen, asked_at = found[0], time.monotonic()
        if time.monotonic() - asked_at >= seconds:
            break
        time.sleep(step)
    return asked_at


def main(words: "list[str]") -> int:
    seconds, port, command = float(words[0]), int(words[1]), words[2:]
    step, asked_at = min(15.0, seconds / 4), time.monotonic()
    stopped = threading.Event()
    engine = subprocess.Popen(command)

    def stop(*_: object) -> None:
        stopped.set()
        engine.terminate()

    signal.signal(signal.SIGTERM, stop)
    while time.monotonic() - asked_at < seconds:
        asked_at = watch(engine, seconds, port, step, asked_at)
        if stopped.is_set():
            return engine.wait()
        if engine.poll() is not None:  # RunPod would start this file again, and the seconds with it
            print(f"pod watch: the engine ended with {engine.returncode}", file=sys.stderr, flush=True)
            if stopped.wait(step):
                return 0
            engine = subprocess.Popen(command)
    print(f"pod watch: nobody asked the engine for {seconds:.0f} s; this pod ends", file=sys.stderr, flush=True)
    engine.kill()
    while not end_pod():
        time.sleep(min(60.0, seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
