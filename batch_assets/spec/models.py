"""What a user writes in `attributes:` of a defs.yaml, as pydantic models. Unknown keys are refused at every level.

`load_spec` turns the parsed YAML into a GeneratedDatasetSpec or raises one SpecError that names every wrong place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from batch_assets.spec.condition_types import (
    NO_TYPES,
    Types,
    check_condition,
    check_texts,
    check_vectors,
    gate_types,
    judged_types,
    table_types,
)
from batch_assets.spec.errors import SpecError, Unusable, explain, nearest, show
from batch_assets.spec.export_options import BadOption
from batch_assets.spec.exports import MOST_EXPORTS, ExportSpec, check_apart
from batch_assets.spec.fields import (
    Choice,
    Column,
    Cron,
    Deadline,
    Encodable,
    EngineName,
    Flag,
    Grammar,
    JsonSchema,
    License,
    Model,
    Name,
    Rate,
    Regex,
    Strict,
    Text,
    TextFile,
    TimeZone,
)
from batch_assets.spec.gates import GatesSpec
from batch_assets.spec.hardware import HardwareSpec
from batch_assets.spec.judge import ACCEPT, WRITTEN, JudgeSpec, expanded
from batch_assets.spec.media import MOST_IMAGES, MOST_SOUNDS, Audio, AudioSpec, Images, ImagesSpec, MediaSpec
from batch_assets.spec.row_rules import OWN_RULES, SURPLUS, RowRule, RowRules, WantSpec
from batch_assets.spec.sampling import check_parts, check_said_once, extra_fields
from batch_assets.spec.sampling_values import MAX_TURNS, NUMBERS
from batch_assets.spec.source import SourceSpec, table_read_by
from batch_assets.templates.prompt_template import Template, single_braces
from gpu_runner.client.answers.pooled_outputs import SCHEMAS
from gpu_runner.client.protocol import CONTINUES_ANSWER
from gpu_runner.client.reasoning_tags import tags_of
from gpu_runner.models.facts import AS_IT_IS
from gpu_runner.offers.offer import Objective
from gpu_runner.rows import LONGER_ANSWER, POOLED, TOKEN_LIMITS, Generation, Task
from resources.engine_options import PLAIN, EngineOptions
from resources.pricing.model_catalog import DeclaredModel
from resources.store.outcome_columns import OUTCOME_COLUMNS, TURNS, WRITTEN_TURNS
from resources.store.snapshot_manifest import REPEATS, SAMPLE_INDEX

__all__ = ["DEFAULT_MAX_TOKENS", "GeneratedDatasetSpec", "SpecError", "load_spec"]

# Columns of the published table: a kept column must not take one of these names.
OWN_COLUMNS = frozenset({*OUTCOME_COLUMNS, "prompt", "batch", "of_row_id", "duplicate_of", REPEATS})
FLAGS = "flags"  # of rows that pass a filter, beside the columns of the table
MAX_COLUMN_NAME = 255
MOST_BATCH_BYTES = 1 << 30  # of images and audio of one batch, which is in memory as a whole
_FORMS = ("json_schema", "choice", "regex", "grammar")  # keys of `output` that say which form outputs have
DEFAULT_MAX_TOKENS = 1024  # of an answer, where the user says nothing
_TAG_KEY = re.compile(r"([A-Za-z0-9_.-]{1,63}/)?[A-Za-z0-9_.-]{1,63}")
_TAG_VALUE = re.compile(r"[A-Za-z0-9_.-]{0,63}")
# An address as Dagster takes it (dagster/_core/utils.py); for any other it would load no dataset at all.
_OWNER = re.compile(r"team:\S+|\b[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,7}\b")


def _extra(value: dict[str, Any]) -> dict[str, Any]:
    return extra_fields(value, SamplingSpec.model_fields)


def _reuse_kind(value: Any) -> str:
    return "list" if isinstance(value, list) else "flag"


Reuse = Annotated[
    Annotated[Flag, Tag("flag")] | Annotated[list[Name], Field(max_length=100), Tag("list")], Discriminator(_reuse_kind)
]


def _by_row_kind(value: Any) -> str:
    return "template" if isinstance(value, str) and ("{{" in value or "{%" in value) else "value"


Value = TypeVar("Value")
ByRow = Annotated[Annotated[Value, Tag("value")] | Annotated[Text, Tag("template")], Discriminator(_by_row_kind)] | None
BY_ROW = (*NUMBERS, "stop")  # request fields that a row may have of its own
_COLUMNS = ("tools_from", "tool_choice_from")


class MessageSpec(Strict):
    """One chat message."""

    role: Literal["system", "user", "assistant"] = Field(description="Who speaks.")
    content: Text = Field(description="Jinja template over the row's columns.")


class SamplingSpec(Strict):
    """Request fields of the OpenAI API (and vLLM's own). What is left out is the engine's default. Where a number or
    `stop` may stand, a template over the row's columns may, too: `temperature: "{{ t }}"`.
    """

    temperature: ByRow[Annotated[float, Field(ge=0, le=2)]] = Field(
        default=None, description="0 = always the likeliest token."
    )
    max_tokens: ByRow[Annotated[int, Field(ge=1, le=1 << 20)]] = Field(
        default=None,
        description="Most tokens per row. Default 1024 for chat and completion, unless `extra` has another name of it "
        "(max_completion_tokens). null: none is sent, and an answer ends where the engine ends it.",
    )
    min_tokens: ByRow[Annotated[int, Field(ge=0, le=1 << 20)]] = Field(
        default=None, description="Fewest tokens per row."
    )
    top_p: ByRow[Annotated[float, Field(gt=0, le=1)]] = Field(default=None, description="Nucleus sampling.")
    top_k: ByRow[Annotated[int, Field(ge=-1, le=(1 << 31) - 1)]] = Field(
        default=None, description="Only the k likeliest tokens; -1 = all."
    )
    min_p: ByRow[Annotated[float, Field(ge=0, le=1)]] = Field(
        default=None, description="Least probability relative to the likeliest token."
    )
    seed: ByRow[Annotated[int, Field(ge=0, le=(1 << 63) - 1)]] = Field(
        default=None, description="Makes a request repeatable on engines that honour it."
    )
    stop: ByRow[Annotated[list[str], Field(min_length=1, max_length=16)]] = Field(
        default=None, description="Texts that end the generation."
    )
    frequency_penalty: ByRow[Annotated[float, Field(ge=-2, le=2)]] = Field(
        default=None, description="Against repeated tokens, by count."
    )
    presence_penalty: ByRow[Annotated[float, Field(ge=-2, le=2)]] = Field(
        default=None, description="Against repeated tokens, once."
    )
    repetition_penalty: ByRow[Annotated[float, Field(gt=0, le=2)]] = Field(
        default=None, description="Against repeated tokens; 1 = none."
    )
    dimensions: int | None = Field(default=None, ge=1, le=1 << 20, description="Length of the vectors (embedding).")
    chat_template_kwargs: Encodable | None = Field(
        default=None, description="Passed to the model's chat template, e.g. {enable_thinking: false}."
    )
    extra: Annotated[dict[str, Any], AfterValidator(_extra)] | None = Field(
        default=None,
        description="Any other request field, sent as it is: tools, tool_choice, logprobs and so on. A field whose "
        "answer has no column is refused, and one that says again what another key says.",
    )

    tools_from: Column | None = Field(
        default=None,
        description="Column with the tools of each row (chat): a list as OpenAI writes them, or its JSON text. A row "
        "without a value has none.",
    )
    tool_choice_from: Column | None = Field(
        default=None, description="Column with `tool_choice` of each row: none, auto, required, or a tool (chat)."
    )

    def request(self) -> dict[str, Any]:
        """The request fields that were set, for all rows alike."""
        fields = self.model_dump(exclude_none=True, exclude={"extra", *_COLUMNS, *self.templates()})
        return fields | dict(self.extra or {})

    def templates(self) -> dict[str, str]:
        """Fields that each row has of its own, and the template of each."""
        return {name: value for name in BY_ROW if isinstance(value := getattr(self, name), str)}

    @property
    def limits_tokens(self) -> bool:
        """Whether the user wrote what limits an answer, or that nothing does (null)."""
        if isinstance(self.max_tokens, str):  # rows for which it is blank have the default
            return False
        return "max_tokens" in self.model_fields_set or not (self.extra or {}).keys().isdisjoint(TOKEN_LIMITS)


class UserModelSpec(Strict):
    """A model that plays the user of a conversation: it writes what the user says after each answer but the last."""

    system: Text = Field(
        description="Who the user is and wants: the system message of the user's model, a template over the row's "
        "columns. It sees the conversation from the user's side, and not `prompt.system`."
    )
    turns: int = Field(
        ge=2, le=MAX_TURNS, description="Turns of the user in all, with the first one, which `prompt.user` is."
    )
    opening: str = Field(
        default="Hello! How can I help you?",
        min_length=1,
        max_length=10_000,
        description="What the user's model is greeted with before its first words, as chat templates begin with a "
        "message to answer.",
    )
    model: Model | None = Field(
        default=None,
        description="Another name that the same engine serves: `model` itself, beside an `engine.lora`, or an adapter "
        "of `engine`. Default: whoever answers. With `engine` any model that it serves.",
    )
    engine: EngineName | None = Field(
        default=None,
        description="Another engine for the user's model: the name of one of kind `endpoint` in fleet.yaml, whose "
        "`models` has `model`. Default: the one that answers. No part of what tells whether a row is the same.",
    )
    sampling: SamplingSpec = Field(
        default=SamplingSpec(),
        description="That of the user's model, the same for all rows; nothing is taken over from `sampling`.",
    )

    @model_validator(mode="after")
    def _engine_has_a_model(self) -> Self:
        if self.engine is not None and self.model is None:
            raise Unusable("user_model.model beside it", "none", "Write which model is asked there.", key="engine")
        return self

    @model_validator(mode="after")
    def _plain_sampling(self) -> Self:
        sampling = self.sampling
        hint = "Write one value for all rows."
        for name in (*sampling.templates(), *_COLUMNS):
            if (given := getattr(sampling, name)) is not None:
                raise Unusable("no column in it", show(given), hint, key=f"sampling.{name}")
        if sampling.dimensions is not None:
            raise Unusable("no dimensions for a chat", show(sampling.dimensions), key="sampling.dimensions")
        check_parts("chat", sampling.extra or {}, None)
        if (sampling.extra or {}).get("tools"):
            raise Unusable("no tools", "some", "Nobody would answer a user's tool call.", key="sampling.extra.tools")
        check_said_once("chat", sampling.request(), sampling.extra or {}, None)
        return self

    def settings(self, answers_as: str) -> dict[str, Any]:
        """As a generation holds it. `answers_as`: what requests call the model that answers."""
        sampling = self.sampling.request()
        if not self.sampling.limits_tokens:
            sampling["max_tokens"] = DEFAULT_MAX_TOKENS
        named = {} if self.model in (None, answers_as) else {"model": self.model}
        return {"opening": self.opening, "sampling": sampling, "turns": self.turns, **named}


class PromptSpec(Strict):
    """The prompt: Jinja templates over the row's columns."""

    system: Text | None = Field(default=None, description="System message (chat).")
    system_from: TextFile | None = Field(
        default=None, description="A file beside this one with the system message, a template as `system` is (chat)."
    )
    examples: TextFile | None = Field(
        default=None,
        description='A JSONL file beside this one with examples, `{"user": "…", "assistant": "…"}`, as they are: '
        "messages between the system message and the rest (chat).",
    )
    messages_from: Column | None = Field(
        default=None,
        description="Column with a conversation of each row (chat): a list of messages as OpenAI writes them, or its "
        "JSON text. `system` and `examples` may stand before it, `user` after it.",
    )
    user: Text | None = Field(default=None, description="User message (chat), or the whole prompt.")
    turns: list[Text] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_TURNS,
        description="What the user says in a conversation, instead of `user` (chat): templates, each asked after the "
        "answer to the one before it. One row, one line, with all turns in the column `turns`.",
    )
    turns_from: Column | None = Field(
        default=None,
        description=f"As `turns`, from a column: a list of 1 to {MAX_TURNS} texts, or its JSON text.",
    )
    user_model: UserModelSpec | None = Field(
        default=None,
        description="A model that plays the user after the first answer to `user` (chat): each of its texts is asked "
        "for with its own system message, and then answered. One row, one line, as with `turns`.",
    )
    messages: list[MessageSpec] | None = Field(
        default=None,
        min_length=1,
        max_length=500,
        description="A whole conversation (chat), instead of system and user. A last message of the assistant is the "
        "beginning of each answer.",
    )
    images: Images | None = Field(
        default=None, description="Images (chat): a column, several, or a section with their limits."
    )
    audio: Audio | None = Field(
        default=None, description="Audio (chat): a column, several, or a section with its limits."
    )
    text: Text | None = Field(
        default=None, description="The whole prompt (completion, embedding, classify and pooling)."
    )
    query: Text | None = Field(
        default=None, description="Text that `document` is held against (score), or `documents_from` (rerank)."
    )
    document: Text | None = Field(default=None, description="Text whose fit to `query` is scored (score).")
    documents_from: Column | None = Field(
        default=None,
        description="Column with the documents of each row (rerank): a list of 1 to 1,000 texts, or its JSON text.",
    )

    @property
    def all_images(self) -> ImagesSpec | None:
        """`images` as a section."""
        given = [self.images] if isinstance(self.images, str) else self.images
        return ImagesSpec(columns=given) if isinstance(given, list) else given

    @property
    def all_audio(self) -> AudioSpec | None:
        """`audio` as a section."""
        given = [self.audio] if isinstance(self.audio, str) else self.audio
        return AudioSpec(columns=given) if isinstance(given, list) else given

    @property
    def media(self) -> dict[str, MediaSpec]:
        """`images` and `audio` as sections, by the engine's name for one of them."""
        found = {"image": self.all_images, "audio": self.all_audio}
        return {name: one for name, one in found.items() if one is not None}

    def templates(self) -> list[tuple[str, str, str]]:
        """(key in the spec, role, template) of every message; the role of a plain text is empty."""
        if self.messages is not None:
            return [(f"messages.{i}.content", m.role, m.content) for i, m in enumerate(self.messages)]
        parts = [("system", "system", self.system), ("user", "user", self.user), ("text", "", self.text)]
        parts += [(f"turns.{i}", "user", text) for i, text in enumerate(self.turns or ())]
        parts += [("user_model.system", "system", self.user_model.system)] if self.user_model is not None else []
        parts += [("query", "", self.query), ("document", "", self.document)]
        return [(key, role, template) for key, role, template in parts if template is not None]

    @property
    def makes_conversations(self) -> bool:
        """Whether messages may hold more than a role and a text."""
        return self.messages_from is not None or bool(self.media)

    @property
    def has_turns(self) -> bool:
        """Whether rows are conversations, whose later turns are asked after the answers to those before."""
        return self.turns is not None or self.turns_from is not None or self.user_model is not None


