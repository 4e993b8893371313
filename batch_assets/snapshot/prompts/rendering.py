"""Prompts of rows: the templates, files and columns of a spec, rendered to the JSON that the snapshot holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from batch_assets.snapshot.prompts.audio import RowAudio
from batch_assets.snapshot.prompts.files import read_examples, read_system
from batch_assets.snapshot.prompts.images import RowImages
from batch_assets.snapshot.prompts.messages import (
    INSTRUCTS,
    Message,
    check_whole,
    continues,
    read_conversation,
    read_documents,
    read_turns,
)
from batch_assets.snapshot.prompts.request_fields import RowFields
from batch_assets.snapshot.prompts.row_media import RowMedia, with_media
from batch_assets.snapshot.source.block import Block
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.models import GeneratedDatasetSpec, PromptSpec
from batch_assets.spec.sampling_values import Unfit
from batch_assets.templates.prompt_template import Refused, Template, TemplateExhausted
from gpu_runner.client.protocol import CONTINUES_ANSWER

MAX_PROMPT = 1 << 20
_GUESSED_MEDIUM = 256 << 10  # bytes, before the first ones were seen
_SORTED = orjson.OPT_SORT_KEYS
_SURROGATES = "the prompt holds lone surrogates, which UTF-8 cannot carry"


@dataclass(frozen=True, slots=True)
class _Column:
    """A conversation in a column, or documents to rank."""

    name: str


@dataclass(frozen=True, slots=True)
class _FirstTurn:
    """The first of what the user says, by a column of turns."""


# What messages are made of: a template with its role, messages that are the same for all rows, columns.
_Part = tuple[str, Template] | list[Message] | _Column | _FirstTurn


@dataclass(slots=True)
class Rendered:
    """What rows ask, by their place. `fields`: request fields of each row's own, as JSON objects or empty; None where
    no row of the dataset can have any. `turns`: all that the user says, of which the prompt ends with the first; None
    where rows are no conversations. `user_systems`: who the model is to be that writes what the user says later; None
    where none does. `keyed`: what row keys are made of in place of the prompts; None: of these."""

    prompts: list[bytes]
    fields: list[bytes] | None
    turns: list[list[str]] | None = None
    keyed: list[bytes] | None = None
    user_systems: list[str] | None = None


class Prompts:
    """The prompt of a spec. `base`: where its files lie. Raises SourceError for those that cannot be used."""

    def __init__(self, spec: GeneratedDatasetSpec, base: Path) -> None:
        self._chat = spec.task == "chat"
        self._request = spec.task in ("score", "rerank")  # the prompt is fields of the request
        self._parts = list(_parts(spec.prompt, base))
        self._templates = [part for part in self._parts if isinstance(part, tuple)]
        images, audio = spec.prompt.all_images, spec.prompt.all_audio
        self._media: list[RowMedia] = [RowImages(images, base)] if images is not None else []
        self._media += [RowAudio(audio, base)] if audio is not None else []
        self._most = MAX_PROMPT + sum(one.row_bytes for one in spec.prompt.media.values())
        self._plain = len(self._templates) == len(self._parts) and not self._media
        self._column = next((part.name for part in self._parts if isinstance(part, _Column)), None)
        sampling = spec.generation().sampling
        self._continues = {name: value for name, value in CONTINUES_ANSWER.items() if name not in sampling}
        names = {name for _, template in self._templates for name in template.columns}
        self._fields = RowFields(spec)
        self._later = [Template(text) for text in (spec.prompt.turns or ())[1:]]
        user = spec.prompt.user_model
        self._user = None if user is None else Template(user.system)
        self._turns_from, self.has_turns = spec.prompt.turns_from, spec.prompt.has_turns
        others = [*self._later, *([self._user] if self._user is not None else [])]
        names |= {name for template in others for name in template.columns}
        column = {name for name in (self._column, self._turns_from) if name}
        column |= {name for one in self._media for name in one.columns}
        self.columns = sorted(names | column | self._fields.columns)
        self.required = {name for _, template in self._templates for name in template.required}
        self.required |= {name for template in others for name in template.required}
        self.required |= column | self._fields.required
        self.has_fields = (self._chat and self._column is not None) or bool(self._fields)
        self.constant_bytes = sum(len(text) for _, _, text in spec.prompt.templates())
        fixed = [message for part in self._parts if isinstance(part, list) for message in part]
        self.constant_bytes += sum(len(message["content"]) for message in fixed)
        self.constant_bytes += _GUESSED_MEDIUM * sum(len(one.columns) for one in self._media)

    def render(self, block: Block, refused: dict[int, str]) -> Rendered:
        """The prompt of every row, empty where it has none; the reason is put into `refused`."""
        texts = [self._texts(role, template, block, refused) for role, template in self._templates]
        rows: list[tuple[Any, ...]] = list(zip(*texts, strict=True)) if texts else [()] * len(block.lines)
        fields: list[dict[str, Any]] = []
        if self.has_fields:
            fields = self._fields.of(block, refused)
        turns = self._turns(rows, block, refused) if self.has_turns else None
        user_systems = self._user_systems(block, refused)
        media = [(kind, kind.of(block, refused)) for kind in self._media]

        def parts(*, keyed: bool) -> list[list[Message]]:
            whole = [[[kind.part(one, keyed=keyed) for one in row] for row in found] for kind, found in media]
            return [[part for one in row for part in one] for row in zip(*whole, strict=True)]

        keyed: list[bytes] | None = None
        if media:
            keyed = self._conversations(rows, block, refused, fields, turns, parts(keyed=True))
        if self._plain:
            prompts = self._encode(rows, refused)
        else:
            prompts = self._conversations(rows, block, refused, fields, turns, parts(keyed=False))
        sizes = [len(prompt) for prompt in prompts]
        if turns is not None:
            sizes = [
                size + sum(len(text.encode()) for text in said[1:]) for size, said in zip(sizes, turns, strict=True)
            ]
        if user_systems is not None:
            sizes = [size + len(text.encode()) for size, text in zip(sizes, user_systems, strict=True)]
        for i in [i for i, size in enumerate(sizes) if size > self._most]:
            refused.setdefault(i, f"the prompt has {sizes[i]} bytes, more than {self._most}")
        encoded = self._encode_fields(fields, refused) if self.has_fields else None
        return Rendered(prompts, encoded, turns, keyed, user_systems)

    def _turns(self, rows: Sequence[tuple[Any, ...]], block: Block, refused: dict[int, str]) -> list[list[str]]:
        """What the user says in each row; nothing in one that is refused."""
        if self._turns_from is None:
            later = [self._texts(f"turn {n}", one, block, refused) for n, one in enumerate(self._later, 2)]
            first = [texts[-1] for texts in rows]
            turns = [list(said) for said in zip(first, *later, strict=True)]
        else:
            turns = [self._turns_of(i, cell, refused) for i, cell in enumerate(block.columns[self._turns_from])]
        for i, said in enumerate(turns):
            try:
                orjson.dumps(said)
            except TypeError:
                refused.setdefault(i, _SURROGATES)
        return [[] if i in refused else said for i, said in enumerate(turns)]

    def _user_systems(self, block: Block, refused: dict[int, str]) -> list[str] | None:
        """Who the model that writes the user's words is to be in each row; nothing in one that is refused."""
        if self._user is None:
            return None
        texts = self._texts("user_model.system", self._user, block, refused)
        for i, text in enumerate(texts):
            try:
                text.encode()
            except UnicodeEncodeError:
                refused.setdefault(i, _SURROGATES)
        return ["" if i in refused else text for i, text in enumerate(texts)]

    def _turns_of(self, row: int, cell: Any, refused: dict[int, str]) -> list[str]:
        try:
            return read_turns(cell)
        except Unfit as error:
            refused.setdefault(row, f"column {self._turns_from!r}: {error}")
            return []

    def _encode_fields(self, fields: Sequence[dict[str, Any]], refused: dict[int, str]) -> list[bytes]:
        found = [b""] * len(fields)
        for i, own in enumerate(fields):
            try:
                found[i] = orjson.dumps(own, option=_SORTED) if own else b""
            except TypeError:
                refused.setdefault(i, _SURROGATES)
            if len(found[i]) > MAX_PROMPT:
                refused.setdefault(i, f"the request fields have {len(found[i])} bytes, more than {MAX_PROMPT}")
        return found

    def _texts(self, role: str, template: Template, block: Block, refused: dict[int, str]) -> list[Any]:
        try:
            column: list[Any] = template.render_column(block.columns, len(block.lines))
        except TemplateExhausted as error:
            where = f"prompt, {self._place(role)}" if self._chat else "prompt"
            raise SourceError(f"{block.file}, lines {block.lines[0]} to {block.lines[-1]}: {where}: {error}") from None
        for i in [i for i, text in enumerate(column) if type(text) is Refused or not text.strip()]:
            reason = column[i].reason if isinstance(column[i], Refused) else "nothing but blanks"
            where = self._place(role) if self._chat else f"prompt.{role}" if self._request else "prompt"
            refused.setdefault(i, f"{where}: {reason}")
            column[i] = ""
        return column

    def _place(self, role: str) -> str:
        """A message as errors call it, by its role, or by the number of the user's turn."""
        if role == "user" and self._later:
            return "turn 1"
        if role == "user_model.system":
            return role
        return role if role.startswith("turn ") else f"message {role}"

    def _conversations(
        self,
        rows: Sequence[tuple[str, ...]],
        block: Block,
        refused: dict[int, str],
        fields: Sequence[dict[str, Any]],
        turns: Sequence[Sequence[str]] | None,
        media: Sequence[Sequence[Message]],
    ) -> list[bytes]:
        """Prompts that hold more than templates. `fields` of rows whose answer is begun get what says so. `media`:
        content parts of each row; empty where the dataset has none."""
        cells = [None] * len(rows) if self._column is None else block.columns[self._column]
        prompts = [b""] * len(rows)
        for i, (texts, cell) in enumerate(zip(rows, cells, strict=True)):
            if i in refused:
                continue
            try:
                if not self._chat:
                    prompts[i] = orjson.dumps({"documents": read_documents(cell), "query": texts[0]})
                    continue
                messages = self._messages(texts, cell, turns[i][0] if turns else "")
                messages = with_media(messages, media[i]) if media else messages
                prompts[i] = orjson.dumps(messages, option=_SORTED)
            except Unfit as error:
                refused[i] = f"column {self._column!r}: {error}" if self._column is not None else str(error)
            except TypeError:
                refused[i] = _SURROGATES
            else:
                if self._column is not None and continues(messages):
                    fields[i].update(self._continues)
        return prompts

    def _messages(self, texts: tuple[str, ...], cell: Any, first_turn: str) -> list[Message]:
        messages: list[Message] = []
        rest = iter(texts)
        for part in self._parts:
            if isinstance(part, tuple):
                messages.append({"content": next(rest), "role": part[0]})
            elif isinstance(part, list):
                messages += part
            elif isinstance(part, _FirstTurn):
                messages.append({"content": first_turn, "role": "user"})
            else:
                found = read_conversation(cell)
                if messages and messages[0]["role"] == "system" and found[0]["role"] in INSTRUCTS:
                    raise Unfit(f"message 1: expected no {found[0]['role']} message behind prompt.system, found one")
                messages += found
        check_whole(messages)
        return messages

    def _encode(self, rows: Sequence[tuple[Any, ...]], refused: dict[int, str]) -> list[bytes]:
        try:
            return [self._json(row) for row in rows]
        except TypeError:  # text that has no UTF-8 form
            pass
        prompts = []
        for i, row in enumerate(rows):
            try:
                prompts.append(self._json(row))
            except TypeError:
                refused.setdefault(i, _SURROGATES)
                prompts.append(b"")
        return prompts

    def _json(self, texts: tuple[str, ...]) -> bytes:
        if self._request:
            return orjson.dumps({"text_1": texts[0], "text_2": texts[1]})
        if not self._chat:
            return orjson.dumps(texts[0])
        return orjson.dumps(
            [{"content": text, "role": role} for (role, _), text in zip(self._templates, texts, strict=True)],
            option=_SORTED,
        )


def _parts(prompt: PromptSpec, base: Path) -> list[_Part]:
    """Its parts in the order of their messages."""
    if prompt.messages is not None:
        return [(message.role, Template(message.content)) for message in prompt.messages]
    parts: list[_Part] = []
    if prompt.system is not None:
        parts.append(("system", Template(prompt.system)))
    if prompt.system_from is not None:
        parts.append(("system", read_system(prompt.system_from, base)))
    if prompt.examples is not None:
        parts.append(list[Message](read_examples(prompt.examples, base)))
    if prompt.messages_from is not None:
        parts.append(_Column(prompt.messages_from))
    if prompt.query is not None:
        parts.append(("query", Template(prompt.query)))
        parts.append(
            ("document", Template(prompt.document)) if prompt.document else _Column(prompt.documents_from or "")
        )
    if (text := prompt.user if prompt.user is not None else prompt.text) is not None:
        parts.append(("user", Template(text)))
    if prompt.turns is not None:
        parts.append(("user", Template(prompt.turns[0])))
    if prompt.turns_from is not None:
        parts.append(_FirstTurn())
    return parts
