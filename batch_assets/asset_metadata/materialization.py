"""The metadata of a materialization: what the catalog shows of a snapshot and of a published table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import dagster as dg

from batch_assets.asset_metadata.distributions import NO_COMPLETION, table_distributions
from batch_assets.asset_metadata.histogram import distributions_markdown
from batch_assets.asset_metadata.sample_rows import first_rows_markdown, sample_markdown
from batch_assets.exports.declared_export import WrittenExport
from batch_assets.exports.hub_push import Pushed
from batch_assets.filtering.passed_table import FilterReport
from batch_assets.judging.judged_table import JudgeReport
from batch_assets.publishing.batch_reader import table_name
from batch_assets.publishing.dataset_card import MEANING
from batch_assets.publishing.prompt_column import PROMPT
from batch_assets.publishing.published_table import PublishedTable
from batch_assets.settings import SettingError, viewer_url
from batch_assets.snapshot.prompts.rendering import Prompts
from batch_assets.snapshot.reuse import ReusableRows
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.judge import SCORE
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.source import table_read_by
from gpu_runner.fleet_database.accounting.bill_split import Split
from resources.store.dataset_store import DatasetStore, SnapshotManifest

TYPE_LETTERS = 24


def snapshot_metadata(store: DatasetStore, manifest: SnapshotManifest) -> dict[str, Any]:
    """Counts of the snapshot; numbers stay numbers, Dagster plots them."""

    def file(name: str) -> dg.PathMetadataValue:
        return dg.MetadataValue.path(store.objects.uri(store.snapshot_path(manifest.snapshot, name)))

    counts = ("rows", "batches", "source_rows", "rejected", "duplicates", "added", "changed", "removed", "unchanged")
    found: dict[str, Any] = {
        **{name: getattr(manifest, name) for name in counts},
        "dagster/row_count": manifest.rows,
        "snapshot": manifest.snapshot,
        "model": str(manifest.generation["model"]),
        "manifest": file("manifest.json"),
    }
    if manifest.source.startswith("hf://"):
        found["source"] = manifest.source  # with the commit that was read
    if manifest.streaming is not None:
        found["streaming"] = str(manifest.streaming)
    if (rule := manifest.settings().reasoning_tags) is not None:
        found["reasoning_tags"] = rule
    return found | ({"rejects": file("rejects.parquet")} if manifest.rejected else {})


def reuse_metadata(found: ReusableRows) -> dict[str, Any]:
    """Rows that other datasets have answered, and which: they need no engine."""
    return {"rows_reusable": found.rows, "reusable_from": dg.MetadataValue.json(dict(found.datasets))}


def table_metadata(
    store: DatasetStore, table: PublishedTable, bill: Split | None, *, final: bool = True
) -> dict[str, Any]:
    """Counts, schema, cost and places of a published table. `usd` is the useful part of the bill.

    `final`: what the bill is of has ended; the whole of another one will be different a moment later, and is left out.

    The schema is not `dagster/column_schema`: the UI shows that one in a section of its own, above all other metadata.
    """
    counts = ("rows", "ok", "dead", "duplicates", "batches", "prompt_tokens", "completion_tokens", "bytes")
    found: dict[str, Any] = {
        **{name: getattr(table, name) for name in counts},
        "dagster/row_count": table.rows,
        "columns": _columns(table),
        "dagster/uri": table.uri(store.objects),
        "snapshot": table.snapshot,
        **({} if table.model is None else {"model": table.model}),
        "files": dg.MetadataValue.path(table.glob(store.objects)),
        "simulated": table.simulated,
    }
    if table.output_mismatches is not None:
        found["output_mismatches"] = table.output_mismatches
    if table.reused:
        found |= {"rows_reused": sum(table.reused.values()), "reused_from": dg.MetadataValue.json(table.reused)}
    billed = {} if bill is None else {"usd_useful": round(bill.useful, 6)}
    billed |= {"usd_billed": round(bill.total, 6)} if bill is not None and final else {}
    return found | ({"usd": table.usd} if table.usd is not None else {}) | billed


def _columns(table: PublishedTable) -> dg.TableSchemaMetadataValue:
    """Names, types and meanings of the columns."""
    columns = [
        dg.TableColumn(
            column.name,
            short_type(column.type),
            description=column.description or MEANING.get(column.name, "column of the source"),
        )
        for column in table.columns
    ]
    return dg.MetadataValue.table_schema(dg.TableSchema(columns))


def judged_metadata(
    store: DatasetStore, table: PublishedTable, report: JudgeReport, *, samples: bool = False
) -> dict[str, Any]:
    """Some rows with their scores (`samples`), counts and places of the judged rows, and how far votes agree. Numbers
    stay numbers, Dagster plots them."""
    lost = {"lost_by": dg.MetadataValue.json(report.lost_by)} if report.lost else {}
    figures = {"mean_score" if name == "score" else name: value for name, value in report.figures.items()}
    return {
        **(sampled_rows(store, table, beside=SCORE) if samples else {}),
        "rows": table.rows,
        "dagster/row_count": table.rows,
        "rows_unscored": report.unscored,
        "votes": report.votes,
        "votes_lost": report.lost,
        **lost,
        **{name: round(value, 6) for name, value in figures.items() if value is not None},
        "columns": _columns(table),
        "dagster/uri": table.uri(store.objects),
        "files": dg.MetadataValue.path(table.glob(store.objects)),
    }


def passed_metadata(
    store: DatasetStore, table: PublishedTable, report: FilterReport, *, samples: bool = False, judged: bool = False
) -> dict[str, Any]:
    """Some of the rows that pass a filter (`samples`; with their scores where they were `judged`), counts and places,
    and of those that fall out, by rule. Numbers stay numbers."""
    by_rule = ["| rule | flagged | fell out |", "|---|--:|--:|"]
    by_rule += [f"| {name} | {count:,} | {report.removed[name]:,} |" for name, count in report.flagged.items()]
    return {
        **(sampled_rows(store, table, beside=SCORE if judged else None) if samples else {}),
        "rows": table.rows,
        "dagster/row_count": table.rows,
        "rows_fallen": report.fallen,
        "by_rule": dg.MetadataValue.md("\n".join(by_rule)),
        **({} if report.all_wanted is None else {"rows_wanted": report.all_wanted}),
        **{f"flagged_{name}": count for name, count in report.flagged.items()},
        **{f"not_compared_{name}": count for name, count in (report.not_compared or {}).items()},
        "columns": _columns(table),
        "table_version": report.table,
        "dagster/uri": table.uri(store.objects),
        "files": dg.MetadataValue.path(table.glob(store.objects)),
        "fallen_files": dg.MetadataValue.path(store.objects.uri(f"{table.path}/fallen-*.parquet")),
        "simulated": table.simulated,
    }


def export_metadata(written: WrittenExport) -> dict[str, Any]:
    """Counts and places of files that were made of a table. Numbers stay numbers."""
    record = written.record
    left_out = {} if not record.left_out else {"left_out_by_reason": dg.MetadataValue.json(record.left_out)}
    return {
        "rows": sum(record.rows.values()),
        "dagster/row_count": sum(record.rows.values()),
        **{f"rows_{split}": count for split, count in record.rows.items()},
        "rows_left_out": sum(record.left_out.values()),
        **left_out,
        "files": len(record.files),
        "bytes": sum(file.bytes for file in record.files),
        "table_version": record.version,
        "version": written.version,
        "dagster/uri": written.files.root,
        "path": dg.MetadataValue.path(written.files.root),
        **({} if written.pushed is None else _pushed_metadata(written.pushed)),
    }


def _pushed_metadata(pushed: Pushed) -> dict[str, Any]:
    return {"hub_repo": pushed.repo, "hub_branch": pushed.branch, "hub_commit": pushed.commit}


def short_type(name: str) -> str:
    """An Arrow type as the UI has room for it: the fields of structs are told in the column's description."""
    return name if len(name) <= TYPE_LETTERS else f"{name.partition('<')[0]}<…>"