class OutputSpec(Strict):
    """What the engine must return."""

    json_schema: JsonSchema | None = Field(
        default=None,
        description="JSON schema of each output: sent as structured output and validated on return. Or the import path "
        "of a pydantic class, `my_package.models:Answer`, whose schema it is.",
    )
    choice: Choice | None = Field(
        default=None, description="Texts of which each output is one: sent as structured output, checked on return."
    )
    regex: Regex | None = Field(
        default=None,
        description="Regular expression that each whole output matches: sent as structured output, checked on return.",
    )
    grammar: Grammar | None = Field(
        default=None,
        description="Grammar of each output, as the engine reads it (vLLM: EBNF), which alone holds outputs to it.",
    )
    reasoning_tags: Literal["auto", "think", "mistral", "seed_oss", "harmony"] | None = Field(
        default=None,
        description="Put thinking that the server left in the text into the column `reasoning`: <think>…</think>, "
        "[THINK]…[/THINK] (mistral), <seed:think>…</seed:think> (seed_oss), the channels of gpt-oss (harmony); auto: "
        "by the model's name. For rows that are asked from then on.",
    )
    on_truncated: Literal["keep", "retry_longer", "dead"] = Field(
        default="keep",
        description="What becomes of an answer that ends at the token limit. retry_longer: asked again with twice the "
        "limit, up to `retry_max_tokens`, a try each; dead: a dead letter `truncated`.",
    )
    retry_max_tokens: int | None = Field(
        default=None,
        ge=2,
        le=1 << 20,
        description="Most tokens that retry_longer asks for. Default: four times max_tokens, which each row may have "
        "of its own.",
    )
    max_tokens_may_grow: Flag = Field(
        default=False,
        description="Leave max_tokens out of what tells whether a row is the same: a new one asks for no row that has "
        "its answer. Cut ones are then asked by `redrive --error truncated`, or by `run --regenerate --where`.",
    )
    columns: Flag = Field(
        default=False,
        description="Put the properties of the JSON schema, which is one of an object, into the table as typed "
        "columns; `output` stays as text. A change counts from the next table on.",
    )
    repair_tries: int = Field(
        default=1,
        ge=0,
        le=5,
        description="Times a row is asked again when its output misses the schema, the choices or the pattern.",
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) > 1:
            raise Unusable(f"one of {', '.join(_FORMS)}", " and ".join(given), "They exclude each other.")
        return self

    @property
    def form(self) -> str | None:
        """The key that says which form outputs have; None: none does."""
        return next((name for name in _FORMS if getattr(self, name) is not None), None)

    def structured(self) -> dict[str, Any] | None:
        """vLLM's field for it; None where there is no form, or a JSON schema, which has a field of OpenAI's."""
        form = self.form
        return None if form in (None, "json_schema") else {form: getattr(self, form)}


