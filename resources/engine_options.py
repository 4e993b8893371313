"""What a dataset needs of its engine beside the model: arguments of `vllm serve`, as people write them in YAML.

Only what is listed here can be written: an argument that loads code, opens a port or reads another file of the machine
is none of them. A value becomes one word of a command line, and no shell reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gpu_runner.models.facts import ServedAs
from gpu_runner.models.names import name_problem
from resources.yaml_errors import Unusable, show

# Filled in by providers wherever they stand in a command line.
_PLACEHOLDER = re.compile(r"\{(model|port|gpus|name|home)\}")
_PARSER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_CODE = ("trust_remote_code", "reasoning_parser_plugin", "tool_parser_plugin", "middleware", "worker_cls")

# What vLLM 0.32 takes (config/cache.py, config/model.py).
CacheDtype = Literal["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"]
Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
MOST_ADAPTERS = 16
# Of SGLang (its documentation, advanced_features/server_arguments, 2026): names of arguments where they differ, and the
# values that it takes. Adapters are called by other names there, and speculative decoding has other arguments.
_FLAGS_OF_SGLANG = {"tokenizer": "tokenizer-path", "limit_mm_per_prompt": "limit-mm-data-per-request"}
_NOT_OF_SGLANG = ("speculative_config", "lora", "lora_modules", "max_lora_rank")
# fmt: off
_OF_SGLANG: Mapping[str, frozenset[str]] = {
    "kv_cache_dtype": frozenset(
        {
            "auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"
        }
    ),
    "reasoning_parser": frozenset(
        {
            "deepseek-r1", "deepseek-v3", "glm45", "gpt-oss", "kimi", "qwen3", "qwen3-thinking", "step3"
        }
    ),
    "tool_call_parser": frozenset(
        {
            "deepseekv3", "deepseekv31", "gigachat3", "glm", "glm45", "glm47", "gpt-oss", "kimi_k2", "llama3",
            "mistral", "pythonic", "qwen", "qwen25", "qwen3_coder", "step3"
        }
    ),
    "quantization": frozenset(
        {
            "awq", "fp8", "gptq", "marlin", "gptq_marlin", "awq_marlin", "bitsandbytes", "gguf", "modelopt",
            "modelopt_fp8", "modelopt_fp4", "petit_nvfp4", "w8a8_int8", "w8a8_fp8", "moe_wna16", "qoq", "w4afp8",
            "mxfp4", "mxfp8", "auto-round", "compressed-tensors"
        }
    ),
}
# fmt: on
# Without `custom_class`, which loads code.
SpeculativeMethod = Literal[
    "ngram", "ngram_gpu", "suffix", "draft_model", "medusa", "mlp_speculator", "eagle", "eagle3", "mtp"
]


def _parser(value: str) -> str:
    if not _PARSER.fullmatch(value):
        raise Unusable("a name of letters, digits, _ . and -, at most 64", show(value))
    return value


def hub_or_path(value: str) -> str:
    """A name of the hub, or an absolute path on the engine's machine, that can be a word of a command line."""
    if not value.startswith("/"):
        if not _HUB.fullmatch(value) or ".." in value:
            raise Unusable("a name of the hub (owner/name), or an absolute path on the engine's machine", show(value))
        return value
    if problem := name_problem(value):
        raise Unusable("an absolute path without blanks", show(value), f"{problem.capitalize()}.")
    if ".." in value.split("/"):
        raise Unusable("a path without ..", show(value))
    return _without_placeholders(value)


def _without_placeholders(value: str) -> str:
    if found := _PLACEHOLDER.search(value):
        hint = f"Providers fill it in. In a template, write {{{{ {found[1]} }}}} with blanks."
        raise Unusable("no word in braces that is filled in", found[0], hint)
    return value


def _template(value: str) -> str:
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if "{" not in value:
        return hub_or_path(value) if value.startswith("/") else _no_template(value)
    if not value.isprintable():
        raise Unusable("a template on one line", show(value), "Fold it in the YAML (>-), or name a file there.")
    try:
        parsed = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(value)
    except (TemplateError, RecursionError) as error:
        raise Unusable("a Jinja template", show(value), f"{error!s:.200}.") from None
    if any(parsed.find(kind) for kind in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        raise Unusable("a template by itself", "one that reads another", "The engine has no others to read.")
    return _without_placeholders(value)


def _no_template(value: str) -> str:
    raise Unusable("a Jinja template, or an absolute path of one on the engine's machine", show(value))


Parser = Annotated[str, AfterValidator(_parser)]
HubOrPath = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(hub_or_path)]
ChatTemplate = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_template)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def written(self) -> dict[str, Any]:
        """What was set, as JSON has it."""
        return self.model_dump(mode="json", exclude_none=True)


