"""Rows, outcomes and batches: the words that every floor shares.

A row is one prompt. After generation it has exactly one outcome: a completion or a dead letter.
Times are Unix seconds; money is US dollars.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from sys import getsizeof
from typing import Any, Literal

import orjson

from gpu_runner.answers import NO_PARTS, AnswerParts

Task = Literal["chat", "completion", "embedding", "score", "classify", "rerank", "pooling"]
POOLED: frozenset[Task] = frozenset({"embedding", "score", "classify", "rerank", "pooling"})  # no text is written
OnTruncated = Literal["retry_longer", "dead"]
LONGER_ANSWER = 4  # times its token limit: what a row whose answer was cut is asked for at most, where nothing is said
SIMULATED = "simulated"  # behind the name of a model, or in that of an engine: its answers are no model's
Output = str | tuple[float, ...]
# Codes of dead letters: an output that misses its JSON schema, or that is none of the choices or misses its pattern.
SCHEMA_INVALID, OUTPUT_INVALID = "schema_invalid", "output_invalid"

# Request fields that limit the tokens of an answer: OpenAI's two, SGLang's, that of OpenAI's responses, llama.cpp's.
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "n_predict")


@dataclass(frozen=True, slots=True)
class Generation:
    """What all rows of a snapshot share: everything of a request except the prompt itself.

    `sampling` holds OpenAI request fields (temperature, max_tokens, seed, …) passed on as they are.
    `structured_outputs`: one of vLLM's `choice`, `regex` and `grammar`, by its name; None beside a JSON schema.
    `engine`: of the arguments that the engine is started with those that change answers, as they were written.
    `on_truncated`: what becomes of an answer that ends at the token limit; None: it is an answer. `retry_max_tokens`:
    the most tokens that such a row is asked for again; None: `LONGER_ANSWER` times its own limit.
    `max_tokens_may_grow`: row keys do not have the token limit.
    `reasoning_tags`: between which tags thinking in the text is looked for, by the name of a rule; None: nowhere.
    `user_model`: who writes what the user says after the first answer: `turns` of the user in all, the `opening` that
    it is greeted with, its `sampling`, and its `model`, where that has another name. None: nobody does.
    """

    task: Task
    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    json_schema: Mapping[str, Any] | None = None
    repair_tries: int = 1
    structured_outputs: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] | None = None
    on_truncated: OnTruncated | None = None
    retry_max_tokens: int | None = None
    max_tokens_may_grow: bool | None = None
    reasoning_tags: Literal["think", "mistral", "seed_oss", "harmony"] | None = None
    user_model: Mapping[str, Any] | None = None

    def stated(self) -> dict[str, Any]:
        """The fields as a snapshot holds them: one that came later is left out where it says nothing, so that a
        snapshot is the same as before there was such a field.
        """
        return {name: value for name, value in asdict(self).items() if name in _FIRST_FIELDS or value is not None}

    @property
    def asked_model(self) -> str:
        """What requests call the model: a LoRA adapter of it by its own name."""
        adapter = (self.engine or {}).get("lora")
        return str(adapter["name"]) if isinstance(adapter, Mapping) else self.model

    @property
    def of_user(self) -> Generation | None:
        """The requests for what the user says in a conversation; None: no model writes it."""
        given = self.user_model
        if given is None:
            return None
        named, engine = given.get("model"), self.engine
        if named is not None and engine is not None:
            engine = {name: value for name, value in engine.items() if name != "lora"}
        return Generation(
            "chat", named or self.model, given["sampling"], engine=engine, reasoning_tags=self.reasoning_tags
        )

    @property
    def without_user(self) -> Generation:
        """As an engine is asked that writes the answers alone, where another one writes what the user says."""
        return replace(self, user_model=None)

    @property
    def of_user_elsewhere(self) -> Generation | None:
        """As `of_user`, of an engine that has nothing to do with the one that answers."""
        found, given = self.of_user, self.user_model
        if found is None or given is None:
            return None
        return replace(found, model=given.get("model") or self.asked_model, engine=None)

    @property
    def limit_fields(self) -> list[str]:
        """Those of `TOKEN_LIMITS` that requests hold with a number of tokens."""
        return [name for name in TOKEN_LIMITS if type(value := self.sampling.get(name)) is int and value >= 0]

    @property
    def most_tokens(self) -> int | None:
        """Tokens that an answer may have at most, by its request; None: as many as fit the engine's context."""
        return max((self.sampling[name] for name in self.limit_fields), default=None)

    @property
    def longest_answer(self) -> int | None:
        """As `most_tokens`, of a row that is asked again because its answer was cut."""
        most = self.most_tokens
        if most is None or self.on_truncated != "retry_longer":
            return most
        return max(most, self.retry_max_tokens or LONGER_ANSWER * most)

    def with_fields(self, fields: bytes) -> Generation:
        """That of a row with request fields of its own: a JSON object, empty for none."""
        return replace(self, sampling={**self.sampling, **orjson.loads(fields)}) if fields else self

    def key_fields(self) -> dict[str, Any]:
        """What a row key has of the generation, by the names of the request."""
        sampling = dict(self.sampling)
        if self.max_tokens_may_grow:
            sampling |= dict.fromkeys(self.limit_fields, "may grow")
        fields = {"task": self.task, "model": self.model, "sampling": sampling, "json_schema": self.json_schema}
        if self.structured_outputs is not None:
            fields["structured_outputs"] = dict(self.structured_outputs)
        if self.engine:
            fields["engine"] = dict(self.engine)
        if self.user_model is not None:
            fields["user_model"] = dict(self.user_model)
        return fields


