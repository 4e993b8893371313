"""Command line of the simulated engine. Prints {"port": …, "url": …} as its first line when it is ready."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import orjson
from aiohttp import web

from gpu_runner.simulator.engine import Engine
from gpu_runner.simulator.generated_text import Lengths
from gpu_runner.simulator.replies import ResponseGenerator
from gpu_runner.simulator.request_log import RequestLog
from gpu_runner.simulator.scheduler import StepModel
from gpu_runner.simulator.scripted_faults import FaultPlan
from gpu_runner.simulator.server import MAX_BODY, SimulatorServer

# After SIGTERM: time for the answers that tell waiting clients.
GOODBYE_SECONDS = 0.1
# Options of vLLM that are taken, so that one command line starts either, and that change nothing here.
WITHOUT_EFFECT = (
    *("--reasoning-parser", "--tool-call-parser", "--quantization", "--kv-cache-dtype", "--dtype", "--tokenizer"),
    *("--chat-template", "--speculative-config", "--limit-mm-per-prompt", "--pipeline-parallel-size"),
)


def arguments(argv: list[str]) -> argparse.Namespace:
    """Read and check the command line; leaves with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m gpu_runner.simulator", description=__doc__)
    model = StepModel()
    add = parser.add_argument
    add("--model", required=True, help="the name to serve")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0: any free port")
    add("--max-num-seqs", type=int, default=model.max_num_seqs, help="slots")
    add("--max-num-batched-tokens", type=int, default=model.max_batched_tokens, help="tokens of one step")
    add("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs", help="as vLLM's option of this name")
    add("--max-model-len", type=int, default=4096, help="context in tokens")
    add("--kv-tokens", type=int, default=model.kv_tokens, help="KV cache in tokens")
    add("--weights-ms", type=float, default=model.weights_seconds * 1e3, help="reading all weights once")
    add("--token-us", type=float, default=model.token_seconds * 1e6, help="computing one token")
    add("--context-ns", type=float, default=model.context_seconds * 1e9, help="reading the KV of one token")
    add("--overhead-ms", type=float, default=model.overhead_seconds * 1e3, help="CPU work around one step")
    add("--speed", type=float, default=1.0, help="simulated seconds per second")
    add("--output-tokens", type=Lengths.parse, default="lognormal:128:1024", metavar="DISTRIBUTION")
    add("--embedding-dim", type=int, default=64)
    add("--seed", type=int, default=0, help="other texts and other victims of rate faults")
    add("--faults", default="[]", help="JSON list of rules, or a file that holds one: see faults.py")
    add("--request-log", type=Path, help="append one JSON line per request event: see request_log.py")
    add("--api-key-env", metavar="VAR", help="ask for the API key that this environment variable holds")
    keep_alive = float(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5"))
    add("--keep-alive-timeout", type=float, default=keep_alive, help="seconds until an idle connection is closed")
    add(
        "--event-loop", choices=("asyncio", "uvloop"), default="asyncio", help="uvloop, where it is installed: less CPU"
    )
    for option in WITHOUT_EFFECT:
        add(option, help="taken as vLLM's option of this name, without effect")
    add("--enable-lora", action="store_true", help="as vLLM's, without effect")
    add("--max-loras", type=int, help="as vLLM's, without effect")
    add("--max-lora-rank", type=int, help="as vLLM's, without effect")
    add(
        "--lora-modules", nargs="+", type=_adapter, default=[], metavar="JSON", help="as vLLM's: names served beside it"
    )
    add("--enable-auto-tool-choice", action="store_true", help="as vLLM's, without effect")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help="as vLLM's, without effect")
    add("--exit-with-parent", action="store_true", help="exit when standard input ends")
    args = parser.parse_args(argv)
    if args.speed <= 0:
        parser.error("--speed: expected a number above 0")
    if args.max_model_len > args.kv_tokens:
        parser.error(f"--max-model-len {args.max_model_len} does not fit a KV cache of {args.kv_tokens} tokens")
    if args.api_key_env and not os.environ.get(args.api_key_env):
        parser.error(f"--api-key-env: the environment variable {args.api_key_env} is not set")
    return args


def _adapter(text: str) -> tuple[str, str]:
    """Name and path of one of `--lora-modules`. Raises ValueError."""
    found = orjson.loads(text)
    return str(found["name"]), str(found["path"])


def build(args: argparse.Namespace) -> SimulatorServer:
    """The server that the command line describes. Raises ValueError for bad faults."""
    model = StepModel(
        max_num_seqs=args.max_num_seqs,
        max_batched_tokens=args.max_num_batched_tokens,
        kv_tokens=args.kv_tokens,
        weights_seconds=args.weights_ms / 1e3,
        token_seconds=args.token_us / 1e6,
        context_seconds=args.context_ns / 1e9,
        overhead_seconds=args.overhead_ms / 1e3,
        by_priority=args.scheduling_policy == "priority",
    )
    voice = ResponseGenerator(args.model, args.max_model_len, args.output_tokens, args.seed, args.embedding_dim)
    rules = args.faults if args.faults.lstrip().startswith("[") else Path(args.faults).read_text()
    plan = FaultPlan(orjson.loads(rules), args.seed)
    api_key = os.environ[args.api_key_env] if args.api_key_env else None
    return SimulatorServer(
        voice, Engine(model, args.speed), plan, RequestLog(args.request_log), api_key, dict(args.lora_modules)
    )


async def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM, SIGINT or the end of the parent."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = build(args)
    http = web.Server(
        server.handle,
        request_factory=lambda message, payload, protocol, writer, task: web.BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY
        ),
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=args.keep_alive_timeout,
    )
    listener = await loop.create_server(http, args.host, args.port, backlog=4096, reuse_address=True)
    port = listener.sockets[0].getsockname()[1]
    if args.exit_with_parent:
        threading.Thread(target=_follow_parent, args=(loop, stopped), daemon=True).start()
    server.start()
    # What lives until the end need not be looked at by the collector again and again.
    gc.collect()
    gc.freeze()
    print(orjson.dumps({"port": port, "url": f"http://{args.host}:{port}"}).decode(), flush=True)
    await stopped.wait()
    listener.close()
    server.engine.die()
    await asyncio.sleep(GOODBYE_SECONDS)
    server.log.flush()


def _follow_parent(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """Wait for the end of standard input: the parent, or whoever held the pipe, is gone."""
    while os.read(0, 4096):
        pass
    loop.call_soon_threadsafe(stopped.set)


def _event_loop(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes an event loop of this kind; None: asyncio's own. Raises ImportError."""
    if name != "uvloop":
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return made


def main() -> None:
    """Entry point."""
    args = arguments(sys.argv[1:])
    try:
        with asyncio.Runner(loop_factory=_event_loop(args.event_loop)) as runner:
            runner.run(serve(args))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"simulator: {error}")
    # Connections still open must not hold the process: SIGTERM means gone within half a second.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
