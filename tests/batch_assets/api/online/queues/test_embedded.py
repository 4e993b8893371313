"""The queue of one process where its folder cannot be used."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from batch_assets.api.online.queues.embedded import LOCK, EmbeddedQueue
from batch_assets.api.online.queues.queue_protocol import QueueAway


def test_a_folder_that_cannot_be_used_is_said_once_and_used_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        queue = EmbeddedQueue(tmp_path, time.time)
        (tmp_path / LOCK).mkdir()  # no file can be opened there
        for _ in range(20):
            with pytest.raises(QueueAway):
                await queue.sweep()
        assert [record.getMessage() for record in caplog.records] == [
            "online queue: its folder cannot be used: Is a directory"
        ]
        (tmp_path / LOCK).rmdir()
        await queue.sweep()
        assert (await queue.depth()).unanswered == 0
        await queue.close()

    with caplog.at_level("WARNING"):
        asyncio.run(scenario())
