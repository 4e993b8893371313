"""The card of a pushed export: README.md in the format of the Hugging Face hub. The same export has the same card.

It holds counts, templates, settings and figures; never a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from batch_assets.exports.record import ExportRecord
from batch_assets.publishing.dataset_card import dollars, markdown_table, size_category
from batch_assets.publishing.published_table import PublishedTable
from batch_assets.publishing.quality import CheckFigure
from gpu_runner.rows import Generation

_LONGEST = 20_000  # letters of a template


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What is said of a dataset beside its export. `templates`: role and text of each message, as declared; of a
    dataset that no file declares none. `figures`: of the asset checks of the dataset's own table. `made_of`: name of
    the dataset, where the rows are made of that table. `judged`: name of the dataset whose rows were judged by this
    one; "" where it judges none.
    """

    table: PublishedTable
    generation: Generation
    figures: Sequence[CheckFigure] = ()
    templates: Sequence[tuple[str, str]] = ()
    license: str | None = None
    description: str = ""
    owners: Sequence[str] = ()
    tags: Sequence[str] = ()
    made_of: str | None = None
    judged: str = ""


def hub_card(record: ExportRecord, facts: CardFacts, *, folder: str) -> str:
    """The whole card; `folder`: where the files lie in the repository."""
    parts = [_front_matter(record, facts, folder), f"# {record.dataset}"]
    if facts.table.simulated:
        parts.append("> **Simulated.** Some or all outputs were made by an engine simulator, not by a language model.")
    if facts.description:
        parts.append(facts.description.strip())
    parts += [_facts(record, facts), _rows(record)]
    if facts.figures:
        said = f"Of the table of `{facts.made_of}`, of which these rows are made.\n\n" if facts.made_of else ""
        parts.append(f"## Checks\n\n{said}{_figures(facts.figures)}")
    if facts.templates:
        heading = "## Prompt of the judge" if facts.judged else "## Prompt"
        parts += [heading, *(_template(role, text) for role, text in facts.templates)]
    return "\n\n".join(parts) + "\n"


def _front_matter(record: ExportRecord, facts: CardFacts, folder: str) -> str:
    simulated = ["simulated"] if facts.table.simulated else []
    tags = list(dict.fromkeys(["synthetic", "batch-assets", *simulated, *facts.tags]))
    rows = sum(record.rows.values())
    ending = "parquet" if record.options.get("format") == "parquet" else "jsonl"
    lines = [
        "---",
        *([] if facts.license is None else [f"license: {json.dumps(facts.license)}"]),
        f"pretty_name: {json.dumps(record.dataset)}",
        f"tags: {json.dumps(tags, ensure_ascii=False)}",
        f"size_categories: {json.dumps([size_category(rows)])}",
        "configs:",
        "- config_name: default",
        "  data_files:" if record.rows else "  data_files: []",
    ]
    for split in record.rows:
        lines += [f"  - split: {split}", f'    path: "{folder}/{split}-*.{ending}"']
    return "\n".join([*lines, "---"])


def _facts(record: ExportRecord, facts: CardFacts) -> str:
    table, settings = facts.table, facts.generation
    models = [source.model for source in table.sources if source.model not in (None, settings.model)]
    of_votes, what = (" of the votes", "vote") if facts.judged else ("", "completion")
    unpriced = f"; {table.unpriced:,} rows without a known price" if table.unpriced else ""
    options = {name: value for name, value in record.options.items() if value not in (None, [], {}, 0.0)}
    said = {
        "owners": ", ".join(facts.owners) or "not named",
        "version of the table": record.version,
        "published": datetime.fromtimestamp(table.created_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **({"prompts, outputs": f"those of the dataset {facts.judged}"} if facts.judged else {}),
        "judged by" if facts.judged else "task, model": f"{settings.task}, {settings.model}",
        **({"answered by": ", ".join(dict.fromkeys(filter(None, models)))} if models else {}),
        "sampling": json.dumps(dict(settings.sampling), ensure_ascii=False),
        "rows of the table": f"{table.rows:,}: {table.ok:,} with a {what}, {table.dead:,} without",
        f"tokens{of_votes}": f"{table.prompt_tokens:,} prompt, {table.completion_tokens:,} completion",
        f"cost{of_votes}": dollars(table.usd) + unpriced,
        "export": json.dumps(options, ensure_ascii=False, sort_keys=True),
    }
    return markdown_table(("", ""), said.items())


def _rows(record: ExportRecord) -> str:
    rows = [(split, f"{count:,}") for split, count in record.rows.items()]
    left = [(f"left out: {reason}", f"{count:,}") for reason, count in record.left_out.items()]
    return "## Rows\n\n" + markdown_table(("split", "rows"), [*rows, *left])


def _figures(figures: Sequence[CheckFigure]) -> str:
    lines = [
        (one.name, "passed" if one.passed else "failed", _number(one.value), _number(one.threshold)) for one in figures
    ]
    return markdown_table(("check", "", "value", "bound"), lines)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


def _template(role: str, text: str) -> str:
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    fence = "`" * max(3, max((len(run) + 1 for run in re.findall("`+", cut)), default=0))
    return f"{role or 'text'}:\n\n{fence}jinja\n{cut}\n{fence}"