class ChecksSpec(Strict):
    """Thresholds of the asset checks. Leave a rate empty (null) to switch its check off."""

    max_dead_rate: Rate | None = Field(default=0.01, description="Most dead letters per row.")
    min_schema_valid_rate: Rate | None = Field(default=0.99, description="Fewest outputs that match the JSON schema.")
    max_empty_rate: Rate | None = Field(default=0.01, description="Most outputs that are empty or blank.")
    max_cut_rate: Rate | None = Field(
        default=0.01, description="Most outputs that end at the token limit (`finish_reason` is `length`)."
    )
    max_thinking_rate: Rate | None = Field(
        default=0.01, description="Most outputs that hold the model's thinking (`<think>`)."
    )
    max_repeated_rate: Rate | None = Field(
        default=None, description="Largest share of all outputs that one output may have."
    )


class GeneratedDatasetSpec(Strict):
    """A dataset that a model writes, one output per row of a source."""

    name: Name = Field(description="Name of the dataset: a-z, 0-9 and _; asset group, pool and folder in the store.")
    source: SourceSpec = Field(description="Where the rows come from.")
    task: Task = Field(
        default="chat", description="chat, completion or embedding; with vLLM score, classify, rerank or pooling, too."
    )
    prompt: PromptSpec = Field(description="Jinja templates over the row's columns.")
    model: Model = Field(description="Model as the engine knows it, e.g. Qwen/Qwen3-8B.")
    sampling: SamplingSpec = Field(default=SamplingSpec(), description="Temperature, max_tokens and so on.")
    engine: EngineOptions = Field(
        default=PLAIN, description="Arguments of the engine that the rows need. Default: as the engine is started."
    )
    output: OutputSpec = Field(default=OutputSpec(), description="Structure of the outputs.")
    id: Column | None = Field(
        default=None,
        description="Column that names a row for life (text or whole numbers, unique). Without it rows are "
        "recognised by their content, and a changed row counts as a new one.",
    )
    keep_columns: list[Column] = Field(
        default=[], max_length=200, description="Source columns to carry into the table."
    )
    include_prompt: Flag = Field(
        default=True,
        description="Put the rendered prompt into the table. A change counts from the next table on.",
    )
    show_samples: Flag = Field(
        default=True,
        description="Show ten rows of the table and five of each batch in Dagster's UI, and three on its card. "
        "false: no event, log or tag holds anything of a row.",
    )
    dedupe: Flag | None = Field(
        default=None, description="Ask each distinct prompt once. Default: on when the temperature is 0, off otherwise."
    )
    samples: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Answers to each prompt, each a row of its own with its number in the column `sample_index`. With "
        "a sampling.seed each has a seed of its own. Not with a temperature of 0, and not for embeddings.",
    )
    reuse: Reuse = Field(
        default=False,
        description="Take answers that other datasets of the store paid for, where the whole request is the same. "
        "true: of any dataset; a list: of these, the first one that has it. Only with a temperature of 0, a seed, or "
        "embeddings.",
    )
    on_bad_row: Literal["fail", "skip"] = Field(
        default="fail",
        description="fail: a row that cannot be used stops the snapshot; skip: it is listed as a reject.",
    )
    batch_rows: int = Field(default=250, ge=1, le=10_000, description="Rows per batch, the unit of durability.")
    batches_per_run: int = Field(default=100, ge=1, le=100_000, description="Most batches that one Dagster run takes.")
    checks: ChecksSpec = Field(default=ChecksSpec(), description="Thresholds of the asset checks.")
    gates: GatesSpec = Field(
        default=GatesSpec(), description="Rates of bad rows that pause the request while it is made."
    )
    filter: RowRules | None = Field(
        default=None,
        description="Rules by name: rows that fall out by one are left out of the table of rows that pass "
        "(`NAME/passed`), and kept beside it. A change counts from the next refresh on, which asks for no row.",
    )
    exports: list[ExportSpec] = Field(
        default=[],
        max_length=MOST_EXPORTS,
        description="Files for training, or for other programs, that are made anew of each table that is published.",
    )
    judge: JudgeSpec | None = Field(
        default=None,
        description="Rows of another dataset are judged: short for a source, a prompt, a schema and samples. "
        "`NAME/judged` has a line for each judged row with what the votes say of it.",
    )
    want: WantSpec | None = Field(
        default=None,
        description="How many rows are to pass: the source is asked in rounds until they do, it has no more, or the "
        "budget is spent. A change counts from the next refresh on.",
    )
    hardware: HardwareSpec = Field(default=HardwareSpec(), description="Which offers may be rented for it.")
    deadline: Deadline | None = Field(
        default=None,
        description="When it must be done: a time after the request (6h, 90m, 2d), a cron schedule in `timezone` "
        "(its next moment after the request), or a moment (2027-01-31T06:00:00Z).",
    )
    budget_usd: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="Most US dollars that one request may cost. A hard stop: the work then pauses.",
    )
    objective: Objective = Field(
        default="cheapest", description="Least cost, least time, or least product of both; within deadline and budget."
    )
    max_instances: int | None = Field(
        default=None, ge=1, le=999, description="Most instances at once. Default: what the fleet may have."
    )
    pilots: int = Field(
        default=3,
        ge=1,
        le=3,
        description="On how many kinds of instances speeds may be measured at first, where that is worth its boot.",
    )
    schedule: Cron | None = Field(default=None, description="Cron schedule of the refresh, in `timezone`.")
    refresh: Literal["when_upstream_changes"] | None = Field(
        default=None,
        description="when_upstream_changes: each new version of the table that it reads starts a refresh, by Dagster's "
        "automation. Default: none does.",
    )
    timezone: TimeZone = Field(
        default="UTC",
        description="Time zone of `schedule`, and of a deadline that is a cron schedule: a name like Europe/Paris.",
    )
    owners: list[str] = Field(default=[], description="E-mail addresses, or team:name.")
    tags: dict[str, str] = Field(default={}, description="Tags of the assets in Dagster.")
    license: License | None = Field(
        default=None, description="Licence of the rows, as the Hugging Face hub names it: apache-2.0, cc-by-4.0, other."
    )
    description: str | None = Field(
        default=None, description="What the dataset is for; shown in the catalog and on its card."
    )

    @model_validator(mode="before")
    @classmethod
    def _expanded(cls, given: Any) -> Any:
        return expanded(given)

    @model_validator(mode="before")
    @classmethod
    def _limit_of_media(cls, given: Any) -> Any:
        """The engine's `limit_mm_per_prompt`, from `prompt.images` and `prompt.audio`, unless one is written."""
        prompt = given.get("prompt") if isinstance(given, Mapping) else None
        if not isinstance(prompt, Mapping):
            return given
        limits: dict[str, int] = {}
        for key, name, least in (("images", "image", MOST_IMAGES), ("audio", "audio", MOST_SOUNDS)):
            media = prompt.get(key)
            most = media.get("max_count", least) if isinstance(media, Mapping) else least
            if media is not None and type(most) is int:
                limits[name] = most
        engine = given.get("engine") or {}
        if not limits or not isinstance(engine, Mapping) or "limit_mm_per_prompt" in engine:
            return given
        return {**given, "engine": {**engine, "limit_mm_per_prompt": limits}}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_prompt(self.task, self.prompt)
        _check_task(self)
        _check_columns(self)
        _check_labels(self)
        _check_reuse(self)
        _check_media(self)
        _check_adapter(self)
        _check_server(self)
        _check_refresh(self)
        _check_samples(self)
        _check_judge(self)
        _check_output_columns(self)
        _check_turns(self)
        _check_rules(self)
        _check_filter(self)
        _check_exports(self)
        _check_want(self)
        check_condition_types(self)
        return self

    @property
    def accepted_by(self) -> str:
        """The dataset whose rules say which rows are accepted, where it has `want`."""
        other = self.want is not None and self.want.accepted_by != OWN_RULES
        return self.want.accepted_by if self.want is not None and other else self.name

    @property
    def rules(self) -> dict[str, RowRule] | None:
        """The rules that decide which rows pass, of the table or, with a judge, of the judged rows; None: there are
        none."""
        if self.judge is None or self.judge.accept is None:
            return self.filter
        return {ACCEPT: RowRule(where=self.judge.accept, remove=True), **(self.filter or {})}

    @property
    def conditions(self) -> dict[str, str]:
        """SQL over rows that are made, by the keys under which it stands."""
        found = {f"filter.{name}.where": rule.where for name, rule in (self.filter or {}).items()}
        found |= {"judge.accept": self.judge.accept} if self.judge is not None else {}
        found |= {f"exports.{number}.where": one.where for number, one in enumerate(self.exports)}
        found |= {f"gates.rules.{name}.where": rule.where for name, rule in self.gates.rules.items()}
        return {key: where for key, where in found.items() if where is not None}

    @property
    def table_columns(self) -> set[str]:
        """Columns of the published table."""
        properties = (self.output.json_schema or {}).get("properties") or {} if self.output.columns else {}
        hidden = {"row_key", "of_row_id", REPEATS} | (set() if self.include_prompt else {"prompt"})
        pooled = SCHEMAS[self.task]["properties"] if self.task in SCHEMAS else {}
        sampled = [SAMPLE_INDEX] if self.samples > 1 else []
        said = [TURNS] if self.prompt.has_turns else []
        said += [WRITTEN_TURNS] if self.prompt.user_model is not None else []
        return {*(OWN_COLUMNS - hidden), *self.keep_columns, *properties, *pooled, *sampled, *said}

    @property
    def judged_columns(self) -> set[str]:
        """Columns of the table of judged rows, where there is a judge."""
        if self.judge is None:
            return set()
        hidden = {"prompt"} if self.judge.question is None else set()
        return {*self.judge.columns, *self.keep_columns} - hidden - set(WRITTEN)

    @property
    def id_column(self) -> str | None:
        """The column that names a row for life: `id`, or the row id of the dataset that is read. With `explode` an
        element's id begins with it; with `group_by` a row is named by its group instead."""
        return self.id or (self.source.name_here("row_id") if self.source.dataset is not None else None)

    @property
    def has_ids(self) -> bool:
        """Whether rows are named for life, and not recognised by their content."""
        return self.id_column is not None or self.source.group_by is not None

    @property
    def dedupe_effective(self) -> bool:
        """Whether equal prompts are asked once: as written, else on exactly when the temperature is 0."""
        return self.dedupe if self.dedupe is not None else self.sampling.temperature == 0

    @property
    def repeatable(self) -> bool:
        """Whether a request has the same answer each time, as far as it says."""
        user = self.prompt.user_model
        asked = [self.sampling, *([user.sampling] if user is not None else [])]
        return self.task in POOLED or all(one.temperature == 0 or isinstance(one.seed, int) for one in asked)

    def declared(self, model: str) -> DeclaredModel | None:
        """What is stated of the model, whose name a run may set: its facts, and how it is served."""
        stated, served = self.hardware.declared(model), self.engine.served
        if served == AS_IT_IS:
            return stated
        return DeclaredModel(None, served=served) if stated is None else replace(stated, served=served)

    def generation(self) -> Generation:
        """What all rows share: everything of a request except the prompt itself."""
        sampling = self.sampling.request()
        if self.task not in POOLED and not self.sampling.limits_tokens:
            sampling["max_tokens"] = DEFAULT_MAX_TOKENS
        if self.prompt.messages is not None and self.prompt.messages[-1].role == "assistant":
            sampling = {**CONTINUES_ANSWER, **sampling}
        output = self.output
        made = Generation(
            self.task,
            self.model,
            sampling,
            output.json_schema,
            output.repair_tries,
            output.structured(),
            self.engine.identity() or None,
            on_truncated=None if output.on_truncated == "keep" else output.on_truncated,
            max_tokens_may_grow=output.max_tokens_may_grow or None,
            reasoning_tags=tags_of(self.model) if output.reasoning_tags == "auto" else output.reasoning_tags,
        )
        if (user := self.prompt.user_model) is not None:
            made = replace(made, user_model=user.settings(made.asked_model))
        most = None if isinstance(self.sampling.max_tokens, str) else made.most_tokens
        if output.on_truncated != "retry_longer" or (output.retry_max_tokens is None and most is None):
            return made
        return replace(made, retry_max_tokens=output.retry_max_tokens or LONGER_ANSWER * (most or 0))


