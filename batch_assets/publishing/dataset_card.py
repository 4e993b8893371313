"""The dataset card: a README.md in the format of the Hugging Face hub, beside the table it describes.

Its front matter names the Parquet files, so that `datasets.load_dataset` works on the folder as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from batch_assets.publishing.batch_reader import table_name
from gpu_runner.fleet_database.accounting.bill_split import Split
from gpu_runner.money import format_usd
from gpu_runner.rows import Generation
from resources.store.dataset_store import SnapshotManifest
from resources.store.snapshot_manifest import SAMPLE_INDEX

if TYPE_CHECKING:
    from batch_assets.publishing.published_table import PublishedTable

_CELL = 200
_ITEMS = 10  # messages of a prompt, tool calls
_SIZES = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (10_000_000, "1M<n<10M"),
)
MEANING = {
    "row_id": "the source's id, or the hash of the request and an occurrence number",
    SAMPLE_INDEX: "which answer to the same prompt it is, from 0 (`samples`)",
    "prompt": "what was asked, as rendered: for chat a list of messages (role, content), else a text",
    "output": "what the model wrote; null for a row without a completion",
    "finish_reason": "stop, tool_calls, or length when the answer was cut at the token limit",
    "tool_calls": "calls that the model asks for: id, type, name, and arguments as text; else null",
    "reasoning": "what a reasoning model wrote before its answer; else null",
    "refusal": "the words in which the model refused; else null",
    "logprobs": "each token of the answer: token, logprob, bytes, text_offset, top_logprobs; null unless asked for",
    "prompt_tokens": "as the engine counted them",
    "completion_tokens": "as the engine counted them",
    "tries": "requests charged to the row, those for a repair included",
    "error": "code of the error of a row without a completion, else null",
    "error_message": "its message",
    "model": "as the answer named it, such as `gpt-4o-2024-08-06`; of a row without an answer, as it was asked for",
    "engine": "engine and version",
    "provider": "provider that rented out the instance",
    "instance_type": "kind of the instance",
    "spot": "true when the instance could be taken away",
    "run_id": "Dagster run that generated the row",
    "started_at": "when its last request began",
    "seconds": "how long that took",
    "usd": "share of the instance's price; null while no price is known",
    "turns": "of conversations (`prompt.turns`), each turn: user, output, finish_reason, reasoning, tokens, tries, "
    "seconds and usd; those of the row are their sums, and its output is that of the last",
    "user_turns": "of conversations whose user's words a model writes (`prompt.user_model`), what it took for each "
    "turn from the second one on: model, finish_reason, tokens, tries, seconds and usd",
    "reused_from": "dataset that was asked and paid for this answer; null: this one",
    "batch": "Dagster partition",
    "duplicate_of": "row_id of the row that asked the same question, else null",
}


@dataclass(frozen=True, slots=True)
class Card:
    """What the dataset's owner says of it. `bill`: US dollars of all instances rented for it; None: nothing was.
    `standing`: how many of them have not ended, so that the bill is not final. `simulated`: of the bill what simulated
    providers ask, which nobody pays; None: nothing.

    `show_rows`: with the first rows of the table.
    """

    description: str = ""
    owners: Sequence[str] = ()
    tags: Sequence[str] = ()
    bill: Split | None = None
    show_rows: bool = True
    standing: int = 0
    simulated: Split | None = None


def card_text(
    table: PublishedTable, manifest: SnapshotManifest, card: Card, sample: Sequence[Mapping[str, Any]]
) -> str:
    """The whole card. Texts of the sample are cut at 200 characters, lists of messages at ten."""
    parts = [_front_matter(table, card), f"# {table.dataset}"]
    if table.simulated:
        parts.append(
            "> **Simulated.** Some or all outputs were made by an engine simulator, not by a language model: they show "
            "that the way through the platform works, and say nothing about the question asked."
        )
    if card.description:
        parts.append(card.description.strip())
    parts += [
        _facts(table, manifest, card),
        _lines_text(table, manifest.samples),
        _columns(table, manifest),
        _sources(table),
        _open_text(),
    ]
    if sample and card.show_rows:
        lines = [json.dumps({name: _cut(value) for name, value in row.items()}, ensure_ascii=False) for row in sample]
        parts.append("## First rows\n\n" + "\n".join(f"    {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _front_matter(table: PublishedTable, card: Card) -> str:
    size = size_category(table.rows)
    tags = list(dict.fromkeys(["synthetic", "batch-assets", *(["simulated"] if table.simulated else []), *card.tags]))
    return "\n".join(
        [
            "---",
            f"pretty_name: {json.dumps(table.dataset)}",
            f"tags: {json.dumps(tags, ensure_ascii=False)}",
            f"size_categories: {json.dumps([size])}",
            "configs:",
            "- config_name: default",
            "  data_files:",
            "  - split: train",
            '    path: "part-*.parquet"',
            "---",
        ]
    )


def size_category(rows: int) -> str:
    """The hub's name for so many rows."""
    return next((name for limit, name in _SIZES if rows < limit), "10M<n<100M")