_FIRST_FIELDS = frozenset({"task", "model", "sampling", "json_schema", "repair_tries"})


@dataclass(frozen=True, slots=True)
class WrittenUser:
    """What a model needs to write what the user says in a row's conversation: who it is to be (`system`), what it is
    greeted with, and how many turns the conversation has, with the first one.
    """

    system: str
    opening: str
    turns: int

    def request(self, turns: Sequence[Turn]) -> bytes:
        """The messages, as JSON, that ask for what the user says after these turns: the conversation as the user sees
        it, whose own words are those of the assistant.
        """
        said = [{"content": self.system, "role": "system"}, {"content": self.opening, "role": "user"}]
        for turn in turns:
            said += ({"content": turn.user, "role": "assistant"}, {"content": turn.output or "", "role": "user"})
        return orjson.dumps(said)


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of one batch.

    `prompt` is JSON as stored in the snapshot: a list of chat messages for `chat`, a string for
    `completion`, `embedding`, `classify` and `pooling`, and fields of the request for `score` and `rerank`. `seed`:
    this row's own, in place of the generation's. `repeats`: another row of the dataset, with an id of its own, has the
    same request and came first. `sample`: which sample of its prompt it is. `fields`: a JSON object of request fields
    of this row alone, in place of the generation's of the same names; empty where it has none. `turns`: all that the
    user says in a conversation, the first of which ends the prompt; each other one is asked after the answer before it.
    Empty for a row that is one request by itself. `user`: who writes the user's words after the first answer; `turns`
    has the first ones only.
    """

    batch: str
    row_id: str
    row_key: str
    prompt: bytes
    seed: int | None = None
    repeats: bool = False
    sample: int = 0
    fields: bytes = b""
    turns: tuple[str, ...] = ()
    user: WrittenUser | None = None

    @property
    def last_turn(self) -> int:
        """How many turns its conversation has."""
        return len(self.turns) if self.user is None else self.user.turns

    @property
    def _occurrence(self) -> str:
        """Its number among rows with one key and no id column; empty for the first, and for a row with an id."""
        key, _, occurrence = self.row_id.rpartition("#")
        return occurrence if key == self.row_key and occurrence != "0" else ""

    @property
    def asks_again(self) -> bool:
        """Whether it has the row key of another row that came first: with a seed its request is then another one."""
        return self.repeats or bool(self._occurrence)

    @property
    def own_fields(self) -> bytes:
        """`fields` with `seed` among them."""
        if self.seed is None:
            return self.fields
        return orjson.dumps({**orjson.loads(self.fields or b"{}"), "seed": self.seed})

    def seeded(self, seed: int | None) -> Row:
        """The row with a seed of its own where it repeats another one, or is a further sample: a dataset with one seed
        would pay for the same answer again. `seed`: the dataset's. The first of equal rows keeps it, and the row key
        does not change.
        """
        if seed is None or not (self.asks_again or self.sample):
            return self
        own = (self._occurrence or f"id {self.row_id}") if self.asks_again else ""
        numbered = f"#sample {self.sample}" if self.sample else ""
        digest = hashlib.sha256(f"{seed}#{own}{numbered}".encode()).digest()
        return replace(self, seed=int.from_bytes(digest[:4], "big") >> 1)  # engines take 31 bits


@dataclass(frozen=True, slots=True)
class Origin:
    """The engine that generated a row: written into the provenance columns of its outcome. `model`: as the answer
    names it.
    """

    model: str
    engine: str
    provider: str
    instance_type: str
    spot: bool
    run_id: str

    @property
    def simulated(self) -> bool:
        """Whether an engine simulator wrote the row."""
        return is_simulated(self.model, self.engine)

    def answered_as(self, model: str | None) -> Origin:
        """The origin of an answer that names its model. Whether it is simulated only the engine says, not a name."""
        mark = f" ({SIMULATED})"
        if model is None or model.endswith(mark) or f"{model}{mark}" == self.model:
            return self
        return replace(self, model=f"{model}{mark}" if self.model.endswith(mark) else model)


def is_simulated(model: str, engine: str) -> bool:
    """Whether rows of this model and engine, as their provenance names them, are a simulator's."""
    return model.endswith(f"({SIMULATED})") or SIMULATED in engine.lower()


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What a model took to write what the user says in a turn. `model`: as its answer names it. Numbers as of an
    Outcome.
    """

    model: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tries: int
    seconds: float
    usd: float | None


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation: what the user said, the answer, and what that took.

    The numbers are those of the answer alone, as of an Outcome. `user_model`: of what a model wrote for the user. Such
    a turn may have no answer yet: then `output` and `finish_reason` are None, and it is the last one.
    """

    user: str
    output: str | None
    finish_reason: str | None
    reasoning: str | None
    prompt_tokens: int
    completion_tokens: int
    tries: int
    seconds: float
    usd: float | None
    user_model: UserTurn | None = None

    @property
    def answered(self) -> bool:
        """Whether it has its answer."""
        return self.finish_reason is not None

    @property
    def requests(self) -> list[Turn | UserTurn]:
        """What was asked in it, with the numbers of each."""
        own: list[Turn | UserTurn] = [] if self.user_model is None else [self.user_model]
        return [*own, self] if self.answered else own

    @property
    def stored_bytes(self) -> int:
        """About what it takes in the store."""
        return len(self.user) + len(self.output or "") + len(self.reasoning or "")

    @property
    def bytes(self) -> int:
        """About how much memory it takes."""
        return sum(getsizeof(text) for text in (self.user, self.output, self.reasoning) if text)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a row: a completion (`error` is None) or a dead letter (`output` is None).

    `tries` counts requests charged to the row. `usd` is None while no price is known. `parts`: what the answer holds
    besides its output. `reused_from`: the dataset that was asked and paid for this answer; None: this one.

    Of a conversation, `turns` are those that were answered, and what a model wrote for the user since. Numbers are sums
    over all turns; the rest is that of the last one. With neither output nor error it is no outcome yet: the
    conversation goes on after these turns (`begun`).
    """

    row_id: str
    row_key: str
    output: Output | None
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    tries: int
    error: str | None
    error_message: str | None
    origin: Origin
    started_at: float
    seconds: float
    usd: float | None = None
    parts: AnswerParts = NO_PARTS
    reused_from: str | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def ok(self) -> bool:
        """True for a completion, False for a dead letter."""
        return self.error is None

    @property
    def begun(self) -> bool:
        """Whether it is none yet, and only says which turns of a conversation were answered."""
        return self.error is None and self.output is None

    @property
    def texts(self) -> int:
        """How far a conversation has come: texts of the user and answers."""
        return sum([1 + turn.answered for turn in self.turns])


@dataclass(frozen=True, slots=True)
class Urgency:
    """Which rows go first, of those that wait for an engine: those of a higher priority; of one owner those that are
    `due` first (Unix seconds). Owners, as tenants of a service, take turns.
    """

    priority: int = 0
    owner: str = ""
    due: float = 0.0


ALIKE = Urgency()


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as the feed takes it: its rows in snapshot order, and outcomes known before.

    `known` maps row id to an outcome read back from the journal or copied from an earlier object;
    those rows never meet an engine. `begun` maps row id to turns of a conversation that were answered before, which
    goes on after them. `urgency`: of all its rows. `job`: the name of what they are a part of, where a
    feed has rows of several; keys are unique within one.
    """

    key: str
    rows: tuple[Row, ...]
    known: Mapping[str, Outcome] = field(default_factory=dict)
    urgency: Urgency = ALIKE
    job: str = ""
    begun: Mapping[str, tuple[Turn, ...]] = field(default_factory=dict)