def load_spec(attributes: Any, file: str | Path) -> GeneratedDatasetSpec:
    """The spec in a parsed YAML mapping. Raises SpecError; `file` is only named in it."""
    try:
        return GeneratedDatasetSpec.model_validate(attributes)
    except ValidationError as error:
        raise explain(error, GeneratedDatasetSpec, attributes, file) from None


def _check_prompt(task: Task, prompt: PromptSpec) -> None:
    keys = ("system", "system_from", "examples", "messages_from", "user", "turns", "turns_from", "messages", "text")
    given = [key for key in (*keys, "query", "document", "documents_from") if getattr(prompt, key) is not None]
    allowed: tuple[list[str], ...] = (["text"], ["user"])
    expected = "prompt.text (or prompt.user) alone"
    if task == "score":
        allowed, expected = (["query", "document"],), "prompt.query and prompt.document"
    elif task == "rerank":
        allowed, expected = (["query", "documents_from"],), "prompt.query and prompt.documents_from"
    asked = given
    if task == "chat":
        said = (["user"], ["turns"], ["turns_from"])
        allowed = (*said, ["messages_from"], *(["messages_from", *one] for one in said), ["messages"])
        expected = (
            "prompt.user, prompt.turns, prompt.turns_from, prompt.messages_from (with one of these after it or "
            "without), or prompt.messages"
        )
        if given != ["messages"]:
            asked = [key for key in given if key not in ("system", "system_from", "examples")]
            expected += "; before user, turns and messages_from prompt.system (or system_from) and prompt.examples"
            twice = {"system", "system_from"} <= set(given) or asked == ["messages"]
            asked = given if twice else asked
    if asked not in allowed:
        raise Unusable(f"{expected} for task {task}", " and ".join(given) or "nothing", key="prompt")
    with_columns = {"messages_from", "system_from", "turns_from", "documents_from"} & set(given)
    if not with_columns and not any(Template(text).columns for _, _, text in prompt.templates()):
        for key, _, text in prompt.templates():
            if name := single_braces(text):
                expected = f"a column in double braces, {{{{ {name} }}}}"
                raise Unusable(expected, f"no column, and {{{name}}}, which is sent as it is", key=f"prompt.{key}")
    if prompt.messages is not None and prompt.messages[-1].role == "system":
        last, expected = (
            len(prompt.messages) - 1,
            "a last message of role user, or of assistant, which the model continues",
        )
        raise Unusable(expected, prompt.messages[-1].role, key=f"prompt.messages.{last}.role")


