"""What the page of `batch-assets view` asks, without a browser."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from batch_assets.viewer.app import Viewer
from batch_assets.viewer.tables import Tables


class ViewerPage:
    """Asks for the table of the dataset `sums`."""

    def __init__(self, tables: Tables, folder: Path) -> None:
        self._app = Viewer(tables, folder).app()
        self.table: dict[str, Any] = {"dataset": "sums"}

    def ask(self, path: str, **body: Any) -> httpx.Response:
        async def answer() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://viewer") as client:
                return await client.post(f"/api/{path}", json=body)

        return asyncio.run(answer())

    def __call__(self, path: str, **body: Any) -> Any:
        answer = self.ask(path, table=self.table, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ids(self, first: int = 0, rows: int = 50, **query: Any) -> list[str]:
        found = self("rows", query=query, columns=["row_id"], first=first, rows=rows)
        return [row_id for _, row_id in found["rows"]]

    def bars(self, column: str, **query: Any) -> dict[Any, int]:
        histogram = self("histogram", query=query, column=column)["histogram"]
        return {bar["value"] if bar["low"] is None else bar["low"]: bar["count"] for bar in histogram["bars"]}
