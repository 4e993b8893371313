"""The audit log: whole lines, bounded files, nothing lost at a kill, nothing of contents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import orjson
import pytest

from batch_assets.api.access.audit import AuditEvent, AuditLog, known_ids, worth_keeping


def event(number: int = 0) -> AuditEvent:
    return AuditEvent(1.5, f"req_{number}", "acme", "key_1", "DELETE", "/v1/files/{file_id}", ("file-1",), 200, 0.001)


def lines(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_a_line_says_who_did_what_to_which_object(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path) as log:
        log.write(event())
    assert lines(path) == [
        {
            "at": 1.5,
            "request_id": "req_0",
            "tenant": "acme",
            "key_id": "key_1",
            "method": "DELETE",
            "route": "/v1/files/{file_id}",
            "objects": ["file-1"],
            "status": 200,
            "seconds": 0.001,
            "reason": None,
        }
    ]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_end_brings_the_last_lines_to_the_disk(tmp_path: Path) -> None:
    path, synced, first = tmp_path / "audit.jsonl", list[int](), threading.Event()

    def sync(file: int) -> None:
        synced.append(os.fstat(file).st_size)
        first.set()

    with AuditLog(path, sync=sync, sync_seconds=3600) as log:
        log.write(event())
        assert first.wait(60)
        log.write(event(1))
    assert synced[-1] == path.stat().st_size and len(lines(path)) == 2


def test_the_files_are_bounded_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path, most_bytes=1000, files=3) as log:
        for number in range(100):
            log.write(event(number))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(file.stat().st_size <= 1000 for file in files)
    kept = [line["request_id"] for file in reversed(files) for line in lines(file)]
    assert kept == [f"req_{number}" for number in range(100 - len(kept), 100)]


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"at": 1')
    with AuditLog(path) as log:
        log.write(event())
    assert path.read_bytes().splitlines()[0] == b'{"at": 1'
    assert orjson.loads(path.read_bytes().splitlines()[1])["request_id"] == "req_0"


def test_a_full_disk_fails_no_request_and_is_counted(tmp_path: Path) -> None:
    with AuditLog(Path("/dev/full"), most_bytes=1 << 60) as log:
        log.write(event())
        log.write(event())
    assert log.lost == 2


def test_every_line_that_was_written_survives_a_kill(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from batch_assets.api.access.audit import AuditEvent, AuditLog\n"
        "with AuditLog(Path(sys.argv[1])) as log:\n"
        "    for n in range(10**9):\n"
        "        log.write(AuditEvent(0, f'req_{n}', 'a', None, 'POST', '/v1/batches', (), 200, 0))\n"
        "        sys.stdout.write(f'{n}\\n'); sys.stdout.flush()\n"
    )
    path = tmp_path / "audit.jsonl"
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(200)]
    os.kill(process.pid, signal.SIGKILL)
    said += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    last = int([line for line in said if line.endswith("\n")][-1])
    written = [line["request_id"] for line in lines(path)]
    assert written == [f"req_{number}" for number in range(len(written))]
    assert last < len(written) <= last + 2


@pytest.mark.parametrize(
    ("method", "route", "status", "kept"),
    [
        ("GET", "/v1/batches/{batch_id}", 200, False),
        ("GET", "/v1/batches/{batch_id}", 404, True),
        ("GET", "/v1/files/{file_id}/content", 200, True),
        ("POST", "/v1/batches", 200, True),
        ("DELETE", "/v1/files/{file_id}", 200, True),
        ("GET", "/healthz", 503, False),
    ],
)
def test_reads_of_states_are_not_audited(method: str, route: str, status: int, kept: bool) -> None:
    assert worth_keeping(method, route, status) is kept


def test_what_is_no_id_is_not_written_down() -> None:
    assert known_ids(["file-abc123", "batch_1", "my secret prompt", "a" * 500, "../x", "file-a b"]) == (
        "file-abc123",
        "batch_1",
    )
