"""A caller who leaves in the middle of a request's body: no defect, no trace in the log, counted as 499."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from support.api_service import no_instance, settings_of
from support.asgi_calls import AsgiCall

from batch_assets.api import service
from batch_assets.api.front_door import build_front_door

UPLOAD = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{"custom'


@pytest.mark.parametrize(
    ("path", "part", "kind"),
    [
        ("/v1/chat/completions", b'{"model": "ti', "application/json"),
        ("/v1/inference", b'{"input": "he', "application/json"),
        ("/v1/batches", b'{"input_file_id": "fi', "application/json"),
        ("/v1/files", UPLOAD, "multipart/form-data; boundary=x"),
    ],
)
def test_who_leaves_in_the_middle_of_a_body_leaves_no_error_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str, part: bytes, kind: str
) -> None:
    async def scenario() -> str:
        monkeypatch.setattr(service, "_open_instance", no_instance)
        built = build_front_door(settings_of(tmp_path, "http://127.0.0.1:9"))
        async with built.inner.router.lifespan_context(built.inner):
            sent: list[dict[str, Any]] = [{"type": "http.request", "body": part, "more_body": True}]

            async def receive() -> dict[str, Any]:
                return sent.pop() if sent else {"type": "http.disconnect"}

            answered: list[dict[str, Any]] = []

            async def send(message: dict[str, Any]) -> None:
                answered.append(message)

            await built.app(AsgiCall(None, path, b"", {"content-type": kind}).scope, receive, send)
            assert [one.get("status", 499) for one in answered] in ([], [499, 499])
            metrics = AsgiCall(built.app, "/metrics", b"")
            metrics.scope["method"] = "GET"
            return (await metrics.run()).body.decode()

    with caplog.at_level(logging.INFO):
        metrics = asyncio.run(scenario())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert 'status="499"' in metrics