def _check_task(spec: GeneratedDatasetSpec) -> None:
    sampling = spec.sampling
    if spec.task in POOLED:
        if (form := spec.output.form) is not None:
            words = "JSON schema" if form == "json_schema" else form
            raise Unusable(f"no {words} for task {spec.task}", "one", key=f"output.{form}")
        own = {"dimensions"} if spec.task in ("embedding", "pooling") else set[str]()
        for field in sorted(sampling.model_fields_set - own - {"extra"}):
            if getattr(sampling, field) is not None:
                expected = f"only {' and '.join([*own, 'extra'])} for task {spec.task}"
                raise Unusable(expected, show(getattr(sampling, field)), key=f"sampling.{field}")
    elif sampling.dimensions is not None:
        raise Unusable(
            "no dimensions unless the task is embedding", show(sampling.dimensions), key="sampling.dimensions"
        )
    if sampling.chat_template_kwargs is not None and spec.task != "chat":
        raise Unusable("no chat template for this task", f"task {spec.task}", key="sampling.chat_template_kwargs")
    check_parts(spec.task, sampling.extra or {}, spec.output.form)
    check_said_once(spec.task, sampling.request() | sampling.templates(), sampling.extra or {}, spec.output.form)
    _check_truncated(spec, spec.generation().most_tokens)
    most = None if isinstance(sampling.max_tokens, str) else spec.generation().most_tokens
    if most is not None and isinstance(sampling.min_tokens, int) and sampling.min_tokens > most:
        raise Unusable(f"at most max_tokens ({most})", show(sampling.min_tokens), key="sampling.min_tokens")
    _check_row_tools(spec)


