"""A llama.cpp server as a process: `python -m gpu_runner.providers.llama_cpp_server --gguf FILE --model NAME --port N`.

The server is the one inside the wheel `xllamacpp`, which has no program of its own to start it. It speaks the OpenAI
API on 127.0.0.1, in threads of its own; this process only waits. What a client leaves out of `sampling` is as with
vLLM: temperature 1, and no top_k, top_p or min_p (llama.cpp's own are 0.8, 40, 0.95 and 0.05).
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import Any

from gpu_runner.client.llama_cpp import DEFAULT_CONTEXT

DEFAULT_SLOTS = 16
# Tokens of a prompt that are computed in one step. While a step runs the server answers no page, so a slow processor
# must not take on thousands at once.
STEP_TOKENS = 256
# A connection holds a thread of the server. A run keeps four requests per slot open, and two runs may meet here.
THREADS_PER_SLOT = 8
SPARE_THREADS = 16


def arguments(argv: list[str]) -> argparse.Namespace:
    """Read and check the command line; leaves with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m gpu_runner.providers.llama_cpp_server", description=__doc__)
    add = parser.add_argument
    add("--gguf", type=Path, required=True, help="the model's file")
    add("--model", required=True, help="the name to serve it under")
    add("--port", type=int, required=True)
    add("--slots", type=int, default=DEFAULT_SLOTS, help="rows at once")
    add("--context", type=int, default=DEFAULT_CONTEXT, help="tokens of one row, prompt and answer")
    add("--threads", type=int, default=default_threads(), help="threads that compute")
    add("--embedding", action="store_true", help="vectors, and no text")
    add("--pooling", choices=("model", "mean", "cls", "last"), default="model", help="how tokens become one vector")
    add("--api-key-env", metavar="VAR", help="ask for the API key that this environment variable holds")
    args = parser.parse_args(argv)
    if not args.gguf.is_file():
        parser.error(f"--gguf: expected a file, found none at {args.gguf}")
    for name in ("slots", "context", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected 1 or more, found {getattr(args, name)}")
    if args.api_key_env and not os.environ.get(args.api_key_env):
        parser.error(f"--api-key-env: the environment variable {args.api_key_env} is not set")
    return args


def default_threads() -> int:
    """One core is left free: threads that wait for each other spin, and the rest of the machine has work too."""
    return max(1, len(os.sched_getaffinity(0)) - 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 2) - 1)


def parameters(args: argparse.Namespace) -> Any:
    """llama.cpp's parameters."""
    from xllamacpp import CommonParams, llama_pooling_type

    found = CommonParams()
    found.model.path = str(args.gguf)
    found.model_alias = {args.model}
    found.model_tags = {f"xllamacpp-{version('xllamacpp')}"}
    found.hostnames, found.port = ["127.0.0.1"], args.port
    found.n_parallel, found.n_ctx = args.slots, args.slots * args.context
    found.n_threads_http = THREADS_PER_SLOT * args.slots + SPARE_THREADS
    found.cpuparams.n_threads = args.threads
    found.n_gpu_layers = 0
    # A prompt to embed is computed in one step, whatever its length.
    found.n_batch = found.n_ubatch = args.context if args.embedding else min(STEP_TOKENS, args.context)
    found.endpoint_metrics, found.endpoint_slots, found.ui = True, False, False
    found.cors_origins = ""  # no page in a browser has business here
    found.embedding = args.embedding
    if args.pooling != "model":
        found.pooling_type = getattr(llama_pooling_type, f"LLAMA_POOLING_TYPE_{args.pooling.upper()}")
    if args.api_key_env:
        found.api_keys = [os.environ[args.api_key_env]]
    sampling = found.sampling
    sampling.temp, sampling.top_k, sampling.top_p, sampling.min_p = 1.0, 0, 1.0, 0.0
    return found


def main() -> None:
    """Serve until a signal ends the process."""
    args = arguments(sys.argv[1:])
    try:
        from xllamacpp import Server
    except ImportError as error:
        sys.exit(f"llama.cpp: expected the package xllamacpp, found: {error}; install batch-assets[cpu]")
    try:
        server = Server(parameters(args))
    except RuntimeError as error:
        sys.exit(f"llama.cpp: {args.gguf} cannot be served: {error}")
    print(f"llama.cpp serves {args.model} at {server.listening_address}", flush=True)
    Event().wait()


if __name__ == "__main__":
    main()
