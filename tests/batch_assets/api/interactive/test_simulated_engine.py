"""What a demo can show without a GPU: streams of several choices, tool calls and responses, through the front door."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import orjson
from support.api_service import settings_of
from support.front_doors import front_door_alone
from support.simulated_engine import simulated_engine

MESSAGES = [{"role": "user", "content": "What is the weather?"}]
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 2, "temperature": 1}),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    ),
    ("/v1/responses", {"input": "Say hello"}),
)


def events(text: str) -> list[dict[str, Any]]:
    """The objects of a stream."""
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {"))
    return [orjson.loads(line) for line in lines]


def test_the_front_door_passes_streams_of_choices_tool_calls_and_responses(tmp_path: Path) -> None:
    async def steps(url: str) -> None:
        service = front_door_alone(settings_of(tmp_path, url))
        transport = httpx.ASGITransport(service.app)
        async with (
            service.inner.router.lifespan_context(service.inner),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client,
        ):
            found = []
            for path, body in BODIES:
                answers = [await client.post(path, json={"model": "m", **body, "stream": on}) for on in (False, True)]
                assert [one.status_code for one in answers] == [200, 200]
                found.append((answers[0].json(), events(answers[1].text)))
        (chat, choices), (called, calls), (response, typed) = found
        for choice in chat["choices"]:
            deltas = [one for event in choices for one in event["choices"] if one["index"] == choice["index"]]
            assert "".join(one["delta"].get("content") or "" for one in deltas) == choice["message"]["content"]
        parts = [one["delta"].get("tool_calls", [{}])[0] for event in calls for one in event["choices"]]
        arguments = "".join(part.get("function", {}).get("arguments", "") for part in parts)
        assert arguments == called["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
        assert typed[-1]["type"] == "response.completed" and typed[-1]["response"]["output"][0]["content"]
        assert typed[-1]["response"]["usage"] == response["usage"]

    with simulated_engine("--speed", "50", "--output-tokens", "fixed:6", model="m") as engine:
        asyncio.run(steps(engine.url))
