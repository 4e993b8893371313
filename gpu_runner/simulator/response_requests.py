"""The body of `/v1/responses` as that of a chat: the same prompt, parts and limits. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_runner.simulator.request_errors import ApiError, invalid

_SAME = ("model", "temperature", "top_p", "stream", "priority", "seed", "stop", "ignore_eos", "min_tokens")
_ROLES = {"developer": "system"}


def chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the chat. Raises ApiError."""
    chat: dict[str, Any] = {name: fields[name] for name in _SAME if name in fields}
    chat["messages"] = _messages(fields)
    if fields.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    if (tools := _tools(fields.get("tools"))) or fields.get("tool_choice") == "none":
        chat |= {"tools": tools, "tool_choice": _choice(fields.get("tool_choice"))}
    if (wanted := _format(fields.get("text"))) is not None:
        chat["response_format"] = wanted
    reasoning = fields.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") not in (None, "none"):
        chat["chat_template_kwargs"] = {"enable_thinking": True}
    return chat


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    said = fields.get("input")
    if said is None:
        raise invalid("missing", "body.input", "Field required")
    system = [] if not fields.get("instructions") else [{"role": "system", "content": fields["instructions"]}]
    if isinstance(said, str):
        return [*system, {"role": "user", "content": said}]
    if not isinstance(said, list) or not all(isinstance(item, dict) for item in said):
        raise invalid("list_type", "body.input", "Input should be a valid string or list of items")
    return [*system, *(message for item in said if (message := _message(item)) is not None)]


def _message(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """None: an item that a prompt does not show."""
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        return {"role": _ROLES.get(item["role"], item["role"]), "content": item.get("content")}
    if kind == "function_call":
        return {"role": "assistant", "content": f"{item.get('name')}({item.get('arguments')})"}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    if kind == "reasoning":
        return None
    message = f"The simulator knows no input item of this type: {kind!s:.40}"
    raise ApiError(400, message, param="input")


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Functions; tools that a server would run itself are not there."""
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise invalid("list_type", "body.tools", "Input should be a valid list")
    functions = [tool for tool in tools or () if tool.get("type") == "function"]
    return [{"type": "function", "function": {**tool, "type": None}} for tool in functions]


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(text: Any) -> dict[str, Any] | None:
    wanted = text.get("format") if isinstance(text, dict) else None
    if not isinstance(wanted, dict):
        return None
    if wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": wanted.get("name"), "schema": wanted.get("schema", {})}}
    return wanted
