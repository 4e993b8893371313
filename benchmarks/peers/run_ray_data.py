"""Ray Data LLM: its HTTP processor from JSON lines to Parquet, with Ray's checkpoints of row ids."""

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.data.checkpoint import CheckpointConfig
from ray.data.llm import HttpRequestProcessorConfig, build_processor


def main() -> None:
    """Entry point."""
    task = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(task["folder"])
    # More CPUs than the machine has: an actor and each task of the pipeline holds one, and mostly waits.
    ray.init(num_cpus=8, include_dashboard=False, _temp_dir=str(folder / "ray"), log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(folder / "checkpoint"), delete_checkpoint_on_success=False
    )

    def request(row: dict[str, Any]) -> dict[str, Any]:
        system = [{"role": "system", "content": row["system"]}] if row["system"] else []
        messages = [*system, {"role": "user", "content": row["user"]}]
        body = {"model": task["model"], "max_tokens": task["max_tokens"], "temperature": 0.0, "messages": messages}
        return {"payload": body, "id": row["id"]}

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "output": row["http_response"]["choices"][0]["message"]["content"]}

    config = HttpRequestProcessorConfig(
        url=f"{task['url']}/v1/chat/completions", qps=None, max_retries=4, batch_size=8, concurrency=1
    )
    process = build_processor(config, preprocess=request, postprocess=answer)
    rows = ray.data.read_json(task["rows"], override_num_blocks=4)
    process(rows).write_parquet(str(folder / "table"))


if __name__ == "__main__":
    main()
