"""What is exported and how: checked as a whole before anything is written."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpu_runner.errors import ExitStatus, UserFacingError
from resources.store.row_condition import BadCondition, SqlCondition

TRAIN, VALIDATION = "train", "validation"


class ExportError(UserFacingError):
    """A table cannot be exported as it was asked for."""

    exit_status = ExitStatus.WRONG_REQUEST


class BadOption(ExportError):
    """An option of an export that is none, or does not fit the table. `key`: its name in a defs.yaml; `said`: the whole
    sentence of the command line, where it is another one.
    """

    def __init__(self, key: str, expected: str, found: str, hint: str = "", *, said: str = "") -> None:
        words = said or f"expected {expected}, found {found}{hint and f'; {hint}'}"
        super().__init__(f"--{key.replace('_', '-')}: {words}")
        self.key, self.expected, self.found, self.hint = key, expected, found, hint


class Format(StrEnum):
    """How records look; `training_formats` has what reads them."""

    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    PROMPT_COMPLETION = "prompt-completion"
    PREFERENCE = "preference"
    JSONL = "jsonl"
    PARQUET = "parquet"

    @property
    def is_training(self) -> bool:
        """Whether records are made of prompt and answer; else they are lines of the table."""
        return self not in (Format.JSONL, Format.PARQUET)


# Fields of a format, with the column that each is read from unless the user maps another.
_FIELDS: Mapping[Format, Mapping[str, str | None]] = {
    Format.MESSAGES: {"prompt": "prompt", "completion": "output", "reasoning": "reasoning"},
    Format.SHAREGPT: {"prompt": "prompt", "completion": "output", "reasoning": "reasoning"},
    Format.ALPACA: {"prompt": "prompt", "completion": "output", "reasoning": "reasoning"},
    Format.PROMPT_COMPLETION: {"prompt": "prompt", "completion": "output", "reasoning": "reasoning"},
    Format.PREFERENCE: {"prompt": "prompt", "chosen": None, "rejected": None},
    Format.JSONL: {},
    Format.PARQUET: {},
}
_RANKED: Mapping[str, str | None] = {"prompt": "prompt", "completion": "output"}  # preference of ranked lines
# What records of a format hold, with the field of it that may be the column of the same name as it is.
_RECORD: Mapping[Format, Mapping[str, str | None]] = {
    Format.MESSAGES: {"messages": None},
    Format.SHAREGPT: {"conversations": None},
    Format.ALPACA: {"instruction": "prompt", "input": None, "output": "completion", "system": None, "history": None},
    Format.PROMPT_COMPLETION: {"prompt": "prompt", "completion": "completion"},
    Format.PREFERENCE: {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    Format.JSONL: {},
    Format.PARQUET: {},
}
_OPTIONAL = frozenset({"reasoning"})
_ELEMENT = re.compile(r"(.+)\[(.+)\]", re.DOTALL)  # answers[best]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """One export. `columns`: field of the format to column of the table. `kept`: columns that records carry along, or
    of `jsonl` and `parquet` the columns of the file; () there: all. `system`: with system messages; `reasoning`: with
    the model's reasoning, as `<think>` before the answer. `where`: SQL condition on the table's columns.
    `validation`: share of the values of `split_by` whose lines are for validation. `part_rows`: lines of the table of
    which a part is made, at least. `group_by`, `rank_by`: of `preference`, whose pairs are the lines with the highest
    and the lowest rank of each group. `elements`: field whose column holds lists to the column that says which element
    is meant, by its number from 0.
    """

    format: Format
    columns: Mapping[str, str]
    kept: tuple[str, ...] = ()
    system: bool = True
    reasoning: bool = False
    where: str | None = None
    validation: float = 0.0
    split_by: str | None = None
    part_rows: int = 100_000
    group_by: str | None = None
    rank_by: str | None = None
    elements: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values, of which the same export has the same ones."""
        names = ("kept", "system", "reasoning", "where", "validation", "split_by", "part_rows")
        said = {name: getattr(self, name) for name in names}
        said |= {name: value for name in ("group_by", "rank_by") if (value := getattr(self, name)) is not None}
        said |= {"elements": dict(sorted(self.elements.items()))} if self.elements else {}
        return said | {"format": self.format.value, "columns": dict(sorted(self.columns.items())), "kept": [*self.kept]}

    def read_columns(self, known: Sequence[str]) -> list[str]:
        """Columns of the table that have to be read, besides those of `where`, in the table's order."""
        always = [name for name in ("error", "engine", "model", "finish_reason", "tool_calls") if name in known]
        split = [name for name in (self.split_by, self.group_by, self.rank_by) if name is not None]
        kept = self.kept if self.format.is_training or self.kept else known
        wanted = {*always, *self.columns.values(), *self.elements.values(), *split, *kept}
        return [name for name in known if name in wanted]


