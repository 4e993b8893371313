"""The script that people write: aiohttp, a bound on what is in flight, JSON lines; with "durable" it goes on.

Without, answers are written as they come, and a second start begins anew. With it, answers are flushed to the disk
(`fsync`) every half second, and a second start skips the ids that the file has.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import aiohttp

TRIES = 4


async def ask(client: aiohttp.ClientSession, task: dict[str, Any], row: dict[str, str]) -> str:
    """The answer to one row."""
    system = [{"role": "system", "content": row["system"]}] if row["system"] else []
    messages = [*system, {"role": "user", "content": row["user"]}]
    body = {"model": task["model"], "max_tokens": task["max_tokens"], "temperature": 0.0, "messages": messages}
    for attempt in range(TRIES):
        try:
            async with client.post(f"{task['url']}/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                return str((await answer.json())["choices"][0]["message"]["content"])
        except aiohttp.ClientError:
            if attempt + 1 == TRIES:
                raise
            await asyncio.sleep(2**attempt)
    raise AssertionError


async def answer_all(task: dict[str, Any], rows: Iterator[dict[str, str]], out: TextIO, durable: bool) -> None:
    """All rows."""
    flushed = time.monotonic()
    limits, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout) as client:

        async def work() -> None:
            nonlocal flushed
            for row in rows:
                output = await ask(client, task, row)
                out.write(json.dumps({"id": row["id"], "output": output}) + "\n")
                if durable and time.monotonic() - flushed > 0.5:
                    out.flush()
                    os.fsync(out.fileno())
                    flushed = time.monotonic()

        await asyncio.gather(*(work() for _ in range(task["in_flight"])))


def kept(file: Path) -> set[str]:
    """The ids in the file, which is left without a half line."""
    if not file.exists():
        return set()
    whole = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    file.write_bytes(b"".join(whole))
    return {json.loads(line)["id"] for line in whole}


def main() -> None:
    """Entry point."""
    task, durable = json.loads(Path(sys.argv[1]).read_text()), "durable" in sys.argv[2:]
    file = Path(task["folder"]) / "answers.jsonl"
    done = kept(file) if durable else set()
    with Path(task["rows"]).open() as lines, file.open("a" if durable else "w") as out:
        rows = (row for line in lines if (row := json.loads(line))["id"] not in done)
        asyncio.run(answer_all(task, rows, out, durable))
        out.flush()
        os.fsync(out.fileno())


if __name__ == "__main__":
    main()