def _facts(table: PublishedTable, manifest: SnapshotManifest, card: Card) -> str:
    settings = manifest.settings()
    others = [source.model for source in table.sources if source.model not in (None, settings.model)]
    answered = {"answered by": ", ".join(dict.fromkeys(others))} if others else {}
    facts = {
        "owners": ", ".join(card.owners) or "not named",
        "source": manifest.source,
        "task, model": f"{settings.task}, {settings.model}",
        **answered,
        "sampling": json.dumps(dict(settings.sampling), ensure_ascii=False),
        **({"engine": json.dumps(dict(settings.engine), ensure_ascii=False)} if settings.engine else {}),
        "output": _form_words(settings),
        **({"thinking in the text": f"split off (`{settings.reasoning_tags}`)"} if settings.reasoning_tags else {}),
        "rows": f"{table.rows:,}: {table.ok:,} with a completion, {table.dead:,} without",
        "duplicates": f"{table.duplicates:,}",
        **({} if table.output_mismatches is None else {"outputs without columns": f"{table.output_mismatches:,}"}),
        **({"answers of other datasets": _reused_words(table)} if table.reused else {}),
        "rejected source rows": f"{manifest.rejected:,} (not in the table)",
        "tokens": f"{table.prompt_tokens:,} prompt, {table.completion_tokens:,} completion",
        "cost of these rows": dollars(table.usd)
        + (f"; {table.unpriced:,} rows without a known price" if table.unpriced else ""),
        **({"bill of the dataset": _bill_words(card.bill, card)} if card.bill is not None else {}),
        "files": f"{table.parts} Parquet, {table.bytes / 1e6:,.1f} MB",
        "snapshot, version": f"{table.snapshot}, {table.version}",
        "published": datetime.fromtimestamp(table.created_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return markdown_table(("", ""), facts.items())


def _form_words(settings: Generation) -> str:
    if settings.json_schema:
        return "JSON that fits the declared schema"
    forms = {"choice": "one of the declared choices", "regex": "text that matches the declared pattern"}
    (name,) = settings.structured_outputs or ("",)
    return forms.get(name, "text of the declared grammar" if name else "as the model wrote it")


def _lines_text(table: PublishedTable, samples: int) -> str:
    lines = "exactly one line" if samples == 1 else f"{samples} lines, one per sample"
    text = (
        f"Every source row that was not rejected has {lines}, in the order of the snapshot. A row for which no "
        "completion could be had is there too, with `output` null and the reason in `error`; filter with "
        "`error IS NULL` for completions only."
    )
    if table.duplicates:
        text += (
            f" {table.duplicates:,} rows repeat the question of another row; it was asked once. They follow at the end "
            "with that row's outcome and its id in `duplicate_of`; their tokens, tries, seconds and cost are 0, so "
            "that sums count every request once."
        )
    return text


def _columns(table: PublishedTable, manifest: SnapshotManifest) -> str:
    sampled = {SAMPLE_INDEX} if manifest.samples > 1 else set()
    kept = {table_name(name): name for name in manifest.keep_columns if name not in sampled}
    lines = [
        (f"`{column.name}`", column.type, f"source column `{kept[column.name]}`")
        if column.name in kept
        else (f"`{column.name}`", column.type, column.description or MEANING.get(column.name, ""))
        for column in table.columns
    ]
    return "## Columns\n\n" + markdown_table(("column", "type", "meaning"), lines)


def _sources(table: PublishedTable) -> str:
    lines = [
        (
            source.model,
            source.engine,
            source.provider,
            f"{source.instance_type}{' (spot)' if source.spot else ''}",
            f"{source.rows:,}",
            f"{source.completion_tokens:,}",
            dollars(source.usd),
        )
        for source in table.sources
    ]
    header = ("model", "engine", "provider", "instance", "rows", "completion tokens", "cost")
    return "## Where the rows came from\n\n" + markdown_table(header, lines)


def _open_text() -> str:
    return (
        "## Open it\n\n"
        "In the folder of this card:\n\n"
        "```python\n"
        'polars.scan_parquet("part-*.parquet")\n'
        "duckdb.sql(\"SELECT * FROM 'part-*.parquet' WHERE error IS NULL\")\n"
        'datasets.load_dataset("parquet", data_files="part-*.parquet")  # or datasets.load_dataset(FOLDER)\n'
        "```"
    )


def _reused_words(table: PublishedTable) -> str:
    return ", ".join(f"{rows:,} of {name}" for name, rows in table.reused.items()) + "; they cost nothing here"


def _bill_words(bill: Split, card: Card) -> str:
    """The rows' cost is the useful part of a bill; earlier outcomes of rows are in the bill too.

    A card is never written again, so that it has no figure which is another one a moment later.
    """
    standing, simulated = card.standing, card.simulated
    if standing:
        played = "" if simulated is None else f" ({dollars(simulated.useful)} of it simulated, paid by nobody)"
        were = "instance had" if standing == 1 else "instances had"
        return (
            f"{dollars(bill.useful)} useful{played}; boots, idle and wasted time were not final, as {standing:,} "
            f"{were} not ended when this was written: `batch-assets fleet` has all of it"
        )
    parts = f"{dollars(bill.useful)} useful, {dollars(bill.booting)} boot, {dollars(bill.idle)} idle"
    played = "" if simulated is None else f"; {dollars(simulated.total)} of it simulated, paid by nobody"
    return f"{dollars(bill.total)} for all instances rented so far: {parts}, {dollars(bill.wasted)} wasted{played}"


def dollars(usd: float | None) -> str:
    """US dollars in words."""
    return "not known" if usd is None else f"${format_usd(usd, fine=True)}"


def markdown_table(header: Sequence[str], lines: Any) -> str:
    """A table of Markdown; cells on one line each."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(_cell(value) for value in row) + " |" for row in rows)


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ").replace("\r", " ")


def _cut(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [{name: _cut(part) for name, part in item.items()} for item in value[:_ITEMS]]
    text = value if isinstance(value, str) else repr(value) if isinstance(value, bytes) else str(value)
    return text if len(text) <= _CELL else text[: _CELL - 1] + "…"
