"""One line of an input file: `{"custom_id", "method": "POST", "url", "body"}`, checked as documented. Pure.

The codes are those that OpenAI puts into `errors` of a batch whose input it refuses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from batch_assets.api.batches.digest_set import DigestSet
from batch_assets.api.batches.long_texts import LongTexts

CUSTOM_ID_LENGTH = 512
# What orders or joins requests inside an engine is ours to say: with it a tenant could overtake or meddle with others.
ENGINE_FIELDS = frozenset({"priority", "request_id", "kv_transfer_params", "vllm_xargs"})
_PROMPTS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "/v1/chat/completions": ("messages", (list,)),
    "/v1/completions": ("prompt", (str, list)),
    "/v1/embeddings": ("input", (str, list)),
}


@dataclass(frozen=True, slots=True)
class LineError:
    """Why an input is refused. `line` counts from 1; None: it is about the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def shown(self) -> dict[str, Any]:
        """As in `errors.data` of a batch object."""
        return {"code": self.code, "message": self.message, "param": self.param, "line": self.line}


@dataclass(frozen=True, slots=True)
class Line:
    """A valid line. `body` is the request's JSON, as it is sent."""

    custom_id: str
    model: str
    body: bytes
    inputs: int = 1


class LineChecker:
    """Checks the lines of one file in order. `model` is that of the first valid line. `resolve`: the model behind a
    name; lines are sent with that. `contexts`: most tokens of models, where that is known.
    """

    def __init__(
        self,
        endpoint: str,
        models: frozenset[str] | None,
        resolve: Callable[[str], str] = lambda name: name,
        contexts: Mapping[str, int] | None = None,
    ) -> None:
        self._endpoint, self._models, self._resolve, self._contexts = endpoint, models, resolve, contexts or {}
        self._seen = DigestSet()
        self.model: str | None = None
        self.long_texts = LongTexts()

    def check(self, raw: bytes, number: int) -> Line | list[LineError]:
        """The line, or all that is wrong with it."""
        try:
            found = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return [LineError("invalid_json_line", "This line is not parseable as valid JSON.", line=number)]
        if not isinstance(found, dict):
            return [LineError("invalid_json_line", "Expected a JSON object on this line.", line=number)]
        problems: list[LineError] = []
        custom_id = self._custom_id(found, number, problems)
        self._check_target(found, number, problems)
        body = found.get("body")
        if not isinstance(body, dict):
            problems.append(_missing("body", number) if body is None else _invalid("body", "an object", number))
            return problems
        model = self._model(body, number, problems)
        self._check_body(body, number, problems)
        if model is not None and not problems:
            self._check_length(body, model, number, problems, len(raw))
        if problems or custom_id is None or model is None:
            return problems
        prompt = body[_PROMPTS[self._endpoint][0]]
        inputs = len(prompt) if isinstance(prompt, list) and self._endpoint == "/v1/embeddings" else 1
        try:
            sent = orjson.dumps({**body, "model": model})
        except orjson.JSONEncodeError:  # it reads deeper than it writes
            return [LineError("invalid_json_line", "This line's JSON is nested too deeply.", line=number)]
        return Line(custom_id, model, sent, inputs)

    def _custom_id(self, found: Mapping[str, Any], number: int, problems: list[LineError]) -> str | None:
        custom_id = found.get("custom_id")
        if custom_id is None:
            problems.append(_missing("custom_id", number))
            return None
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_LENGTH:
            problems.append(_invalid("custom_id", f"a string of 1 to {CUSTOM_ID_LENGTH} characters", number))
            return None
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if not self._seen.add(digest):
            said = (
                f"The custom_id '{custom_id[:100]}' for this request is a duplicate of another request. "
                "The custom_id parameter must be unique for each request in a batch."
            )
            problems.append(LineError("duplicate_custom_id", said, "custom_id", number))
            return None
        return custom_id

    def _check_target(self, found: Mapping[str, Any], number: int, problems: list[LineError]) -> None:
        method, url = found.get("method"), found.get("url")
        if method is None:
            problems.append(_missing("method", number))
        elif method != "POST":
            problems.append(LineError("invalid_method", "Expected the method POST.", "method", number))
        if url is None:
            problems.append(_missing("url", number))
        elif url != self._endpoint:
            said = "The URL provided for this request does not match the batch endpoint."
            problems.append(LineError("url_mismatch", said, "url", number))

    def _model(self, body: Mapping[str, Any], number: int, problems: list[LineError]) -> str | None:
        model = body.get("model")
        if model is None:
            problems.append(_missing("body.model", number))
            return None
        if not isinstance(model, str) or not 0 < len(model) <= 300 or "\0" in model:
            problems.append(_invalid("body.model", "a string of 1 to 300 characters", number))
            return None
        if self.model is None:
            if self._models is not None and model not in self._models:
                said = f"The provided model '{model[:100]}' is not supported by the Batch API."
                problems.append(LineError("model_not_found", said, "body.model", number))
                return None
            self.model = self._resolve(model)
        elif self._resolve(model) != self.model:
            said = f"Expected the model '{self.model[:100]}' of the lines before, found '{model[:100]}'."
            problems.append(LineError("model_mismatch", said, "body.model", number))
            return None
        return self.model

    def _check_body(self, body: Mapping[str, Any], number: int, problems: list[LineError]) -> None:
        name, kinds = _PROMPTS[self._endpoint]
        if name not in body:
            problems.append(_missing(f"body.{name}", number))
        elif not isinstance(body[name], kinds) or not body[name]:
            expected = "an array that is not empty" if kinds == (list,) else "a string or an array, not empty"
            problems.append(_invalid(f"body.{name}", expected, number))
        if body.get("stream"):
            said = "The parameter 'stream' is not supported by the Batch API."
            problems.append(LineError("unsupported_parameter", said, "body.stream", number))
        for name in sorted(ENGINE_FIELDS & body.keys()):
            said = f"The parameter '{name}' is not supported by the Batch API."
            problems.append(LineError("unsupported_parameter", said, f"body.{name}", number))
        for limit in ("max_tokens", "max_completion_tokens", "n", "best_of"):  # budgets count with them
            value = body.get(limit)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                problems.append(_invalid(f"body.{limit}", "a whole number", number))

    def _check_length(
        self, body: Mapping[str, Any], model: str, number: int, problems: list[LineError], size: int
    ) -> None:
        """A prompt of token ids that no engine of the model takes. How long a text is, only an engine can say:
        `long_texts` has those to ask about. `size`: bytes of the line.
        """
        name, _ = _PROMPTS[self._endpoint]
        context = self._contexts.get(model)
        if context is None or body.get("truncate_prompt_tokens") is not None:
            return
        longest = longest_ids(body[name])
        if longest > context:
            problems.append(too_long(context, longest, f"body.{name}", number))
        elif size > context:
            self.long_texts.consider(number, model, name, body, context)


def too_long(context: int, tokens: int, param: str, line: int) -> LineError:
    """A prompt of more tokens than a model takes."""
    said = f"This model's maximum context length is {context:,} tokens. The prompt has {tokens:,} tokens."
    return LineError("context_length_exceeded", said, param, line)


def longest_ids(prompt: Any) -> int:
    """Tokens of the longest prompt that is given as token ids; 0: there is none."""
    if not isinstance(prompt, list) or not prompt:
        return 0
    if isinstance(prompt[0], int):
        return len(prompt)
    return max((len(one) for one in prompt if isinstance(one, list)), default=0)


def _missing(name: str, line: int) -> LineError:
    return LineError("missing_required_parameter", f"Missing required parameter: '{name}'.", name, line)


def _invalid(name: str, expected: str, line: int) -> LineError:
    return LineError("invalid_value", f"Invalid value for '{name}': expected {expected}.", name, line)
