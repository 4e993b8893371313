"""The queue of online requests alone: tasks accepted, claimed and answered a second, in one process.

    python benchmarks/online_queue.py [--tasks 5000] [--at-once 256]

Both queues, each task durable when it is accepted and its result when it is stored: the SQLite file, and a redis-server
of this machine with `appendfsync always`. Seconds are of the wall clock, CPU is that of this process per task; last,
that of Redis' one thread of commands per task, which is accepted, claimed, answered and read while others are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batch_assets.api.online.queues.embedded import EmbeddedQueue
from batch_assets.api.online.queues.queue_protocol import TaskQueue, new_task_id
from batch_assets.api.online.queues.redis_streams import RedisQueue
from batch_assets.api.online.queues.tasks import OnlineTask, TaskKind, TaskResult, TaskStatus

BODY = b'{"model":"tiny","messages":[{"role":"user","content":"' + b"x" * 500 + b'"}]}'


def a_task(number: int) -> OnlineTask:
    """A chat of one of seven tenants."""
    tenant = f"tenant-{number % 7}"
    task_id = new_task_id(tenant, None)
    return OnlineTask(task_id, tenant, "c", "tiny", TaskKind.CHAT, BODY, time.time(), 600.0, False, 100, "")


def a_result() -> TaskResult:
    """Its answer."""
    return TaskResult(TaskStatus.SUCCESS, time.time(), output=b'"' + b"y" * 500 + b'"')


async def measure(name: str, queue: TaskQueue, tasks: int, at_once: int) -> None:
    """One queue: accept all, then claim and answer all."""
    numbers = iter(range(tasks))

    async def accept() -> None:
        for number in numbers:
            await queue.append(a_task(number))

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(accept() for _ in range(at_once)))
    took, spent = time.perf_counter() - began, time.process_time() - cpu
    print(f"{name}: {tasks / took:,.0f} accepted/s, {1e6 * spent / tasks:.0f} us CPU each")
    began, cpu, done = time.perf_counter(), time.process_time(), 0
    while done < tasks:
        claims = await queue.claim("one", at_once, 1.0)
        done += sum(await asyncio.gather(*(queue.acknowledge(claim, a_result()) for claim in claims)))
    took, spent = time.perf_counter() - began, time.process_time() - cpu
    print(f"{name}: {tasks / took:,.0f} claimed and answered/s, {1e6 * spent / tasks:.0f} us CPU each")


async def measure_thread(url: str, tasks: int, at_once: int) -> None:
    """What a task costs the one thread of a Redis, with so many callers that each wait for their answer."""
    accepting, consuming, numbers = RedisQueue(url, time.time), RedisQueue(url, time.time), iter(range(tasks))

    async def used() -> float:
        found = await accepting.commands.client.info("cpu")
        return float(found["used_cpu_user_main_thread"] + found["used_cpu_sys_main_thread"])

    async def call() -> None:
        for number in numbers:
            await accepting.append(asked := a_task(number))
            found = await accepting.look(asked.task_id, 60.0, asked.tenant)
            if found is None or found.result is None:
                raise SystemExit(f"{asked.task_id}: expected a result within a minute, found none")

    async def consume() -> None:
        done = 0
        async with asyncio.TaskGroup() as group:
            while done < tasks:
                for claim in await consuming.claim("one", at_once, 1.0):
                    group.create_task(consuming.acknowledge(claim, a_result()))
                    done += 1

    before = await used()
    await asyncio.gather(consume(), *(call() for _ in range(at_once)))
    spent = await used() - before
    print(f"Redis' main thread, {at_once} at once: {1e6 * spent / tasks:.0f} us a task")
    await accepting.close()
    await consuming.close()


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A server with its append-only file: its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with subprocess.Popen(
        [*command, "--appendonly", "yes", "--appendfsync", "always"], stdout=subprocess.DEVNULL
    ) as process:
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


async def run(tasks: int, at_once: int, folder: Path) -> None:
    """Both."""
    embedded: Any = EmbeddedQueue(folder, time.time)
    await embedded.open()
    await measure("SQLite file", embedded, tasks, at_once)
    await embedded.close()
    with redis_server(folder) as url:
        shared = RedisQueue(url, time.time)
        await measure("Redis Streams", shared, tasks, at_once)
        await shared.close()
        for callers in (128, 512):
            await measure_thread(url, tasks, callers)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=5_000)
    parser.add_argument("--at-once", type=int, default=256)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="online-queue-") as folder:
        asyncio.run(run(asked.tasks, asked.at_once, Path(folder)))


if __name__ == "__main__":
    main()
