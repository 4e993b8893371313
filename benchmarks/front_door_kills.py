"""Batches beside random ends of everything they need, judged by their files and the engine's log alone.

    python benchmarks/front_door_kills.py [--lines 20000] [--batches 8] [--faults 11] [--store-away 6]

A service with its records apart from its local disk, a simulated engine, and faults at random points of the work: `kill
-9` of the service, with and without the loss of DAGSTER_HOME; its SIGTERM; `kill -9` of the engine; the store away; the
engine away for long; and a create whose answer is lost, sent again. Then:

- every batch is `completed` and was never `failed`, counts never fell, and the create that was sent twice made one;
- output and error lines are the input's lines, each once, and no line is an error;
- lines that the engine was asked again are no more than were in flight at the faults (`--spare` allows more);
- requests reach the engine again within five seconds after what was away is back.

`--postgres URL` keeps the records there. Exit status 1: something of this does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_runner.providers.engine_process import free_port

ROOT = Path(__file__).parent.parent
CHAT = "/v1/chat/completions"
TOKENS = 8  # of each answer; a canary's has one
LONGEST_SECONDS = 3600.0
KINDS = ("service kill -9", "service kill -9, its disk lost", "service SIGTERM", "engine kill -9", "store away")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is run. Seconds are how long a part is away; `goes_on`: how soon the engine is asked again after that."""

    lines: int
    batches: int
    faults: int
    slots: int = 64
    store_away: float = 6.0
    engine_away: float = 20.0
    weights_ms: float = 8.0
    seed: int = 1
    records: str | None = None
    goes_on: float = 5.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One end of a part. Unix seconds: when it was ended, and when it was back."""

    kind: str
    ended: float
    back: float


@dataclass(slots=True)
class Verdict:
    """What the files and the engine's log say. `wrong`: each thing that does not hold."""

    wrong: list[str] = field(default_factory=list)
    lines: int = 0
    asked_again: int = 0
    in_flight: int = 0
    goes_on: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0


