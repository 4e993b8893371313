"""Many small reads of a store that answers slowly: some at once, their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

AT_ONCE = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(read: Callable[[Item], Result], items: Iterable[Item], at_once: int = AT_ONCE) -> Iterator[Result]:
    """`read` of each item, in order, `at_once` of them under way or waiting to be taken. Raises what it raises."""
    left = iter(items)
    begun = list(islice(left, 2))
    if len(begun) < 2:
        yield from map(read, begun)
        return
    with ThreadPoolExecutor(at_once, thread_name_prefix="store-reads") as pool:
        waiting: deque[Future[Result]] = deque(pool.submit(read, item) for item in begun)
        try:
            waiting.extend(pool.submit(read, item) for item in islice(left, at_once - len(begun)))
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(read, item) for item in islice(left, 1))
        finally:
            for future in waiting:
                future.cancel()