class SpeculativeOptions(_Section):
    """Speculative decoding: tokens are guessed, and checked by the model."""

    method: SpeculativeMethod | None = Field(default=None, description="How tokens are guessed.")
    model: HubOrPath | None = Field(default=None, description="Draft model, of the hub or a path on the machine.")
    num_speculative_tokens: int = Field(ge=1, le=64, description="How many tokens are guessed at once.")
    draft_tensor_parallel_size: int | None = Field(
        default=None, ge=1, le=64, description="GPUs of the draft model: 1, or as many as the model has."
    )
    prompt_lookup_max: int | None = Field(default=None, ge=1, le=1024, description="ngram: longest piece looked up.")
    prompt_lookup_min: int | None = Field(default=None, ge=1, le=1024, description="ngram: shortest piece looked up.")
    quantization: Parser | None = Field(default=None, description="Quantization of the draft model.")

    @model_validator(mode="after")
    def _says_how(self) -> SpeculativeOptions:
        if self.method is None and self.model is None:
            raise Unusable("a method or a model", "neither")
        return self


class MultimodalLimits(_Section):
    """Most parts of a kind in one prompt."""

    image: int | None = Field(default=None, ge=0, le=999, description="Pictures.")
    video: int | None = Field(default=None, ge=0, le=999, description="Videos.")
    audio: int | None = Field(default=None, ge=0, le=999, description="Sounds.")


class LoraModule(_Section):
    """A LoRA adapter: the name that requests call it by, and where its files are."""

    name: Parser = Field(description="What requests call it; another name than the model's.")
    path: HubOrPath = Field(description="Name of the hub (owner/name), or an absolute path on the engine's machine.")


def _none_for_vllm(value: str | None) -> str | None:
    return None if value == "vllm" else value


