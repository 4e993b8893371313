"""Lines of a table as records of training formats. Pure: a line in, a record or the reason why there is none out.

- `messages`, `prompt-completion`, `preference`: as TRL reads them (https://huggingface.co/docs/trl/dataset_formats):
  conversational where the prompt is a list of messages, standard (plain texts) where it is a text; `messages` is
  always conversational.
- `sharegpt`, `alpaca`: as LLaMA-Factory and Axolotl read them
  (https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md).

Reasoning stands as `<think>` before the answer, as the chat templates of Qwen3 and DeepSeek-R1 parse it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from batch_assets.spec.export_options import ExportOptions, Format
from gpu_runner.client.llama_cpp import ENGINE
from gpu_runner.client.reasoning_tags import split_text, tags_of

_SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt"}
_ROLES = {"developer": "system", **{role: role for role in _SPEAKERS}}

Line = Mapping[str, Any]
Message = dict[str, str]


class LeftOut(Exception):
    """There is no record of a line; the message is the reason as it is counted."""


def record_of(line: Line, options: ExportOptions) -> dict[str, Any]:
    """The record of a line. Raises LeftOut: `error`, `tool_calls`, `empty`, `no_prompt`, `equal` (nothing to prefer),
    `no_element` (a list without an element of that number) or `turns` (a conversation that Alpaca's form cannot hold).
    """
    if line.get("error") is not None:
        raise LeftOut("error")
    record = _MAKERS[options.format](line, options)
    return record | {name: line[name] for name in options.kept if name not in record}


def _value(line: Line, options: ExportOptions, field: str) -> Any:
    """What the line has for a field of the format."""
    found = line[options.columns[field]]
    if field not in options.elements or found is None:
        return found
    number = line[options.elements[field]]
    if not isinstance(found, list) or not isinstance(number, int) or not 0 <= number < len(found):
        raise LeftOut("no_element")
    return found[number]


def _prompt(line: Line, options: ExportOptions) -> list[Message] | str:
    found = _value(line, options, "prompt")
    if isinstance(found, str):
        if not found.strip():
            raise LeftOut("no_prompt")
        return found
    if not isinstance(found, list) or not all(map(_is_message, found)):
        raise LeftOut("no_prompt")
    if any(one.get("tool_calls") or one["role"] not in _ROLES for one in found):
        raise LeftOut("tool_calls")
    asked = found[:-1] if found and found[-1]["role"] == "assistant" else found
    messages = [{"role": _ROLES[one["role"]], "content": one["content"] or ""} for one in asked]
    kept = [one for one in messages if options.system or one["role"] != "system"]
    if not kept:
        raise LeftOut("no_prompt")
    return kept


def _is_message(one: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str | None)


def _begun(prompt: Any) -> str:
    """The beginning of the answer, where the prompt ends with one; else empty."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    return last["content"] or "" if _is_message(last) and last["role"] == "assistant" else ""


def _messages(line: Line, options: ExportOptions) -> list[Message]:
    found = _prompt(line, options)
    return [{"role": "user", "content": found}] if isinstance(found, str) else found


def _completion(line: Line, options: ExportOptions) -> str:
    if line.get("tool_calls"):
        raise LeftOut("tool_calls")
    text = _answer(line, options, "completion")
    thought = _value(line, options, "reasoning") if "reasoning" in options.columns else None
    return f"<think>\n{thought.strip()}\n</think>\n\n{text}" if thought else text


def _answer(line: Line, options: ExportOptions, field: str) -> str:
    text = _value(line, options, field)
    if text is not None and not isinstance(text, str):
        text = str(text)
    if text is not None and not options.reasoning:
        model = line.get("model") if options.columns[field] == "output" else None  # others wrote other columns
        rule = "think" if model is None or text.lstrip().startswith("<think>") else tags_of(model)
        text = split_text(text, rule)[1]  # empty where it was cut before there was an answer
    if text is None or not text.strip():
        raise LeftOut("empty")
    begun = _begun(_value(line, options, "prompt"))
    engine = line.get("engine") if options.columns[field] == "output" else None
    whole = text.startswith(begun) and (engine is None or engine.startswith(ENGINE))  # which answers with all of it
    return str(text) if whole else f"{begun}{text}"


def _as_messages(line: Line, options: ExportOptions) -> dict[str, Any]:
    answer = {"role": "assistant", "content": _completion(line, options)}
    return {"messages": [*_messages(line, options), answer]}


def _as_sharegpt(line: Line, options: ExportOptions) -> dict[str, Any]:
    spoken = _as_messages(line, options)["messages"]
    return {"conversations": [{"from": _SPEAKERS[one["role"]], "value": one["content"]} for one in spoken]}


def _as_alpaca(line: Line, options: ExportOptions) -> dict[str, Any]:
    """`history` holds earlier turns as [question, answer]; every record has all five keys, so that columns agree."""
    output, messages = _completion(line, options), _messages(line, options)
    system = [one["content"] for one in messages if one["role"] == "system"]
    turns = [one for one in messages if one["role"] != "system"]
    roles = [one["role"] for one in turns]
    if not turns or roles != (["user", "assistant"] * len(turns))[: len(turns)] or roles[-1] != "user":
        raise LeftOut("turns")
    history = [[turns[at]["content"], turns[at + 1]["content"]] for at in range(0, len(turns) - 1, 2)]
    instruction = turns[-1]["content"]
    return {
        "instruction": instruction,
        "input": "",
        "output": output,
        "system": "\n\n".join(system),
        "history": history,
    }


def _as_prompt_completion(line: Line, options: ExportOptions) -> dict[str, Any]:
    completion, prompt = _completion(line, options), _prompt(line, options)
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": completion}
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": completion}]}


def _as_preference(line: Line, options: ExportOptions) -> dict[str, Any]:
    prompt = _prompt(line, options)
    chosen, rejected = (_answer(line, options, field) for field in ("chosen", "rejected"))
    if chosen == rejected:
        raise LeftOut("equal")
    if isinstance(prompt, str):
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    said = {"chosen": chosen, "rejected": rejected}
    return {"prompt": prompt} | {name: [{"role": "assistant", "content": text}] for name, text in said.items()}


_MAKERS: Mapping[Format, Callable[[Line, ExportOptions], dict[str, Any]]] = {
    Format.MESSAGES: _as_messages,
    Format.SHAREGPT: _as_sharegpt,
    Format.ALPACA: _as_alpaca,
    Format.PROMPT_COMPLETION: _as_prompt_completion,
    Format.PREFERENCE: _as_preference,
}