def _check_row_tools(spec: GeneratedDatasetSpec) -> None:
    """Raises Unusable where tools from a column do not fit what is the same for all rows."""
    sampling, extra = spec.sampling, spec.sampling.extra or {}
    for key, name in (("tools_from", "tools"), ("tool_choice_from", "tool_choice")):
        if getattr(sampling, key) is None:
            continue
        if spec.task != "chat":
            raise Unusable(f"no {name} for task {spec.task}", show(getattr(sampling, key)), key=f"sampling.{key}")
        if name in extra:
            raise Unusable(f"one of {key} and extra.{name}", "both", key=f"sampling.{key}")
    if sampling.tools_from is not None and (form := spec.output.form) is not None:
        hint = "A tool call has no text to hold against it."
        raise Unusable(f"no tools beside output.{form}", "both", hint, key="sampling.tools_from")
    if sampling.tool_choice_from is not None and sampling.tools_from is None and not extra.get("tools"):
        raise Unusable("tools beside tool_choice_from", "none", key="sampling.tool_choice_from")


def _check_truncated(spec: GeneratedDatasetSpec, most: int | None) -> None:
    """`most`: tokens that an answer may have at first."""
    output = spec.output
    if spec.task in POOLED and output.reasoning_tags:
        hint = "A vector has no text."
        expected = f"no such key for task {spec.task}"
        raise Unusable(expected, show(output.reasoning_tags), hint, key="output.reasoning_tags")
    for key, given in (("on_truncated", output.on_truncated), ("max_tokens_may_grow", output.max_tokens_may_grow)):
        if given in ("keep", False, None):
            continue
        if spec.task in POOLED:
            hint = "A vector is not cut, nor is a score."
            raise Unusable(f"no such key for task {spec.task}", show(given), hint, key=f"output.{key}")
        if most is None and given != "dead":
            hint = "Without one no answer is cut at it."
            raise Unusable("a token limit beside it", "max_tokens: null", hint, key=f"output.{key}")
    if output.retry_max_tokens is None:
        return
    if output.on_truncated != "retry_longer":
        raise Unusable("on_truncated: retry_longer beside it", output.on_truncated, key="output.retry_max_tokens")
    of_rows = isinstance(spec.sampling.max_tokens, str)
    if most is not None and not of_rows and output.retry_max_tokens <= most:
        raise Unusable(f"more than max_tokens ({most:,})", show(output.retry_max_tokens), key="output.retry_max_tokens")


def _check_columns(spec: GeneratedDatasetSpec) -> None:
    seen: dict[str, str] = {}
    for index, column in enumerate(spec.keep_columns):
        # DuckDB and others do not tell column names apart by case.
        if column.lower() in OWN_COLUMNS:
            raise Unusable(
                "a column name that the table does not use itself",
                show(column),
                "Give it another name: source.rename, old name to new name.",
                key=f"keep_columns.{index}",
            )
        if column.lower() in seen:
            other = seen[column.lower()]
            found = show(column) if other == column else f"{show(column)} beside {show(other)}"
            hint = (
                "" if other == column else "Readers of tables do not tell case apart: rename one, under source.rename."
            )
            raise Unusable("each column once", found, hint, key=f"keep_columns.{index}")
        seen[column.lower()] = column
    if spec.id is not None and spec.source.group_by is not None and [spec.id] != spec.source.group_by:
        raise Unusable("no id beside group_by, whose values name a row", show(spec.id), key="id")
    if spec.source.dataset == spec.name:
        raise Unusable("another dataset", "the dataset itself", key="source.dataset")


def _check_rules(spec: GeneratedDatasetSpec) -> None:
    if not spec.gates.rules:
        return
    from batch_assets.gates.quality_gates import rule_columns
    from resources.store.row_condition import BadCondition, SqlCondition

    known = rule_columns(spec.output.json_schema)
    for name, rule in spec.gates.rules.items():
        try:
            SqlCondition(rule.where, known)
        except BadCondition as error:
            key = f"gates.rules.{name}.where"
            raise Unusable("a condition over a row's outcome", show(rule.where), f"{error}.", key=key) from None


def _check_output_columns(spec: GeneratedDatasetSpec) -> None:
    if spec.task in SCHEMAS:
        own = SCHEMAS[spec.task]["properties"]
        for index, column in enumerate(spec.keep_columns):
            if column.lower() in own:
                hint = "The output has it. Give the column another name: source.rename, old name to new name."
                raise Unusable(
                    f"no such column beside task {spec.task}", show(column), hint, key=f"keep_columns.{index}"
                )
    if not spec.output.columns:
        return
    from gpu_runner.client.json_schemas.column_types import column_types
    from gpu_runner.client.json_schemas.schema_limits import SchemaProblem

    if spec.output.json_schema is None:
        raise Unusable("output.json_schema beside it", "none", "Its properties are the columns.", key="output.columns")
    try:
        names = list(column_types(spec.output.json_schema))
    except SchemaProblem as error:
        hint = "Leave output.columns out: the column output has the whole JSON as text."
        raise Unusable(error.expected, error.found, hint, key="output.columns") from error
    sampled = {SAMPLE_INDEX} if spec.samples > 1 else set()
    sampled |= {TURNS} if spec.prompt.has_turns else set()
    sampled |= {WRITTEN_TURNS} if spec.prompt.user_model is not None else set()
    taken = dict.fromkeys(OWN_COLUMNS | sampled, "a column that the table has itself")
    taken |= {column.lower(): f"the column {show(column)} of keep_columns" for column in spec.keep_columns}
    for name in names:
        # DuckDB and others do not tell column names apart by case.
        if (other := taken.get(name.lower())) is not None:
            found = f"the property {show(name)} and {other}"
            hint = "Give the property another name in the schema, or leave output.columns out."
            if other.endswith("keep_columns"):
                hint = (
                    "Give the property another name in the schema, or the column one under source.rename (old name to "
                    "new name, in keep_columns and the prompt the new one), or leave one of them out."
                )
            raise Unusable("properties whose names no other column has", found, hint, key="output.columns")
        if not name.strip() or len(name) > MAX_COLUMN_NAME or not name.isprintable():
            found, most = show(name[:MAX_COLUMN_NAME]), f"1 to {MAX_COLUMN_NAME} printable characters"
            raise Unusable(f"properties whose names are {most}", found, key="output.columns")
        taken[name.lower()] = f"the property {show(name)}"