def checked_options(
    known: Sequence[str],
    form: str,
    *,
    mapping: Iterable[str] = (),
    kept: Sequence[str] = (),
    system: bool = True,
    reasoning: bool = False,
    where: str | None = None,
    validation: float = 0.0,
    split_by: str | None = None,
    part_rows: int = 100_000,
    group_by: str | None = None,
    rank_by: str | None = None,
) -> ExportOptions:
    """The options for a table with these columns. `mapping`: `field=column` or `field=lists[numbers]`. Raises
    BadOption.
    """
    if form not in [*Format]:
        raise BadOption("format", f"one of {', '.join(Format)}", f"{form[:80]!r}")
    kind = Format(form)
    _check_ranks(kind, group_by, rank_by, known)
    columns, elements = _mapped(_FIELDS[kind] if group_by is None else _RANKED, kind, mapping, known)
    if elements and group_by is not None:
        raise BadOption("map", "columns beside group_by", "an element of a list")
    if not reasoning:
        columns.pop("reasoning", None)
    for name in (*kept, *([split_by] if split_by is not None else [])):
        _known(name, known, "split_by" if name == split_by else "columns")
    _check_kept(kind, kept, columns, elements)
    if not 0 <= validation < 1:
        raise BadOption("validation", "a share from 0 to below 1", f"{validation}")
    if split_by is not None and not validation:
        hint = "such as --validation 0.05"
        raise BadOption("split_by", "validation beside it", "none", said=f"expected with --validation, {hint}")
    if validation and split_by is None:
        split_by = "prompt" if "prompt" in known else "row_id"
    if where is not None:
        condition_of(where, known)
    return ExportOptions(
        kind,
        columns,
        tuple(dict.fromkeys(kept)),
        system,
        reasoning,
        where,
        validation,
        split_by,
        part_rows,
        group_by,
        rank_by,
        elements,
    )


def _check_ranks(kind: Format, group_by: str | None, rank_by: str | None, known: Sequence[str]) -> None:
    if group_by is None and rank_by is None:
        return
    if kind is not Format.PREFERENCE or group_by is None or rank_by is None:
        expected = "both, with rank_by, and format preference"
        raise BadOption(
            "group_by", expected, f"format {kind.value}, group_by {group_by!r:.80}, rank_by {rank_by!r:.80}"
        )
    _known(group_by, known, "group_by")
    _known(rank_by, known, "rank_by")


def _mapped(
    fields: Mapping[str, str | None], kind: Format, mapping: Iterable[str], known: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Columns of the fields, and of those that are elements of lists the columns of their numbers."""
    columns = {field: column for field, column in fields.items() if column is not None}
    elements: dict[str, str] = {}
    for text in mapping:
        field, found, column = text.partition("=")
        if not found or field not in fields:
            expected = ", ".join(f"{name}=COLUMN" for name in fields) or "nothing for this format"
            raise BadOption("map", expected, f"{text[:80]!r}")
        elements.pop(field, None)
        if column not in known and (element := _ELEMENT.fullmatch(column)) is not None:
            column, elements[field] = element.groups()
            _known(elements[field], known, "map")
        columns[field] = column
        _known(column, known, "map")
    for field in fields:
        if columns.get(field) not in known:
            if field in _OPTIONAL:
                columns.pop(field, None)
                continue
            ranked = ", or pair ranked rows by group_by and rank_by" if field in ("chosen", "rejected") else ""
            hint = f"name it by map, {field}=COLUMN{ranked}. Columns: {', '.join(known)}"
            raise BadOption("map", f"a column for {field} of {kind.value}", "none", hint)
    return columns, elements


def _check_kept(kind: Format, kept: Iterable[str], columns: Mapping[str, str], elements: Mapping[str, str]) -> None:
    """No column is carried along under a name that records have for something else."""
    own = _RECORD[kind]
    for name in kept:
        field = own.get(name)
        same = field is not None and columns.get(field) == name and field not in elements
        if name in own and not same:
            hint = "Leave it out, or give the column another name where the table is made"
            expected = f"columns that records of {kind.value} do not have themselves ({', '.join(own)})"
            raise BadOption("columns", expected, f"{name!r}", hint)


def _known(column: str, known: Sequence[str], option: str) -> None:
    if column not in known:
        found, hint = f"{column[:80]!r}", f"Columns: {', '.join(known)}"
        raise BadOption(option, "a column of the table", found, hint, said=f"no column is called {found}. {hint}")


def condition_of(where: str, known: Sequence[str]) -> SqlCondition:
    """A condition over columns of the table. Raises BadOption."""
    try:
        return SqlCondition(where, known)
    except BadCondition as error:
        raise BadOption(
            "where", "a condition that fits the table", f"{where[:80]!r}", str(error), said=str(error)
        ) from None


def is_validation(value: Any, share: float) -> bool:
    """Whether lines with this value are for validation: by the first 8 bytes of BLAKE2b of its text, the same on every
    machine and for every table, so that nothing moves to the other side when a dataset grows.
    """
    import orjson

    text = value.encode() if isinstance(value, str) else orjson.dumps(value, default=str, option=orjson.OPT_SORT_KEYS)
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return number < int(share * (1 << 64))
