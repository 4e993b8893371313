"""How many tokens a prompt has, before an engine has seen it: by the model's own tokenizer where its file lies here.

Nothing is downloaded. The tokenizer needs the package `tokenizers`, which comes with vLLM; without it, or without the
file, tokens are estimated from bytes. The words that a chat template puts around a message are always estimated.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batch_assets.capacity_planning.workload_estimate import BYTES_PER_TOKEN, prompt_tokens

_MOST_BYTES = 64 << 20
_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts the tokens of a prompt (messages, a text, or what a task has beside them). `basis`: how, in words."""

    count: Callable[[str], float]
    basis: str

    def of(self, prompt: Any) -> int:
        """Tokens of a whole prompt."""
        return round(prompt_tokens(prompt, self.count))


def token_counter(model: str) -> TokenCounter:
    """The best counter there is for a model."""
    if (file := tokenizer_file(model)) is None:
        return _estimate(f"no {_FILE} of {model} on this machine")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return _estimate("the package tokenizers is not installed")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises no type of its own
        return _estimate(f"{file} cannot be read ({type(error).__name__})")
    return TokenCounter(lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), f"by {file}")


def tokenizer_file(model: str) -> Path | None:
    """`tokenizer.json` of a model: in its folder, or the newest in Hugging Face's cache; None when there is none."""
    if (own := Path(model).expanduser() / _FILE).is_file():
        return own if own.stat().st_size <= _MOST_BYTES else None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = cache / f"models--{model.replace('/', '--')}" / "snapshots"
    found = [file for file in snapshots.glob(f"*/{_FILE}") if file.is_file() and file.stat().st_size <= _MOST_BYTES]
    return max(found, key=lambda file: file.stat().st_mtime, default=None)


def _estimate(why: str) -> TokenCounter:
    return TokenCounter(
        lambda text: len(text.encode()) / BYTES_PER_TOKEN, f"estimated, a token per {BYTES_PER_TOKEN:g} bytes: {why}"
    )