class EngineOptions(_Section):
    """Arguments of `vllm serve` that the rows need, or of SGLang's `launch_server` under the same names."""

    server: Annotated[Literal["vllm", "sglang"] | None, AfterValidator(_none_for_vllm)] = Field(
        default=None,
        description="What is started where an engine is: vllm (default) or sglang, which was not run on a GPU yet. "
        "Part of the row key.",
    )
    reasoning_parser: Parser | None = Field(
        default=None, description="How thinking is told apart from the answer, e.g. qwen3. Part of the row key."
    )
    tool_call_parser: Parser | None = Field(
        default=None,
        description="How tool calls are read, e.g. hermes; with it `--enable-auto-tool-choice`. Part of the row key.",
    )
    quantization: Parser | None = Field(
        default=None, description="Quantization of the weights, e.g. fp8 or awq_marlin. Part of the row key."
    )
    kv_cache_dtype: CacheDtype | None = Field(
        default=None, description="Numbers of the KV cache; fp8 holds twice the tokens. Part of the row key."
    )
    dtype: Dtype | None = Field(default=None, description="Numbers of weights and activations. Part of the row key.")
    tokenizer: HubOrPath | None = Field(
        default=None, description="Tokenizer of the hub, or a path on the engine's machine. Part of the row key."
    )
    chat_template: ChatTemplate | None = Field(
        default=None,
        description="Chat template: Jinja on one line, or a path on the engine's machine. Part of the row key.",
    )
    max_num_seqs: int | None = Field(
        default=None, ge=1, le=8192, description="Most rows at once of one copy of the model."
    )
    pipeline_parallel_size: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Stages that the model's layers are divided into, each on GPUs of its own of one machine, for a "
        "model that fits no other way.",
    )
    speculative_config: SpeculativeOptions | None = Field(default=None, description="Speculative decoding.")
    enable_prefix_caching: bool | None = Field(
        default=None, description="Keep the KV cache of common beginnings. vLLM's default is true."
    )
    limit_mm_per_prompt: MultimodalLimits | None = Field(
        default=None, description="Most pictures, videos and sounds in one prompt."
    )
    lora: LoraModule | None = Field(
        default=None, description="LoRA adapter that answers, in place of the model alone. Part of the row key."
    )
    lora_modules: Annotated[list[LoraModule], Field(max_length=MOST_ADAPTERS)] | None = Field(
        default=None,
        description="Further adapters of the model that the engine loads, so that datasets with one of them share it.",
    )
    max_lora_rank: LoraRank | None = Field(
        default=None, description="Largest rank of the adapters. vLLM's default: 16."
    )

    @model_validator(mode="before")
    @classmethod
    def _loads_no_code(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            for key in given:
                if isinstance(key, str) and key.replace("-", "_").lstrip("_") in _CODE:
                    hint = "It runs code that the engine's machine loads. Set it up there, in `command` of fleet.yaml."
                    raise Unusable("an argument that loads no code", show(key), hint)
        return given

    @model_validator(mode="after")
    def _adapters_differ(self) -> EngineOptions:
        adapters = self.adapters
        names = [one.name for one in adapters]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise Unusable("one path for each adapter", f"two for {', '.join(twice)}", key="lora_modules")
        if self.max_lora_rank is not None and not adapters:
            raise Unusable("an adapter, as lora or in lora_modules", "none", key="max_lora_rank")
        return self

    @model_validator(mode="after")
    def _that_sglang_has(self) -> EngineOptions:
        if self.server != "sglang":
            return self
        for name in _NOT_OF_SGLANG:
            if getattr(self, name) is not None:
                hint = "Leave it out, or leave server out for vLLM."
                raise Unusable("no such key beside server: sglang", show(getattr(self, name)), hint, key=name)
        for name, known in _OF_SGLANG.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise Unusable(f"for server: sglang one of {', '.join(sorted(known))}", show(value), key=name)
        if self.chat_template is not None and not self.chat_template.startswith("/"):
            hint = "SGLang reads its template from a file."
            expected = "an absolute path beside server: sglang"
            raise Unusable(expected, show(self.chat_template), hint, key="chat_template")
        return self

    @property
    def for_simulator(self) -> EngineOptions:
        """The same as vLLM takes them, which is what the simulator plays."""
        return self if self.server is None else self.model_copy(update={"server": None})

    @property
    def adapters(self) -> list[LoraModule]:
        """All adapters that the engine loads, each once, by name."""
        named = [*([self.lora] if self.lora else []), *(self.lora_modules or [])]
        return [LoraModule(name=name, path=path) for name, path in sorted({(one.name, one.path) for one in named})]

    @property
    def served(self) -> ServedAs:
        """Those that change what the model needs of a GPU."""
        loras = len(self.adapters)
        rank = (self.max_lora_rank or DEFAULT_LORA_RANK) if loras else 0
        stages = self.pipeline_parallel_size or 1
        return ServedAs(self.quantization, self.kv_cache_dtype, self.dtype, self.max_num_seqs, loras, rank, stages)

    def started(self) -> dict[str, Any]:
        """How an engine is started, as JSON has it: which of its adapters answers makes no other engine of it."""
        found = {name: value for name, value in self.written().items() if name not in ("lora", "lora_modules")}
        adapters = [one.written() for one in self.adapters]
        return {**found, "lora_modules": adapters} if adapters else found

    def identity(self) -> dict[str, Any]:
        """What changes the answers, as JSON has it: a part of the row key. Empty: nothing was written of it."""
        return {name: value for name, value in self.written().items() if name in IDENTITY}

    def with_identity(self, identity: Mapping[str, Any]) -> EngineOptions:
        """These options with another identity, that of a snapshot. Raises pydantic.ValidationError."""
        rest = {name: value for name, value in self.written().items() if name not in IDENTITY}
        return EngineOptions.model_validate({**rest, **identity})

    def arguments(self) -> tuple[str, ...]:
        """Words for the server's command line, without `max_num_seqs`, which sizing decides on."""
        words: list[str] = []
        sglang = self.server == "sglang"
        for name, value in self.started().items():
            if name in ("server", "max_num_seqs", "lora_modules"):
                continue
            if sglang and name == "enable_prefix_caching":
                words += [] if value else ["--disable-radix-cache"]
                continue
            flag = _FLAGS_OF_SGLANG.get(name, name.replace("_", "-")) if sglang else name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
                continue
            text = orjson.dumps(value).decode() if isinstance(value, dict) else str(value)
            words.append(f"--{flag}={text}")  # one word: a value that begins with - is no option
            words += ["--enable-auto-tool-choice"] if name == "tool_call_parser" and not sglang else []
        if adapters := self.adapters:
            words += ["--enable-lora", f"--max-loras={len(adapters)}", "--lora-modules"]
            words += [orjson.dumps(one.written()).decode() for one in adapters]  # each begins with a brace
        return tuple(words)

    def missing(self, started_with: EngineOptions) -> list[str]:
        """Keys that change answers, and that an engine which was started with others does not have as written here."""
        theirs = started_with.identity()
        if self.lora in started_with.adapters:
            theirs |= {"lora": self.identity()["lora"]}
        return [name for name, value in self.identity().items() if theirs.get(name) != value]


DEFAULT_LORA_RANK = 16  # vLLM's
IDENTITY = frozenset(
    {
        "server",
        "lora",
        "reasoning_parser",
        "tool_call_parser",
        "quantization",
        "kv_cache_dtype",
        "dtype",
        "tokenizer",
        "chat_template",
    }
)
PLAIN = EngineOptions()  # nothing was written
