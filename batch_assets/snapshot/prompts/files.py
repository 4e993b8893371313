"""Files beside the defs.yaml that are a part of each prompt: a system text, and examples of questions and answers."""

from __future__ import annotations

from pathlib import Path

import orjson

from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.files import refuse_system_file
from batch_assets.templates.prompt_template import Template, TemplateProblem

MAX_BYTES = 1 << 20
MAX_EXAMPLES = 500
_KEYS = ("user", "assistant")


def read_system(path: str, base: Path) -> Template:
    """The Jinja template of a system message. Raises SourceError."""
    text = read_text(path, base, "prompt.system_from").removesuffix("\n")
    if not text.strip():
        raise SourceError(f"{path}: expected the text of prompt.system_from, found nothing but blanks")
    try:
        return Template(text)
    except TemplateProblem as error:
        raise SourceError(f"{path}: expected a Jinja template for prompt.system_from: {error}") from error


def read_examples(path: str, base: Path) -> list[dict[str, str]]:
    """Messages of users and assistants, in turns. Raises SourceError with the line that is none."""
    messages: list[dict[str, str]] = []
    for number, line in enumerate(read_text(path, base, "prompt.examples").split("\n"), 1):
        if not line.strip():
            continue
        try:
            example = orjson.loads(line)
        except orjson.JSONDecodeError:
            example = None
        if not isinstance(example, dict) or set(example) != set(_KEYS):
            found = "no JSON object"
            if isinstance(example, dict):
                found = f"the keys {', '.join(repr(key[:40]) for key in list(example)[:6]) or 'of none'}"
            raise SourceError(f'{path}, line {number}: expected {{"user": "…", "assistant": "…"}}, found {found}')
        for role in _KEYS:
            if not isinstance(example[role], str) or not example[role].strip():
                raise SourceError(f"{path}, line {number}: expected text in {role}, found none")
            messages.append({"content": example[role], "role": role})
        if len(messages) > 2 * MAX_EXAMPLES:
            raise SourceError(f"{path}: expected at most {MAX_EXAMPLES} examples, found more")
    if not messages:
        raise SourceError(f"{path}: expected at least one example for prompt.examples, found none")
    return messages


def read_text(path: str, base: Path, key: str) -> str:
    """The text of a file that `key` names. A pipe or a device may never end, and is not opened. Raises SourceError."""
    file = base / path
    try:
        if file.exists() and not file.is_file():
            raise SourceError(f"{path}: expected a file for {key}, found a folder, a pipe or a device")
        refuse_system_file(path, file)
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SourceError(f"{path}: expected a file for {key} beside the defs.yaml, found none") from None
    except OSError as error:
        raise SourceError(f"{path}: {key} cannot be read ({error.strerror or type(error).__name__})") from error
    if len(data) > MAX_BYTES:
        raise SourceError(f"{path}: expected at most {MAX_BYTES:,} bytes for {key}, found more")
    try:
        return str(data, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: expected UTF-8 for {key}, found other bytes at {error.start}") from None
