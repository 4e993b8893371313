"""Many objects read or written at once, handed over in order. What is ahead is bounded in results and in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from resources.objects.opening import Objects

Job = TypeVar("Job")
Found = TypeVar("Found")

_AHEAD_BYTES = 64 << 20
_LOCAL_THREADS, _REMOTE_THREADS = 4, 8


def threads_for(objects: Objects) -> int:
    """How many readers of whole batches: parsing bounds them on a local disk, memory on S3 (about 30 MB a thread)."""
    return _REMOTE_THREADS if "://" in objects.root else _LOCAL_THREADS


def read_ahead(
    read: Callable[[Job], Found], jobs: Iterable[Job], threads: int, size: Callable[[Job], int] = lambda job: 0
) -> Iterator[Found]:
    """`map(read, jobs)` with up to `threads` + 2 results read ahead of the consumer, in order.

    `size`: about how many bytes the result of a job takes. Results of more than 64 MiB are not read ahead together.
    The first error of a job is raised at its place; what is still waiting then is dropped.
    """
    source = iter(jobs)
    waiting: deque[tuple[Future[Found], int]] = deque()
    held = 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="scan")
    try:
        job = next(source, None)
        while waiting or job is not None:
            while job is not None and len(waiting) < threads + 2:
                if waiting and held + size(job) > _AHEAD_BYTES:
                    break
                waiting.append((pool.submit(read, job), size(job)))
                held += size(job)
                job = next(source, None)
            future, freed = waiting.popleft()
            found = future.result()
            held -= freed
            yield found
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
