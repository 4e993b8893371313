"""The same script with OpenAI's client: JSON lines, as answers come. A second start begins anew."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletionMessageParam


async def answer_all(task: dict[str, Any], lines: TextIO, out: TextIO) -> None:
    """All rows."""
    rows = map(json.loads, lines)
    http = DefaultAsyncHttpxClient(timeout=600)
    async with AsyncOpenAI(base_url=f"{task['url']}/v1", api_key="none", http_client=http, max_retries=4) as client:

        async def work() -> None:
            for row in rows:
                messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": row["user"]}]
                if row["system"]:
                    messages.insert(0, {"role": "system", "content": row["system"]})
                answer = await client.chat.completions.create(
                    model=task["model"], messages=messages, max_tokens=task["max_tokens"], temperature=0.0
                )
                out.write(json.dumps({"id": row["id"], "output": answer.choices[0].message.content}) + "\n")

        await asyncio.gather(*(work() for _ in range(task["in_flight"])))


def main() -> None:
    """Entry point."""
    task = json.loads(Path(sys.argv[1]).read_text())
    with Path(task["rows"]).open() as lines, (Path(task["folder"]) / "answers.jsonl").open("w") as out:
        asyncio.run(answer_all(task, lines, out))
        out.flush()
        os.fsync(out.fileno())


if __name__ == "__main__":
    main()
