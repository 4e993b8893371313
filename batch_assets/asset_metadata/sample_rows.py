"""A few rows of a published table as a Markdown table, for people who look at the asset in Dagster's UI.

Texts of a source and of a model are not to be trusted: nothing of them is read as Markdown, HTML, a link or an image.
The same table always shows the same rows: the first, the last, and evenly spread ones between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batch_assets.publishing.dataset_card import MEANING
from batch_assets.publishing.prompt_column import PROMPT
from batch_assets.publishing.published_table import PublishedTable
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import DatasetStore
from resources.store.object_integrity import is_damage

SAMPLE_ROWS, SHOWN_ROWS = 10, 3
INLINE_LETTERS = 1000  # of Markdown: longer ones are behind a button
KEPT_COLUMNS = 2
LONG, SHORT, ID = 200, 60, 16  # letters of an output or a last message, of other values, of a row id
_MESSAGES = 4
_READ_ROWS = 64
_MARKS = re.compile(r"([\\`*_{}\[\]<>()#+\-.!|~&:$=\"'^])")
_LINKS = re.compile(r"(?i)(https?\\:|ftp\\:|www)(?=/|\\\.)|(@)")
_JOINER = "\u2060"  # of no width: an address that is not whole is not made a link


def sample_markdown(
    store: DatasetStore, table: PublishedTable, most: int = SAMPLE_ROWS, *, beside: str | None = None
) -> str:
    """The sample as a Markdown table of bounded size. `beside`: a column that stands before the output.

    Raises CorruptObject when a file cannot be read.
    """
    columns = sample_columns(table, beside)
    rows = list(read_rows(store, table, sample_places(table.rows, most), [*columns, "error"]))
    cells = [[_cell(name, row) for name in columns] for row in rows]
    lines = [[escaped(cut(name, SHORT)) for name in columns], ["---"] * len(columns), *cells]
    head = f"{len(rows):,} of {table.rows:,} rows; long texts are cut.\n\n"
    return head + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def first_rows_markdown(store: DatasetStore, table: PublishedTable, *, beside: str | None = None) -> str:
    """The first rows, so short that Dagster's UI shows them on the page and not behind a button: the output below its
    prompt, as the page is too narrow for two columns of text. `beside`: a column whose value stands before the output.
    """
    names = [column.name for column in table.columns]
    first, more = PROMPT if PROMPT in names else "row_id", [] if beside is None else [beside]
    rows = list(read_rows(store, table, range(min(SHOWN_ROWS, table.rows)), [first, "output", *more, "error"]))
    found = ""
    for letters in (160, 110, 70, 40, 20):

        def text(name: str, row: Mapping[str, Any], letters: int = letters) -> str:
            return escaped(cut(_plain_text(name, row), letters))

        marked = []
        for row in rows:
            before = "" if beside is None else f"{text(beside, row) or '–'} · "
            marked += [text(first, row), f"→ {before}{text('output', row)}"]
        head = f"{first} → {'' if beside is None else f'{escaped(beside)} · '}output"
        found = "\n".join(f"| {line} |" for line in (head, "---", *marked))
        if len(found) < INLINE_LETTERS:
            break
    return found


def _plain_text(name: str, row: Mapping[str, Any]) -> str:
    value = row[name]
    if name == "output" and value is None:
        return f"no completion: {row['error']}"
    if name == PROMPT and isinstance(value, list):
        return said(value[-1]) if value else ""
    return text_of(value)


def sample_places(rows: int, most: int) -> list[int]:
    """Line numbers from 0: the first, the last, and evenly spread ones between them; all where there are so few."""
    if rows <= most:
        return list(range(rows))
    return [round(number * (rows - 1) / (most - 1)) for number in range(most)]


def sample_columns(table: PublishedTable, beside: str | None = None) -> list[str]:
    """Columns to show: the id, a few of the source, prompt and output, and `beside` before that."""
    names = [column.name for column in table.columns]
    more = [] if beside is None else [beside]
    before = names if beside is None else names[: names.index("output")]  # what votes say is no column of the source
    kept = [name for name in before if name not in MEANING][:KEPT_COLUMNS]
    return ["row_id", *kept, *([PROMPT] if PROMPT in names else []), *more, "output"]


def read_rows(
    store: DatasetStore, table: PublishedTable, places: Sequence[int], columns: Sequence[str]
) -> Iterator[Mapping[str, Any]]:
    """The lines at these places, which are in rising order. Of a row group only the pages up to the line are read."""
    first = 0
    for listed in table.files:
        inside = [place - first for place in places if first <= place < first + listed.rows]
        first += listed.rows
        if not inside:
            continue
        path = f"{table.path}/{listed.name}"
        with store.objects.open(path) as opened:
            try:
                with pq.ParquetFile(opened, pre_buffer=False, page_checksum_verification=True) as file:
                    yield from _read_lines(file, inside, columns)
            except (pa.ArrowException, OSError, KeyError) as error:
                if not is_damage(error):
                    raise
                raise CorruptObject(f"{path}: cannot be read ({error})") from error


def _read_lines(file: pq.ParquetFile, places: Sequence[int], columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    first = 0
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        wanted = [place - first for place in places if first <= place < first + rows]
        first += rows
        if not wanted:
            continue
        seen = 0
        for batch in file.iter_batches(_READ_ROWS, row_groups=[group], columns=list(columns), use_threads=False):
            for place in wanted:
                if seen <= place < seen + batch.num_rows:
                    yield batch.slice(place - seen, 1).to_pylist()[0]
            seen += batch.num_rows
            if seen > wanted[-1]:
                break


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row[name]
    if name == "output" and value is None:
        return f"*{escaped('no completion: ' + cut(str(row['error']), SHORT))}*"
    if name == PROMPT and isinstance(value, list):
        return _messages(value)
    return escaped(cut(text_of(value), LONG if name in ("output", PROMPT) else ID if name == "row_id" else SHORT))


def said(message: Mapping[str, Any]) -> str:
    """The text of a message; of one without a text the names of the tools that it calls."""
    calls = ", ".join(call["function"]["name"] for call in message.get("tool_calls") or ())
    return message["content"] or (f"calls {calls}" if calls else "")


def _messages(messages: Sequence[Mapping[str, Any]]) -> str:
    """Roles and contents; of a long conversation the first message and the last ones. The last is shown at length."""
    shown = list(messages) if len(messages) <= _MESSAGES else [messages[0], *messages[-(_MESSAGES - 1) :]]
    parts = []
    for number, message in enumerate(shown):
        length = LONG if number == len(shown) - 1 else SHORT
        parts.append(f"**{escaped(message['role'])}** {escaped(cut(said(message), length))}")
    if len(shown) < len(messages):
        parts.insert(1, f"({len(messages) - len(shown)} more)")
    return " ".join(parts)


def text_of(value: Any) -> str:
    """A value of a table in one line of text."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list) and value and all(isinstance(item, float) for item in value):
        more = f", … {len(value):,} numbers" if len(value) > 3 else ""
        return f"[{', '.join(f'{item:.3g}' for item in value[:3])}{more}]"
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def cut(text: str, letters: int) -> str:
    """The text on one line, its beginning only when it is longer; what is not printable is a blank."""
    head = text[: 4 * letters].strip()
    line = "".join(c if c.isprintable() else "⏎" if c == "\n" else " " for c in head)
    line = " ".join(line.replace("⏎", " ⏎ ").split())
    return line if len(line) <= letters and len(text) <= 4 * letters else f"{line[: letters - 1].rstrip()}…"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML, no link, also not one that it would find by itself."""
    marked = _MARKS.sub(r"\\\1", text)
    return _LINKS.sub(lambda found: f"{found[0]}{_JOINER}", marked)