def _check_turns(spec: GeneratedDatasetSpec) -> None:
    """Raises Unusable for what has no meaning in a conversation whose user's words are fixed."""
    if not spec.prompt.has_turns:
        return
    key = next(key for key in ("turns", "turns_from", "user_model") if getattr(spec.prompt, key) is not None)
    _check_user_model(spec)
    if spec.sampling.tools_from is not None or (spec.sampling.extra or {}).get("tools"):
        hint = "Nobody would answer a tool call before the next turn."
        raise Unusable("no tools beside it", "some", hint, key=f"prompt.{key}")
    for index, column in enumerate(spec.keep_columns):
        if column.lower() == TURNS or (column.lower() == WRITTEN_TURNS and key == "user_model"):
            hint = "Give it another name: source.rename, old name to new name."
            raise Unusable(f"no such column beside prompt.{key}", show(column), hint, key=f"keep_columns.{index}")


def _check_user_model(spec: GeneratedDatasetSpec) -> None:
    user = spec.prompt.user_model
    if user is None:
        return
    if spec.prompt.user is None or spec.prompt.messages_from is not None or spec.task != "chat":
        others = [key for key in ("turns", "turns_from", "messages_from", "messages") if getattr(spec.prompt, key)]
        found = f"task {spec.task}" if spec.task != "chat" else f"prompt.{' and prompt.'.join(others)}"
        expected = "task chat, and what the user says first in prompt.user alone"
        raise Unusable(expected, found, key="prompt.user_model")
    served = [spec.model, *(one.name for one in spec.engine.adapters)]
    if user.model is not None and user.engine is None and user.model not in served:
        hint = (
            "A run rents engines for one model. Leave it out, name an engine of fleet.yaml that serves it "
            "(prompt.user_model.engine), or make an adapter of it that engine.lora_modules has."
        )
        raise Unusable(f"one of {', '.join(served[:5])}", show(user.model), hint, key="prompt.user_model.model")


def _check_reuse(spec: GeneratedDatasetSpec) -> None:
    if not spec.reuse:
        return
    if not spec.repeatable:
        raise Unusable(
            "sampling whose answers are the same each time",
            "no temperature of 0 and no seed",
            "Set sampling.temperature to 0 or give a sampling.seed, or leave reuse out.",
            key="reuse",
        )
    for index, name in enumerate(spec.reuse if isinstance(spec.reuse, list) else ()):
        if name == spec.name:
            raise Unusable(
                "other datasets", "the dataset itself", "It keeps its own answers anyway.", key=f"reuse.{index}"
            )


def _check_samples(spec: GeneratedDatasetSpec) -> None:
    if spec.samples == 1:
        return
    if spec.task in POOLED:
        raise Unusable(f"1 for task {spec.task}", show(spec.samples), "All would be the same.", key="samples")
    if spec.sampling.temperature == 0:
        hint = "All samples of a prompt would be the same answer. Raise sampling.temperature, or leave samples out."
        raise Unusable("1 with a temperature of 0", show(spec.samples), hint, key="samples")
    if isinstance(spec.sampling.seed, str):
        hint = "All samples of a prompt would have its row's seed. Write a number, or leave the seed out."
        raise Unusable("1 with a seed from a column", show(spec.samples), hint, key="samples")
    for index, column in enumerate(spec.keep_columns):
        if column.lower() == SAMPLE_INDEX:
            hint = "Give the column another name in the source."
            raise Unusable("no such column beside samples", show(column), hint, key=f"keep_columns.{index}")


def _check_media(spec: GeneratedDatasetSpec) -> None:
    prompt, media = spec.prompt, spec.prompt.media
    if not media:
        return
    keys = {"image": "images", "audio": "audio"}
    first = keys[next(iter(media))]
    users = [one.role for one in prompt.messages or () if one.role == "user"]
    if spec.task != "chat" or not (prompt.user or users):
        found = f"task {spec.task}" if spec.task != "chat" else "no message of the user"
        expected = "task chat, and prompt.user or a message of the user, which gets them"
        raise Unusable(expected, found, key=f"prompt.{first}")
    row_bytes = sum(one.row_bytes for one in media.values())
    if spec.batch_rows * row_bytes > MOST_BATCH_BYTES:
        said = " and ".join(f"prompt.{keys[name]}" for name in media)
        hint = f"Those of a batch are in memory together. Lower batch_rows, or max_bytes of {said}."
        expected = f"at most {MOST_BATCH_BYTES // row_bytes:,} beside {said}"
        raise Unusable(expected, show(spec.batch_rows), hint, key="batch_rows")
    limits = spec.engine.limit_mm_per_prompt
    for name, one in media.items():
        limit = None if limits is None else getattr(limits, name)
        if limit is not None and limit < one.max_count:
            expected = f"at least {one.max_count}, max_count of prompt.{keys[name]}"
            raise Unusable(expected, show(limit), key=f"engine.limit_mm_per_prompt.{name}")


def _check_server(spec: GeneratedDatasetSpec) -> None:
    if spec.engine.server == "sglang" and spec.task not in ("chat", "completion", "embedding"):
        hint = "SGLang answers it in another form. Leave engine.server out for vLLM."
        raise Unusable("vLLM for this task", "sglang", hint, key="engine.server")


def _check_adapter(spec: GeneratedDatasetSpec) -> None:
    if spec.model in [one.name for one in spec.engine.adapters]:
        raise Unusable("another name than the model's for each adapter", show(spec.model), key="engine")


def _check_judge(spec: GeneratedDatasetSpec) -> None:
    judge, least = spec.judge, spec.gates.min_judge_score
    if least is not None:
        if judge is None or judge.pairwise:
            found = "no judge" if judge is None else "one that compares"
            raise Unusable("a judge with scores beside it", found, key="gates.min_judge_score")
        worst, best = judge.bounds
        if not worst < least < best:
            raise Unusable(f"a score between {worst:g} and {best:g}", show(least), key="gates.min_judge_score")
    if judge is None:
        return
    for index, name in enumerate(judge.scores):
        if judge.rubric is not None and name in OWN_COLUMNS:
            raise Unusable("a name that no other column has", show(name), key=f"judge.rubric.{index}.name")
    for index, column in enumerate(spec.keep_columns[: -len(judge.written)]):
        if column.lower() in judge.columns or column in WRITTEN:
            hint = "Give the column another name: source.rename, old name to new name."
            raise Unusable(
                "a name that no column beside the scores has", show(column), hint, key=f"keep_columns.{index}"
            )
    if judge.accept is None:
        return
    import polars as pl

    names = pl.sql_expr(judge.accept).meta.root_names()
    for name in names:
        if name not in spec.judged_columns:
            hint = nearest(name, sorted(spec.judged_columns))
            raise Unusable("a column of the judged rows", show(name), hint, key="judge.accept")
    if "agreement" in names and judge.votes == 1:
        hint = "One vote agrees with nothing: write votes: 3."
        raise Unusable("several votes beside agreement", "1", hint, key="judge.votes")
    if ACCEPT in (spec.filter or {}):
        raise Unusable("another name for a rule beside judge.accept", show(ACCEPT), key="filter")


