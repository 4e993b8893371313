"""Bespoke Curator: an LLM class over rows, OpenAI's API as its backend; a second start goes on from its cache."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bespokelabs import curator


class Answers(curator.LLM):  # type: ignore[misc]
    """A prompt for each row, and its answer."""

    def prompt(self, row: dict[str, Any]) -> list[dict[str, str]]:
        """The chat."""
        system = [{"role": "system", "content": row["system"]}] if row["system"] else []
        return [*system, {"role": "user", "content": row["user"]}]

    def parse(self, row: dict[str, Any], response: str) -> dict[str, str]:
        """One line of the dataset."""
        return {"id": row["id"], "output": response}


def main() -> None:
    """Entry point."""
    task = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(task["folder"])
    rows = [json.loads(line) for line in Path(task["rows"]).read_text().splitlines()]
    no_limit = 1_000_000_000
    tokens = find_spec("litellm")  # has the encoding that Curator counts with, and would download
    assert tokens is not None and tokens.origin is not None
    os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(tokens.origin).parent / "litellm_core_utils" / "tokenizers")
    llm = Answers(
        model_name=task["model"],
        backend="openai",
        generation_params={"temperature": 0.0, "max_tokens": task["max_tokens"]},
        backend_params={
            "base_url": f"{task['url']}/v1",
            "api_key": "none",
            "max_requests_per_minute": no_limit,
            "max_tokens_per_minute": no_limit,
            "max_concurrent_requests": task["in_flight"],
            "invalid_finish_reasons": ["content_filter"],
        },
    )
    answers = llm(rows, working_dir=str(folder / "cache"))
    (folder / "table").mkdir(exist_ok=True)
    answers.dataset.to_parquet(str(folder / "table" / "answers.parquet"))


if __name__ == "__main__":
    main()