def row_key(
    generation: Generation,
    prompt: Any,
    fields: Mapping[str, Any] | None = None,
    turns: Sequence[str] = (),
    user_system: str | None = None,
) -> str:
    """Sha256 (hex) of the rendered request: same key, same work.

    `prompt` is the list of messages or the text. Two rows with one key ask the engine the same
    question, so a refresh does not ask again. `fields`: request fields of the row's own. `turns`: as of a Row; a single
    one is a request like any other. `user_system`: who the model that writes the user's words is to be.
    """
    sampling = {**generation.sampling, **(fields or {})}
    request = replace(generation, sampling=sampling).key_fields() | {"prompt": prompt}
    if len(turns) > 1:
        request["turns"] = list(turns)
    if user_system is not None:
        request["user_system"] = user_system
    return hashlib.sha256(orjson.dumps(request, option=orjson.OPT_SORT_KEYS)).hexdigest()


def next_request(prompt: bytes, answer: str, user: str) -> bytes:
    """The messages of a conversation, as JSON, with an answer and what the user says to it behind them."""
    said = [{"content": answer, "role": "assistant"}, {"content": user, "role": "user"}]
    return prompt[:-1] + b"," + orjson.dumps(said)[1:]


def sample_digest(key: bytes, sample: int) -> bytes:
    """The row key, as 32 bytes, of one sample of a prompt whose own row key is `key`: that of sample 0 is the prompt's,
    so that a dataset may have samples later, or no more, and keeps what it has.
    """
    return hashlib.sha256(key + b"#sample %d" % sample).digest() if sample else key


def sample_id(row_id: str, sample: int) -> str:
    """The row id of one sample of a row with an id."""
    return f"{row_id}~{sample}" if sample else row_id


def data_version(rows: Iterable[tuple[str, str]]) -> str:
    """Hash (16 hex digits) of a batch's (row id, row key) pairs in snapshot order."""
    digest = hashlib.sha256()
    for row_id, key in rows:
        digest.update(orjson.dumps([row_id, key]))
    return digest.hexdigest()[:16]