def _check_filter(spec: GeneratedDatasetSpec) -> None:
    """Each column that a rule reads is one that the table will have; none is called like the one that rows which pass
    have beside them."""
    if spec.rules is not None:
        for index, column in enumerate(spec.keep_columns):
            if column.lower() == FLAGS:  # DuckDB and others do not tell column names apart by case
                hint = "Rows that pass have it. Give the column another name: source.rename, old name to new name."
                raise Unusable("no such column beside a filter", show(column), hint, key=f"keep_columns.{index}")
        others = [("output.columns", name) for name in spec.table_columns - set(spec.keep_columns)]
        others += [("judge.rubric", name) for name in (spec.judge.scores if spec.judge is not None else ())]
        for key, name in others:
            if name.lower() == FLAGS:
                raise Unusable("no such column beside a filter", show(name), "Rows that pass have it.", key=key)
    known, what = (spec.judged_columns, "the judged rows") if spec.judge else (spec.table_columns, "the table")
    for name, rule in (spec.filter or {}).items():
        for key, column in rule.columns():
            if column not in known:
                hint = nearest(column, sorted(known))
                raise Unusable(f"a column of {what}", show(column), hint, key=f"filter.{name}.{key}")


def _check_exports(spec: GeneratedDatasetSpec) -> None:
    """Each export can be made of the table, as far as its columns are known."""
    check_apart(spec.exports)
    for index, export in enumerate(spec.exports):
        if export.passed and spec.rules is None:
            raise Unusable("a filter beside it", "none", key=f"exports.{index}.passed")
        if export.judged and (spec.judge is None or export.passed):
            expected, found = (
                ("a judge beside it", "none") if spec.judge is None else ("one of judged and passed", "both")
            )
            raise Unusable(expected, found, key=f"exports.{index}.judged")
        known = sorted(spec.judged_columns if spec.judge and (export.judged or export.passed) else spec.table_columns)
        try:
            export.options([*known, "flags"] if export.passed else known)
        except BadOption as error:
            key = f"exports.{index}.{error.key}"
            raise Unusable(error.expected, error.found, f"{error.hint}." if error.hint else "", key=key) from None


def _numbers_instead(spec: GeneratedDatasetSpec, *, of_gate: bool) -> str:
    """What makes numbers of texts, for conditions on the output. Gates see the fields of its JSON in any case."""
    if spec.task not in ("chat", "completion") or (
        spec.output.json_schema is not None and (of_gate or spec.output.columns)
    ):
        return ""
    columns = "" if of_gate else ", and have them as columns (output.columns: true)"
    return f"Or declare numbers in output.json_schema{columns}."


def check_condition_types(spec: GeneratedDatasetSpec, kept: Types = NO_TYPES) -> None:
    """Each condition and rule on rows that are made is one that rows with columns of their types can be held against.
    `kept`: types of the kept columns, where the source was read; without, they may have any. Raises Unusable.
    """
    conditions = spec.conditions
    if not conditions and not spec.filter:
        return  # Arrow takes a fifth of a second to import
    schema, has_columns = spec.output.json_schema, spec.output.columns
    own = table_types(
        spec.task,
        conversations=spec.prompt.makes_conversations,
        json_schema=schema if has_columns else None,
        kept=kept,
        there=spec.table_columns,
    )
    judged = judged_types(spec.judge, own, kept) if spec.judge is not None else own
    coming = gate_types(spec.task, schema)
    of_table = {f"exports.{number}.where" for number, one in enumerate(spec.exports) if one.part is None}
    for key, where in conditions.items():
        types = coming if key.startswith("gates.") else own if key in of_table else judged
        check_condition(key, where, types, hint=_numbers_instead(spec, of_gate=types is coming))
    for name, rule in (spec.filter or {}).items():
        for key, column in rule.columns() if rule.where is None else ():
            check_column = check_vectors if rule.semantic_duplicates is not None else check_texts
            check_column(f"filter.{name}.{key}", column, judged)


def _check_want(spec: GeneratedDatasetSpec) -> None:
    want = spec.want
    if want is None:
        return
    if want.accepted_by == spec.name:
        hint = "Its own filter is `passed`."
        raise Unusable("passed, or the name of a dataset below", "the dataset itself", hint, key="want.accepted_by")
    if want.accepted_by == OWN_RULES:
        if spec.rules is None:
            raise Unusable("a filter beside it, which says what is accepted", "none", key="want.accepted_by")
        if not any(rule.remove for rule in spec.rules.values()):
            hint = "Rules without it only mark rows, and all of them pass."
            raise Unusable("a rule with `remove: true`", "none", hint, key="filter")
        if SURPLUS in spec.rules:
            hint = "It is the flag of rows that pass beyond those wanted."
            raise Unusable("another name for a rule beside want", show(SURPLUS), hint, key="filter")
    if spec.source.limit is not None:
        hint = "want says itself how much of the source is asked. Leave limit out, or want."
        raise Unusable("no limit beside want", show(spec.source.limit), hint, key="source.limit")
    if spec.source.streaming:
        hint = "How many rows are asked is decided when those before are judged."
        raise Unusable("no streaming beside want", "both", hint, key="source.streaming")
    if want.per is not None and want.per not in spec.keep_columns:
        hint = nearest(want.per, spec.keep_columns)
        raise Unusable("one of keep_columns", show(want.per), hint, key="want.per")


def _check_refresh(spec: GeneratedDatasetSpec) -> None:
    if spec.refresh is not None and table_read_by(spec.source) is None:
        hint = "Dagster knows of no new version of files; a schedule looks for them."
        raise Unusable("a source that is the table of another dataset or asset", "another source", hint, key="refresh")


def _check_labels(spec: GeneratedDatasetSpec) -> None:
    for index, owner in enumerate(spec.owners):
        if not _OWNER.fullmatch(owner):
            hint = "Dagster knows endings of 2 to 7 letters." if "@" in owner else ""
            raise Unusable("an e-mail address or team:name", show(owner), hint, key=f"owners.{index}")
    for key, value in spec.tags.items():
        if not _TAG_KEY.fullmatch(key) or not _TAG_VALUE.fullmatch(value):
            raise Unusable(
                "a tag of letters, digits, _ . and -, at most 63 each", f"{show(key)}: {show(value)}", key="tags"
            )
