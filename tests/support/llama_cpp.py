"""A llama.cpp server process for tests: `with llama_cpp_server(gguf, "tiny") as engine: engine.endpoint`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_runner.providers.engine_process import EngineProcess

START_SECONDS = 60


@contextmanager
def llama_cpp_server(gguf: Path, model: str, *flags: str) -> Iterator[EngineProcess]:
    """Serve a GGUF file under a name, as a run starts it; ended with its guard."""
    command = [sys.executable, "-m", "gpu_runner.providers.llama_cpp_server", "--gguf", str(gguf)]
    command += ["--model", "{model}", "--port", "{port}", *flags]
    with tempfile.TemporaryDirectory() as folder:
        process = EngineProcess(command, model=model, log=Path(folder) / "log", environment=dict(os.environ))
        try:
            process.wait_ready(START_SECONDS)
            yield process
        finally:
            process.close()
