"""datatrove's InferenceRunner: rows in flight over an endpoint, with its checkpoints and its cache of requests."""

import json
import sys
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceResult, InferenceRunner
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter


async def rollout(document: Document, generate: Any) -> InferenceResult:
    """One request for one document."""
    system = document.metadata.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    return await generate({"messages": [*messages, {"role": "user", "content": document.text}]})


def main() -> None:
    """Entry point."""
    task = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(task["folder"])
    config = InferenceConfig(
        server_type="endpoint",
        endpoint_url=task["url"],
        model_name_or_path=task["model"],
        default_generation_params={"temperature": 0.0, "max_tokens": task["max_tokens"]},
        max_concurrent_generations=task["in_flight"],
    )
    runner = InferenceRunner(
        rollout,
        config,
        JsonlWriter(str(folder / "output"), output_filename="${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir=str(folder / "checkpoints"),
        records_per_chunk=500,
    )
    source = Path(task["rows"])
    reader = JsonlReader(str(source.parent), glob_pattern=source.name, text_key="user")
    LocalPipelineExecutor([reader, runner], tasks=1, logging_dir=str(folder / "logs")).run()


if __name__ == "__main__":
    main()
