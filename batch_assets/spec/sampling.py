"""Request fields under `sampling.extra`: which ones are sent, and why the others are refused.

The rule: every part of an answer that a field asks for has a typed column of the table, or the field is refused when
the spec is loaded. A field that is not known here shapes the answer and adds nothing to it, as far as we know; it is
sent as it is.

Fields: OpenAI's reference of chat, completions and embeddings; vLLM's protocol classes
(entrypoints/openai/*/protocol.py); of SGLang's and llama.cpp's own fields those that add parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from batch_assets.spec.errors import Unusable, show
from batch_assets.spec.fields import request_fields
from gpu_runner.client.answers.answer_parts import MOST_ALTERNATIVES
from gpu_runner.client.answers.pooled_outputs import PING
from gpu_runner.rows import POOLED, TOKEN_LIMITS, Task

MOST_LOGPROBS = 20  # OpenAI's limit, and vLLM's unless it is started with --max-logprobs
MOST_TOOLS = 128

_OWN = "The platform writes this field itself."
_ONE = "A row has one answer; to have several, write samples: n at the top."
_SCHEMA = "Write output.json_schema, choice, regex or grammar instead: outputs are then validated as well."
_PROMPT = "The table holds what was answered, not the prompt."
_IDS = "The table has no column for token ids."
_MEDIA = "The table has columns for text only."
_TOOLS = "Write tools and tool_choice instead."
_INSIDE = "The table has no column for an engine's inner state."

_RESERVED: Mapping[str, str] = {
    **dict.fromkeys(("model", "messages", "prompt", "input", "stream", "stream_options", "user"), _OWN),
    "request_id": "All rows would have the same.",
    **dict.fromkeys(("n", "best_of"), _ONE),
    **dict.fromkeys(("response_format", "structured_outputs", "guided_json"), _SCHEMA),
}
# Refused unless their value is the one that changes nothing.
_REFUSED: Mapping[str, str] = {
    "use_beam_search": _ONE,
    **dict.fromkeys(
        ("echo", "prompt_logprobs", "return_prompt_logprobs", "return_prompt_text", "prompt_embeds"), _PROMPT
    ),
    **dict.fromkeys(("return_token_ids", "return_tokens"), _IDS),
    **dict.fromkeys(("modalities", "audio"), _MEDIA),
    **dict.fromkeys(("functions", "function_call"), _TOOLS),
    "web_search_options": "The table has no column for citations.",
    "encoding_format": "Vectors are read as lists of numbers.",
    "embed_dtype": "Vectors are read as lists of numbers.",
    "kv_transfer_params": _INSIDE,
    "return_hidden_states": _INSIDE,
    "return_routed_experts": _INSIDE,
    "return_meta_info": _INSIDE,
    "ec_transfer_params": _INSIDE,
    "n_probs": "Write logprobs and top_logprobs instead.",
}
# Fields that add a part, and the tasks that have it.
_CHAT_ONLY = ("tools", "tool_choice", "parallel_tool_calls", "top_logprobs")
# Names of one thing, the first of which has a key of its own where one has: engines differ in which of them they read,
# and a server may refuse two (OpenAI's reasoning models: max_tokens beside max_completion_tokens).
_SAME: tuple[tuple[str, ...], ...] = (
    TOKEN_LIMITS,
    ("min_tokens", "min_new_tokens"),
    ("repetition_penalty", "repeat_penalty"),
    ("seed", "random_seed", "sampling_seed"),
    ("stop", "stop_sequences"),
    ("dimensions", "output_dimension"),
)
# Other ways to say which form an answer has.
_FORMS = (
    "guided_choice",
    "guided_regex",
    "guided_grammar",
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
)
_CHANGES_NOTHING = (None, False, "float")
_KINDS_OF_TOOL = {"function": "function", "custom": "custom"}


def extra_fields(value: dict[str, Any], sampling_fields: Iterable[str]) -> dict[str, Any]:
    """`sampling.extra` as it is. Raises Unusable for a field that cannot be sent or whose answer would be lost."""
    for key, given in value.items():
        if key in sampling_fields:
            raise Unusable("request fields that have no key of their own", show(key), "Write it under sampling itself.")
        if key in _RESERVED:
            raise Unusable("request fields that this platform does not set itself", show(key), _RESERVED[key])
        if key in _REFUSED and given not in _CHANGES_NOTHING:
            raise Unusable("request fields whose answer has a column", show(key), _REFUSED[key])
    return request_fields(value)


def check_parts(task: Task, extra: Mapping[str, Any], form: str | None) -> None:
    """Raises Unusable when fields that add parts to an answer do not fit the task, each other or the form of outputs.

    `form`: the key of `output` that says it (`json_schema`, `choice`, …); None: there is none.
    """
    for name in (*_CHAT_ONLY, "logprobs"):
        if name in extra and (task in POOLED or (task == "completion" and name in _CHAT_ONLY)):
            raise Unusable(f"no {name} for task {task}", show(extra[name]), key=f"sampling.extra.{name}")
    for name in (*PING.get(task, ()), *(("queries", "items") if task == "score" else ())):
        if name in extra:
            raise Unusable(f"no {name} for task {task}", show(extra[name]), _OWN, key=f"sampling.extra.{name}")
    _check_logprobs(task, extra)
    check_tools(extra)
    if extra.get("tools") and form is not None:
        raise Unusable(
            f"no tools beside output.{form}",
            "both",
            "A tool call has no text to hold against it; give a schema to the tool as its parameters.",
            key="sampling.extra.tools",
        )


def check_said_once(task: Task, request: Mapping[str, Any], extra: Mapping[str, Any], form: str | None) -> None:
    """Raises Unusable where `sampling.extra` says again what another field of the request says, under another name.
    `form` as in `check_parts`.
    """
    for names in _SAME:
        given = [name for name in names if request.get(name) is not None]
        if len(given) > 1:
            raise Unusable(
                f"one of {' and '.join(given)}",
                "both" if len(given) == 2 else "all of them",
                "They mean the same, and engines differ in which they follow. Keep the one that your server knows.",
                key=f"sampling.extra.{given[-1]}",
            )
    for name in TOKEN_LIMITS:
        key, value = f"sampling.extra.{name}", extra.get(name)
        if value is not None and task in POOLED:
            raise Unusable(f"no {name} for task {task}", show(value), key=key)
        if name == "max_completion_tokens" and value is not None:
            _check_completion_tokens(task, value, key)
    other = next((name for name in _FORMS if extra.get(name) is not None), None)
    if other is not None and form is not None:
        raise Unusable(f"no {other} beside output.{form}", "both", "Keep one.", key=f"sampling.extra.{other}")


def _check_completion_tokens(task: Task, value: Any, key: str) -> None:
    if task != "chat":
        hint = "OpenAI's text completions know max_tokens only."
        raise Unusable("max_tokens for task completion", "max_completion_tokens", hint, key=key)
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise Unusable(f"a whole number from 1 to {1 << 20:,}", show(value), key=key)


def _check_logprobs(task: Task, extra: Mapping[str, Any]) -> None:
    given, top = extra.get("logprobs"), extra.get("top_logprobs")
    if task == "completion" and given is not None and not _within(given):
        raise Unusable(f"a whole number from 0 to {MOST_LOGPROBS}", show(given), key="sampling.extra.logprobs")
    if task == "chat" and given is not None and not isinstance(given, bool):
        hint = "Write logprobs: true, and how many alternatives under top_logprobs."
        raise Unusable("true or false for task chat", show(given), hint, key="sampling.extra.logprobs")
    if top is not None and not _within(top):
        raise Unusable(f"a whole number from 0 to {MOST_LOGPROBS}", show(top), key="sampling.extra.top_logprobs")
    ids = extra.get("logprob_token_ids")
    if ids is not None and not (isinstance(ids, list) and 1 <= len(ids) <= MOST_ALTERNATIVES):
        expected = f"a list of 1 to {MOST_ALTERNATIVES} token ids"
        raise Unusable(expected, show(ids), key="sampling.extra.logprob_token_ids")
    if top is not None and given is not True:
        raise Unusable("logprobs: true beside top_logprobs", show(given), key="sampling.extra.logprobs")


def _within(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_LOGPROBS


def check_tools(extra: Mapping[str, Any]) -> None:
    """Raises Unusable where `tools` are none, or `tool_choice` names none of them."""
    tools = extra.get("tools")
    if tools is None:
        for name in ("tool_choice", "parallel_tool_calls"):
            if extra.get(name) not in (None, "none"):
                raise Unusable(f"tools beside {name}", "none", key="sampling.extra.tools")
        return
    if not isinstance(tools, list) or not 1 <= len(tools) <= MOST_TOOLS:
        raise Unusable(f"a list of 1 to {MOST_TOOLS} tools", show(tools), key="sampling.extra.tools")
    names = [_tool_name(tool, f"sampling.extra.tools.{number}") for number, tool in enumerate(tools)]
    choice = extra.get("tool_choice")
    if choice is None or choice in ("none", "auto", "required"):
        return
    wanted = _named(choice)
    if wanted not in names:
        expected = "none, auto, required, or {type: function, function: {name: …}} of one of the tools"
        raise Unusable(expected, show(choice), key="sampling.extra.tool_choice")


def _tool_name(tool: Any, key: str) -> str:
    name = _named(tool)
    if name is None:
        raise Unusable("{type: function, function: {name: …, parameters: …}}", show(tool), key=key)
    return name


def _named(tool: Any) -> str | None:
    """The name in `{type: function, function: {name: …}}`; None for anything else."""
    inner = tool.get(_KINDS_OF_TOOL.get(str(tool.get("type")), "")) if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) and name else None
