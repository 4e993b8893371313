"""Price files: the lines of a private price list and of a recorded history, with errors that say where.

Every error names file and line, what was expected and what was found; one error holds all problems of a file.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from gpu_runner.errors import ExitStatus, UserFacingError
from resources.yaml_files import YamlProblem, compose, load, read_text

# A year of hourly prices of all clouds' GPUs has about 50 MB. A list is made of a thousand lines, and YAML takes long.
LARGEST_FILE = 64 << 20


class PricingError(UserFacingError):
    """A price source cannot be read: what was expected, what was found, and where."""

    exit_status = ExitStatus.WRONG_REQUEST


class PriceLine(BaseModel):
    """One offer of a private price list. The descriptions are what an error calls expected."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)
    provider: str = Field(min_length=1, description="a name")
    region: str = Field(default="", description="a name or nothing")
    instance_type: str = Field(default="", description="a name or nothing")
    gpu: str = Field(min_length=1, description="a GPU's name, such as H100")
    gpus: int = Field(default=1, ge=1, description="a whole number of GPUs, 1 or more")
    gpu_memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="GiB per GPU, above 0")
    spot: bool = Field(default=False, description="true or false")
    price_per_hour: float = Field(allow_inf_nan=False, description="US dollars per hour for the whole instance")
    boot_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False, description="seconds, 0 or more")
    reliability: float | None = Field(default=None, ge=0, le=1, description="a share from 0 to 1")
    capacity: int | None = Field(default=None, ge=0, description="a whole number of instances, 0 or more")
    observed_at: AwareDatetime | None = Field(default=None, description="a time with its zone, 2026-08-18T12:00:00Z")


class HistoryLine(BaseModel):
    """One line of a recorded history. An empty price: not offered, or not known."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)
    observed_at: AwareDatetime = Field(description="a time with its zone, 2026-08-18T12:00:00Z")
    provider: str = Field(min_length=1, description="a name")
    instance_name: str = Field(default="", description="a name or nothing")
    gpu_name: str = Field(min_length=1, description="a GPU's name, such as H100")
    gpu_count: int = Field(default=0, ge=0, description="a whole number of GPUs or nothing")
    gpu_memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="GiB per GPU, above 0")
    vcpus: float | None = Field(default=None, ge=0, description="a number of CPUs or nothing")
    ram_gib: float | None = Field(default=None, ge=0, description="GiB or nothing")
    on_demand_usd_per_hour: float | None = Field(
        default=None, allow_inf_nan=False, description="US dollars per hour or nothing"
    )
    spot_usd_per_hour: float | None = Field(
        default=None, allow_inf_nan=False, description="US dollars per hour or nothing"
    )


Line = TypeVar("Line", bound=BaseModel)
LineOf = Callable[[str], int]


def read_yaml(path: Path) -> list[PriceLine]:
    """Lines of a YAML file with a list under `offers`."""
    try:
        text = read_text(path)
        content, root = load(text), compose(text)
    except YamlProblem as error:
        line = f", line {error.line}, column {error.column}" if error.line else ""
        raise PricingError(f"{path}{line}: {error.said}") from None
    except OSError as error:
        raise PricingError(f"{path}: expected a readable file, found: {error.strerror}") from None
    if not isinstance(content, dict) or set(content) != {"offers"} or not isinstance(content["offers"], list):
        raise PricingError(f"{path}: expected one key `offers` with a list, found {_shape(content)}")
    nodes = root.value[-1][1].value
    return _validate(path, PriceLine, zip(content["offers"], [_lines_of(node) for node in nodes], strict=True))


def _shape(content: object) -> str:
    if isinstance(content, dict):
        return f"keys {', '.join(map(str, content)) or 'none'}" + (
            f", offers: {type(content['offers']).__name__}" if "offers" in content else ""
        )
    return type(content).__name__


def _lines_of(node: Any) -> LineOf:
    """Where a field of a YAML mapping stands; the mapping's own line for fields that are not there."""
    start = int(node.start_mark.line) + 1
    fields = {}
    if isinstance(node, yaml.MappingNode):
        fields = {str(key.value): int(key.start_mark.line) + 1 for key, _ in node.value}
    return lambda name: fields.get(name, start)


def read_csv(path: Path, model: type[Line]) -> list[Line]:
    """Lines of a CSV file whose header names fields of the model; an empty cell is a field left out."""
    required = {name for name, info in model.model_fields.items() if info.is_required()}
    check_columns(path, required)
    reader = csv.DictReader(io.StringIO(_read_text(path)))
    found: list[tuple[object, LineOf]] = []
    for line in reader:
        number = reader.line_num
        if None in line or None in line.values():
            wide = len(reader.fieldnames or [])
            raise PricingError(f"{path}, line {number}: expected {wide} cells, as in the header, found another number")
        found.append(({key: cell for key, cell in line.items() if cell.strip()}, _always(number)))
    return _validate(path, model, found)


def _always(line: int) -> LineOf:
    return lambda name: line


def _validate(path: Path, model: type[Line], items: Iterable[tuple[object, LineOf]]) -> list[Line]:
    """Models of all items, or one error with every problem in them."""
    lines: list[Line] = []
    problems: list[str] = []
    for item, line_of in items:
        try:
            lines.append(model.model_validate(item))
        except ValidationError as error:
            for one in error.errors(include_url=False, include_context=False):
                name = str(one["loc"][0]) if one["loc"] else ""
                problems.append(f"{path}, line {line_of(name)}: {_explain(model, name, one['type'], one['input'])}")
    if problems:
        raise PricingError("\n".join(problems))
    return lines


def _explain(model: type[BaseModel], name: str, kind: str, value: object) -> str:
    if not name:
        return f"expected a mapping of fields, found {value!r:.80}"
    if name not in model.model_fields:
        return f"expected only {', '.join(model.model_fields)}, found {name}"
    expected = model.model_fields[name].description
    return f"{name}: expected {expected}, found {'nothing' if kind == 'missing' else f'{value!r:.80}'}"


def check_columns(path: Path, required: set[str]) -> None:
    """Raise PricingError unless the header of a CSV file has these columns."""
    with _open(path) as file:
        columns = next(csv.reader(file), [])
    missing = required - set(columns)
    if missing:
        found = ", ".join(columns) or "none"
        raise PricingError(f"{path}, line 1: expected the columns {', '.join(sorted(missing))} too, found {found}")


def _open(path: Path) -> io.TextIOWrapper:
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may never end
            raise OSError(0, "no regular file")
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise PricingError(f"{path}: expected a readable file, found: {error.strerror}") from None


def _read_text(path: Path) -> str:
    with _open(path) as file:
        try:
            text = file.read(LARGEST_FILE + 1)
        except UnicodeDecodeError as error:
            raise PricingError(f"{path}: expected UTF-8 text, found {error.reason} at byte {error.start}") from None
    if len(text) > LARGEST_FILE:
        raise PricingError(f"{path}: expected at most {LARGEST_FILE:,} characters, found more")
    return text