def view_link(table: PublishedTable) -> dict[str, Any]:
    """Where `batch-assets view` shows the table, where BATCH_ASSETS_VIEWER_URL says that it is served.

    A wrong one is refused when Dagster starts; here it only leaves the link out.
    """
    try:
        base = viewer_url()
    except SettingError:
        base = ""
    if not base:
        return {}
    query = urlencode({"dataset": table.dataset, "version": table.version})
    return {"view": dg.MetadataValue.url(f"{base}/?{query}")}


def column_lineage(spec: GeneratedDatasetSpec, base: Path, table: PublishedTable) -> dict[str, Any]:
    """Of which columns of what the dataset reads its prompts, outputs and kept columns are made.

    `base`: where files of the prompt lie; without them there is no lineage.
    """
    try:
        asked = Prompts(spec, base).columns
    except SourceError:
        return {}
    read = table_read_by(spec.source)
    source = dg.AssetKey([spec.name, "source"]) if read is None else dg.AssetKey.from_user_string(read)
    before = {new: old for old, new in (spec.source.rename or {}).items()}

    def made_of(names: Iterable[str]) -> list[dg.TableColumnDep]:
        return [dg.TableColumnDep(source, before.get(name, name)) for name in names]

    kept = {table_name(name): made_of([name]) for name in spec.keep_columns}
    of_output = [column.name for column in table.columns if column.description is not None]
    there = {column.name for column in table.columns}
    found = kept | {name: made_of(asked) for name in (PROMPT, "output", *of_output) if name in there}
    return {"dagster/column_lineage": dg.MetadataValue.column_lineage(dg.TableColumnLineage(found))}


def shown_rows(store: DatasetStore, table: PublishedTable, *, samples: bool) -> dict[str, Any]:
    """What people look at first: pictures of lengths, finish reasons and latency and, with `samples`, some rows.

    Then the shares of rows without an answer, and of cut ones, which Dagster plots over the versions.
    """
    counted = table_distributions(store, table)
    pictures = distributions_markdown(counted)
    found: dict[str, Any] = {}
    if samples:
        found |= sampled_rows(store, table)
    found |= {"histograms": dg.MetadataValue.md(pictures)} if pictures else {}
    if asked := counted.reasons.total():
        rates = {"dead_rate": counted.reasons[NO_COMPLETION], "cut_rate": counted.reasons["length"]}
        found |= {name: dg.MetadataValue.float(round(count / asked, 6)) for name, count in rates.items()}
    return found


def sampled_rows(store: DatasetStore, table: PublishedTable, *, beside: str | None = None) -> dict[str, Any]:
    """Rows of a table, which stand above all else on the asset's page; none of an empty one. `beside`: a column whose
    value stands before each output."""
    if not table.rows:
        return {}
    return {
        "first_rows": dg.MetadataValue.md(first_rows_markdown(store, table, beside=beside)),
        "sample_rows": dg.MetadataValue.md(sample_markdown(store, table, beside=beside)),
    }
