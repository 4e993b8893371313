"""One service for all cases: ours with a simulated engine, or the one that BATCH_API_URL names.

BATCH_API_URL=http://127.0.0.1:8080 BATCH_API_MODEL=tiny python -m pytest -m slow tests/contract/openai_batches
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from support.batch_api import BatchApi
from support.served_door import ServedDoor
from support.simulated_engine import simulated_engine

if TYPE_CHECKING:  # half a second, also where no slow test runs
    import openai

ENGINE = ("--max-num-seqs", "64", "--max-model-len", "4096")
LARGEST_FILE = 4_000_000


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchApi]:
    """Calls of the service."""
    if url := os.environ.get("BATCH_API_URL"):
        model, key = os.environ.get("BATCH_API_MODEL", "tiny"), os.environ.get("BATCH_API_KEY", "none")
        with contextlib.closing(BatchApi(url, model, key)) as found:
            yield found
        return
    limits = {"BATCH_ASSETS_API_MAX_LINES": "20000", "BATCH_ASSETS_API_MAX_FILE_BYTES": str(LARGEST_FILE)}
    with simulated_engine(*ENGINE) as engine:
        door = ServedDoor(tmp_path_factory.mktemp("door"), engine.url, 64, limits)
        try:
            door.start()
            with contextlib.closing(BatchApi(door.url)) as found:
                yield found
        finally:
            door.close()


@pytest.fixture(scope="session")
def client(api: BatchApi) -> Iterator[openai.OpenAI]:
    """The stock client, as scripts use it."""
    import openai

    with openai.OpenAI(base_url=f"{api.base}/v1", api_key=api.key) as stock:
        yield stock


@pytest.fixture(scope="session")
def done(api: BatchApi) -> dict[str, Any]:
    """A completed batch of ten lines."""
    return api.ended(api.chats(10), metadata={"a": "b"})
