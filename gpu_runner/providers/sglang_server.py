"""SGLang's server as an engine: its command line. It was never run here on a GPU.

Source: SGLang's documentation, advanced_features/server_arguments (the names of arguments) and
references/production_metrics. It reads its API key from its command line or a file only, so a shell writes that file:
no process list and no plan holds the key.
"""

from __future__ import annotations

_WORDS = ("--model-path", "{model}", "--enable-metrics", "--host")
_SCRIPT = (
    'umask 077; folder=$(mktemp -d) && printf "api-key: %s\\n" "$VLLM_API_KEY" >"$folder/engine.yaml" && '
    'exec python3 -m sglang.launch_server --config "$folder/engine.yaml" "$@"'
)
# For an engine that asks for no key.
SGLANG_COMMAND = ("python3", "-m", "sglang.launch_server", *_WORDS, "127.0.0.1", "--port", "{port}")
# For one that asks for the key in VLLM_API_KEY, as all engines of providers get it: what is begun, and its words.
SGLANG_ENTRY = ("sh", "-c", _SCRIPT, "sh")
SGLANG_WORDS = (*_WORDS, "0.0.0.0", "--port", "{port}")
SGLANG_IMAGE = r"^[A-Za-z0-9][\w./:@-]*$"
