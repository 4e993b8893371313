"""NeMo Data Designer: one text column over seed rows, Parquet of row groups; a second start resumes behind the last."""

import json
import sys
from pathlib import Path

import data_designer.config as dd
from data_designer.interface import DataDesigner


def main() -> None:
    """Entry point."""
    task = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(task["folder"])
    parameters = dd.ChatCompletionInferenceParams(
        temperature=0.0, max_tokens=task["max_tokens"], max_parallel_requests=task["in_flight"], timeout=600
    )
    model = dd.ModelConfig(alias="model", model=task["model"], provider="local", inference_parameters=parameters)
    provider = dd.ModelProvider(name="local", endpoint=f"{task['url']}/v1", api_key="none")
    lines = Path(task["rows"]).read_text().splitlines()
    system = "{{ system }}" if json.loads(lines[0])["system"] else None
    builder = dd.DataDesignerConfigBuilder(model_configs=[model])
    builder.with_seed_dataset(dd.LocalFileSeedSource(path=task["rows"]))
    builder.add_column(
        dd.LLMTextColumnConfig(name="output", prompt="{{ user }}", system_prompt=system, model_alias="model")
    )
    designer = DataDesigner(artifact_path=folder / "table", model_providers=[provider])
    designer.set_run_config(
        dd.RunConfig(max_in_flight_tasks=task["in_flight"], otel_metrics_port=None, disable_early_shutdown=True)
    )
    designer.create(builder, num_records=len(lines), dataset_name="answers", resume=dd.ResumeMode.IF_POSSIBLE)


if __name__ == "__main__":
    main()
