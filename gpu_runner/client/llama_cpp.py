"""llama.cpp's server behind the OpenAI API: what it calls differently, and what it cannot do of vLLM's.

It ignores a request field that it does not know, so a field of vLLM's that changes the answer is translated here, or
refused before the first row. Source: llama.cpp's tools/server/README.md and server-task.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from gpu_runner.client.answers import answer_numbers
from gpu_runner.client.structured_outputs import llama_cpp_fields
from gpu_runner.rows import POOLED, Generation, Task

OWNER = "llamacpp"  # `owned_by` in its list of models
ENGINE = "llama.cpp"
DEFAULT_CONTEXT = 2048
# Connections that may be open at once without a byte sent: its HTTP server (cpp-httplib) closes a new connection after
# 5 s of silence, and a starved client needs that long between opening 64 of them and writing to the first.
SILENT_CONNECTIONS = 8

_NO_FIELD = "llama.cpp has no such request field and would ignore it"
_TOKEN_IDS = "llama.cpp names tokens in logit_bias and grammars only"

# vLLM's name, llama.cpp's name.
_RENAMED: Mapping[str, str] = {"repetition_penalty": "repeat_penalty"}
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
# Fields that change an answer, by the reason for which llama.cpp cannot honour them.
_REFUSED: Mapping[str, str] = {
    "min_tokens": _NO_FIELD,
    "dimensions": "llama.cpp gives vectors of the model's own length",
    "stop_token_ids": _TOKEN_IDS,
    "allowed_token_ids": _TOKEN_IDS,
    "bad_words": _TOKEN_IDS,
    "include_stop_str_in_output": "llama.cpp leaves the stop text out",
    "truncate_prompt_tokens": "llama.cpp refuses a prompt that is too long, row by row",
    **dict.fromkeys(
        (
            "length_penalty",
            "logprob_token_ids",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "add_special_tokens",
            "documents",
            "mm_processor_kwargs",
            "vllm_xargs",
            "guided_choice",
            "guided_grammar",
            "guided_regex",
        ),
        _NO_FIELD,
    ),
}
_NEUTRAL: tuple[object, ...] = (None, False, 0, [], {})
_LARGEST_SEED = (1 << 32) - 2  # 32 bits, of which all ones means: another seed each time


@dataclass(frozen=True, slots=True)
class LlamaCppCard:
    """What an entry of /v1/models says of a llama.cpp server: one row's context in tokens, and how it was built."""

    context: int | None
    version: str

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Self | None:
        """The card in an entry; None when it is not of a llama.cpp server."""
        if entry.get("owned_by") != OWNER:
            return None
        meta, tags = entry.get("meta"), entry.get("tags")
        context = answer_numbers.context_length(meta.get("n_ctx")) if isinstance(meta, dict) else None
        built = [answer_numbers.short_name(tag) for tag in tags[:1]] if isinstance(tags, list) else []
        return cls(context, " ".join([ENGINE, *filter(None, built)]))


def refusals(task: Task, sampling: Mapping[str, Any]) -> list[str]:
    """Why llama.cpp cannot do what these request fields ask for, one sentence a field."""
    if task in POOLED - {"embedding"}:
        return [f"task {task}: llama.cpp's server is started here to write or to embed only"]
    found = [
        f"{name}: {reason}" for name, reason in _REFUSED.items() if name in sampling and sampling[name] not in _NEUTRAL
    ]
    if task == "completion" and sampling.get("logprobs") is not None:
        found.append("logprobs: llama.cpp writes those of text completions in a form of its own; use task chat")
    seed = sampling.get("seed")
    if isinstance(seed, int) and seed > _LARGEST_SEED:
        found.append(f"seed: llama.cpp takes 0 to {_LARGEST_SEED}, found {seed}")
    return found


def llama_cpp_generation(generation: Generation, context: int | None) -> Generation:
    """The generation with the request fields as llama.cpp calls them; `context`: tokens of a row.

    Raises ValueError with what it cannot do.
    """
    sampling = dict(generation.sampling)
    if problems := refusals(generation.task, sampling):
        raise ValueError("; ".join(problems))
    if any(sampling.get(name) for name in _PENALTIES):
        # The whole text counts, as with vLLM; by default the last 64 tokens do.
        sampling.setdefault("repeat_last_n", context or DEFAULT_CONTEXT)
    for name, own in _RENAMED.items():
        if name in sampling:
            sampling.setdefault(own, sampling.pop(name))
    for name in _REFUSED.keys() & sampling.keys():
        del sampling[name]
    if generation.structured_outputs is not None:
        sampling |= llama_cpp_fields(generation.structured_outputs)
    return replace(generation, sampling=sampling, structured_outputs=None)