class Parts:
    """The service and its engine, as processes below one folder."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.folder, self._sizes = folder, sizes
        self.engine_port, self.port = free_port(), free_port()
        self.log = folder / "requests"
        self._engine: subprocess.Popen[bytes] | None = None
        self._service: subprocess.Popen[bytes] | None = None

    def start_engine(self) -> None:
        """Returns when it listens."""
        command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "tiny", "--exit-with-parent"]
        command += ["--port", str(self.engine_port), "--max-num-seqs", str(self._sizes.slots)]
        command += ["--output-tokens", f"fixed:{TOKENS}", "--weights-ms", str(self._sizes.weights_ms)]
        command += ["--request-log", str(self.log)]
        self._engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._engine.stdout is not None and self._engine.stdout.readline()

    def start_service(self) -> None:
        """Returns when it answers."""
        records = self._sizes.records or f"sqlite:///{self.folder / 'records' / 'api.db'}"
        (self.folder / "records").mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "DAGSTER_HOME": str(self.folder / "home"),
            "BATCH_ASSETS_STORE": str(self.folder / "store"),
            "BATCH_ASSETS_API_DB": records,
        }
        command = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", str(self.port)]
        command += ["--endpoint", f"http://127.0.0.1:{self.engine_port}", "--max-num-seqs", str(self._sizes.slots)]
        with (self.folder / "log").open("ab") as log:
            self._service = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
        until = time.monotonic() + 120
        while self.call("GET", "/readyz", quiet=True) is None:
            if self._service.poll() is not None or time.monotonic() > until:
                raise SystemExit((self.folder / "log").read_text()[-3000:])
            time.sleep(0.02)

    def end_engine(self) -> None:
        """kill -9."""
        if self._engine is not None:
            with self._engine:  # closes its pipes
                self._engine.kill()
            self._engine = None

    def end_service(self, number: int) -> None:
        """A signal, and its end."""
        assert self._service is not None
        self._service.send_signal(number)
        self._service.wait(60)

    def close(self) -> None:
        """Nothing is left."""
        self.end_engine()
        if self._service is not None and self._service.poll() is None:
            self.end_service(signal.SIGKILL)

    def call(
        self, method: str, path: str, body: Any = None, *, quiet: bool = False, headers: Mapping[str, str] | None = None
    ) -> Any:
        """JSON of the service; None: it does not answer (`quiet`)."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, dict(headers or {}), method=method
        )
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            if quiet:
                return None
            raise

    def upload(self, content: bytes) -> str:
        """Id of a new input file."""
        parts = [b'name="purpose"\r\n\r\nbatch', b'name="file"; filename="in.jsonl"\r\n\r\n' + content]
        form = b"".join(b"--x\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + b"--x--\r\n"
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/files", form)
        request.add_header("Content-Type", "multipart/form-data; boundary=x")
        with urllib.request.urlopen(request, timeout=300) as answer:
            return str(json.load(answer)["id"])

    def lines(self, file_id: str | None) -> Iterator[Any]:
        """The lines of a file."""
        if file_id is not None:
            address = f"http://127.0.0.1:{self.port}/v1/files/{file_id}/content"
            with urllib.request.urlopen(address, timeout=300) as answer:
                yield from map(json.loads, answer)


def input_of(batch: int, lines: int) -> bytes:
    """The input file of one batch."""
    rows = []
    for number in range(lines):
        messages = [{"role": "user", "content": f"say {batch} {number}"}]
        body = {"model": "tiny", "messages": messages}
        rows.append(json.dumps({"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}))
    return "\n".join(rows).encode()


def create(parts: Parts, sizes: Sizes) -> list[str]:
    """All batches; the first one's create is sent twice, its first answer unread."""
    made = []
    for number in range(sizes.batches):
        asked = {"endpoint": CHAT, "completion_window": "24h"}
        asked["input_file_id"] = parts.upload(input_of(number, sizes.lines // sizes.batches))
        again: dict[str, str] = {}
        if number == 0:
            body = json.dumps(asked).encode()
            head = f"POST /v1/batches HTTP/1.1\r\nHost: 127.0.0.1:{parts.port}\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", parts.port)) as lost:
                lost.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                lost.recv(1)
            again = {"x-stainless-retry-count": "1"}
        made.append(parts.call("POST", "/v1/batches", asked, headers=again)["id"])
    return made


class Watch:
    """Polls the batches: counts, and states that may not be."""

    def __init__(self, parts: Parts, batches: list[str], verdict: Verdict) -> None:
        self._parts, self._batches, self._verdict = parts, batches, verdict
        self._seen: dict[str, tuple[int, int]] = {}
        self.done = 0
        self.ended = False

    def look(self) -> None:
        """One look at all of them."""
        states, done = [], 0
        for name in self._batches:
            batch = self._parts.call("GET", f"/v1/batches/{name}", quiet=True)
            if batch is None:
                return
            counts = (batch["request_counts"]["completed"], batch["request_counts"]["failed"])
            before = self._seen.get(name, (0, 0))
            if counts[0] < before[0] or counts[1] < before[1]:
                self._verdict.wrong.append(f"{name}: counts fell from {before} to {counts}")
            if batch["status"] in ("failed", "expired", "cancelled"):
                self._verdict.wrong.append(f"{name}: {batch['status']}")
            self._seen[name] = counts
            states.append(batch["status"])
            done += sum(counts)
        self.done, self.ended = done, all(state in ("completed", "failed", "expired", "cancelled") for state in states)


def fault(parts: Parts, kind: str, sizes: Sizes, rng: random.Random) -> Fault:
    """End a part, and bring it back."""
    ended = time.time()
    if kind.startswith("service"):
        parts.end_service(signal.SIGTERM if kind.endswith("SIGTERM") else signal.SIGKILL)
        if kind.endswith("lost"):
            shutil.rmtree(parts.folder / "home")
        time.sleep(rng.uniform(0, 1))
        parts.start_service()
    elif kind == "store away":
        (parts.folder / "store").rename(parts.folder / "away")
        time.sleep(sizes.store_away)
        (parts.folder / "away").rename(parts.folder / "store")
    else:
        parts.end_engine()
        time.sleep(sizes.engine_away if kind == "engine away" else rng.uniform(0.2, 2))
        parts.start_engine()
    return Fault(kind, ended, time.time())


def faults_of(sizes: Sizes, rng: random.Random) -> list[tuple[int, str]]:
    """(lines done, kind): each kind in turn, in random order, and once the engine away for long."""
    kinds = [KINDS[number % len(KINDS)] for number in range(sizes.faults - 1)] + ["engine away"]
    rng.shuffle(kinds)
    points = sorted(rng.uniform(0.02, 0.9) for _ in kinds)
    return [(int(point * sizes.lines), kind) for point, kind in zip(points, kinds, strict=True)]


def run(folder: Path, sizes: Sizes, say: bool = False) -> Verdict:
    """Everything: the work, the faults, the verdict."""
    rng, verdict = random.Random(sizes.seed), Verdict(lines=sizes.lines)
    parts, happened = Parts(folder, sizes), []
    try:
        parts.start_engine()
        parts.start_service()
        began = time.monotonic()
        batches = create(parts, sizes)
        watch = Watch(parts, batches, verdict)
        for point, kind in faults_of(sizes, rng):
            while watch.done < point and not watch.ended and time.monotonic() - began < LONGEST_SECONDS:
                watch.look()
                time.sleep(0.1)
            happened.append(fault(parts, kind, sizes, rng))
            if say:
                print(f"{time.monotonic() - began:7.1f} s  {watch.done:8,} lines  {kind}", flush=True)
        while not watch.ended and time.monotonic() - began < LONGEST_SECONDS:
            watch.look()
            time.sleep(0.1)
        verdict.seconds = time.monotonic() - began
        judge_files(parts, batches, sizes, verdict)
    finally:
        parts.close()
    judge_log(parts.log, happened, verdict, sizes.goes_on)
    return verdict


def judge_files(parts: Parts, batches: list[str], sizes: Sizes, verdict: Verdict) -> None:
    """Output and error lines are the input's, each once, none an error."""
    expected = {f"r{number}" for number in range(sizes.lines // sizes.batches)}
    listed = parts.call("GET", "/v1/batches?limit=100")["data"]
    if len(listed) != sizes.batches or len(set(batches)) != sizes.batches:
        verdict.wrong.append(f"expected {sizes.batches} batches, found {len(listed)}")
    for name in batches:
        batch = parts.call("GET", f"/v1/batches/{name}")
        good = Counter(line["custom_id"] for line in parts.lines(batch["output_file_id"]))
        bad = Counter(line["custom_id"] for line in parts.lines(batch["error_file_id"]))
        both = good + bad
        if batch["status"] != "completed" or set(both) != expected or max(both.values(), default=0) > 1:
            verdict.wrong.append(f"{name}: {batch['status']}, {len(both)} ids, at most {max(both.values(), default=0)}")
        if bad:
            verdict.wrong.append(f"{name}: {len(bad)} error lines")


def judge_log(log: Path, happened: list[Fault], verdict: Verdict, goes_on_seconds: float) -> None:
    """Lines that were asked again, beside those in flight at the faults; how soon requests came again."""
    began: dict[tuple[int, int], tuple[float, str]] = {}
    life, last, spans = 0, 0, []
    for text in log.read_text().splitlines():
        event = json.loads(text)
        number = event["request"]
        if event["event"] == "received":
            if number <= last:
                life += 1  # the engine was started anew
            last = number
            began[life, number] = (event["t"], event["prompt"])
        elif (begin := began.pop((life, number), None)) is not None and event.get("completion_tokens") != 1:
            spans.append((*begin, event["t"]))
    spans += [(at, prompt, float("inf")) for at, prompt in began.values()]
    asked = Counter(prompt for _, prompt, _ in spans)
    verdict.asked_again = sum(asked.values()) - len(asked)
    received = sorted(at for at, _, _ in spans)
    for one, following in zip(happened, [*happened[1:], None], strict=True):
        if one.kind != "store away":
            verdict.in_flight += sum(at <= one.ended < end for at, _, end in spans)
        end = float("inf") if following is None else following.ended
        after = next((at for at in received if one.back <= at < end), end)
        if after == float("inf"):
            continue  # all was done by then
        took = after - one.back
        if after < end:
            verdict.goes_on.setdefault(one.kind, []).append(round(took, 2))
        if took > goes_on_seconds:
            verdict.wrong.append(f"{one.kind}: it had not gone on after {took:.1f} s")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--faults", type=int, default=11)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--weights-ms", type=float, default=8.0)
    parser.add_argument("--store-away", type=float, default=6.0)
    parser.add_argument("--engine-away", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    parser.add_argument("--postgres", dest="records")
    parser.add_argument("--spare", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    asked = vars(parser.parse_args())
    spare, keep = asked.pop("spare"), asked.pop("keep")
    folder = Path(tempfile.mkdtemp(prefix="front-door-kills-"))
    verdict = run(folder, Sizes(**asked), say=True)
    if verdict.asked_again > verdict.in_flight + spare:
        verdict.wrong.append(f"{verdict.asked_again} lines asked again, {verdict.in_flight} in flight at the faults")
    print(json.dumps({"seed": asked["seed"], **asdict(verdict)}, indent=1))
    if keep:
        print(folder)
    else:
        shutil.rmtree(folder)
    sys.exit(1 if verdict.wrong else 0)


if __name__ == "__main__":
    main()
