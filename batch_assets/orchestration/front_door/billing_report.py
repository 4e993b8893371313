"""The asset `api/billing`: what tenants of the front door used and are charged, beside what its engines cost.

The whole table is made anew from the usage ledger and from the fleet's database, in one object: it is right after a
crash. The sensor writes it without a run, when something was used or spent.

No postponed annotations here: Dagster reads the classes of resources.
"""

import contextlib
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg
import pyarrow as pa

from batch_assets.api.billing.margin import Margin, MarginLine, by_class, engine_cost, margin_lines
from batch_assets.api.billing.usage import Used
from batch_assets.api.billing.usage_ledger import LedgerTotals, UsageLedger, UsageLine
from batch_assets.orchestration.cost_report import DIGITS, SPEND_KEY, put_table, table_metadata
from batch_assets.orchestration.front_door.api_batches import opened_records
from gpu_runner.fleet_database.accounting.charges import SpendLine, by_day
from gpu_runner.money import format_usd
from resources.fleet.resource import GpuFleet
from resources.objects.opening import Objects, open_for_sensor, open_objects
from resources.store.dataset_store import BatchStore

BILLING_KEY = dg.AssetKey(["api", "billing"])
PATH = "_platform/billing.parquet"
LOOK_SECONDS = 300
STEADY_USD = 0.01  # what engines cost more since the last table, with nothing used: not worth an event

_TEXT, _USD, _COUNT = pa.string(), pa.float64(), pa.int64()
COLUMNS = [
    ("day", pa.date32(), "UTC"),
    ("tenant", _TEXT, "tenant that used it; empty for engines that nobody used"),
    ("class", _TEXT, "interactive, batch by its window, or unused"),
    ("model", _TEXT, "which model"),
    ("kind", _TEXT, "completions or embeddings"),
    ("requests", _COUNT, "answers"),
    ("unmetered", _COUNT, "answers of which no engine has counted the tokens"),
    ("input_tokens", _COUNT, "tokens of prompts"),
    ("cached_tokens", _COUNT, "of these, tokens from an engine's cache"),
    ("output_tokens", _COUNT, "tokens written"),
    ("unpriced_tokens", _COUNT, "tokens of models without a price"),
    ("charged_usd", _USD, "by the price list"),
    ("gpu_usd", _USD, "its share, by tokens, of what the model's engines cost on that day"),
    ("margin_usd", _USD, "charged less what the engines cost"),
]


def billing_table(lines: Sequence[MarginLine]) -> pa.Table:
    """The lines as a table of COLUMNS."""
    rows = [
        {
            "day": line.key.day,
            "tenant": line.key.tenant,
            "class": line.key.service_class,
            "model": line.key.model,
            "kind": line.key.kind.value,
            **line.used.counts(),
            "charged_usd": line.used.usd,
            "gpu_usd": line.gpu_usd,
            "margin_usd": line.margin_usd,
        }
        for line in lines
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema([(name, kind) for name, kind, _ in COLUMNS]))


def write_billing(objects: Objects, usage: Sequence[UsageLine], spend: Sequence[SpendLine]) -> dict[str, Any]:
    """Replace the table; returns the metadata of its materialization."""
    lines = margin_lines(usage, spend)
    put_table(objects, PATH, billing_table(lines))
    classes = by_class(lines)
    whole = Margin(Used(), 0.0)
    for one in classes.values():
        whole = Margin(whole.used.plus(one.used), whole.gpu_usd + one.gpu_usd)
    return {
        "classes": dg.MetadataValue.md(classes_markdown(classes)),
        "charged_usd": round(whole.used.usd, DIGITS),
        "gpu_usd": round(whole.gpu_usd, DIGITS),
        "margin_usd": round(whole.margin_usd, DIGITS),
        "requests": whole.used.requests,
        "input_tokens": whole.used.input_tokens,
        "output_tokens": whole.used.output_tokens,
        **table_metadata(COLUMNS, len(lines), objects.uri(PATH)),
    }


def classes_markdown(classes: Mapping[str, Margin]) -> str:
    """A table with a line per class."""
    if not classes:
        return "Nothing was used yet."
    found = [
        "| class | requests | input tokens | output tokens | charged $ | engines $ | margin $ |",
        "|:--|" + "--:|" * 6,
    ]
    for name, one in classes.items():
        counts = (one.used.requests, one.used.input_tokens, one.used.output_tokens)
        usd = (one.used.usd, one.gpu_usd, one.margin_usd)
        cells = [f"{count:,}" for count in counts] + [format_usd(amount, fine=True) for amount in usd]
        found.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(found)


@contextlib.contextmanager
def usage_ledger() -> Iterator[UsageLedger | None]:
    """The ledger of this DAGSTER_HOME's front door; None where none was ever started."""
    with opened_records() as records:
        yield None if records is None else UsageLedger(records)


@dg.asset(
    key=BILLING_KEY,
    deps=[SPEND_KEY, dg.AssetKey(["api", "batches"])],
    group_name="api",
    kinds={"parquet", "table"},
    description="What tenants of `batch-assets serve` used and are charged, by day, tenant, class and model, beside "
    "what its engines cost.",
)
def billing(store: BatchStore, fleet: GpuFleet) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster looks for the bare name
    """The same by hand."""
    with usage_ledger() as ledger, fleet.open_database() as fleet_db:
        usage = [] if ledger is None else ledger.lines()
        return dg.MaterializeResult(metadata=write_billing(open_objects(store.root), usage, by_day(fleet_db.charges())))


@dg.sensor(
    name="billing_report",
    target=billing,
    minimum_interval_seconds=LOOK_SECONDS,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Writes the table of billing when something was used through the front door; needs no run for it.",
)
def billing_report_sensor(context: dg.SensorEvaluationContext, store: BatchStore, fleet: GpuFleet) -> dg.SensorResult:
    """An event every five minutes at most, and only when something is new."""
    with usage_ledger() as ledger:
        if ledger is None:
            return dg.SensorResult(skip_reason="the front door was never started", cursor=context.cursor)
        with fleet.open_database() as fleet_db:
            spend = by_day(fleet_db.charges())
        known = signature(ledger.totals(), spend)
        if not is_news(context.cursor, known):
            return dg.SensorResult(skip_reason="nothing was used since the table was written", cursor=context.cursor)
        usage = ledger.lines()  # what was added since the totals is news once more
    metadata = write_billing(open_for_sensor(store.root), usage, spend)
    return dg.SensorResult(
        asset_events=[dg.AssetMaterialization(BILLING_KEY, metadata=metadata)],
        cursor=json.dumps(known),
        skip_reason=f"{metadata['requests']:,} requests, ${format_usd(metadata['charged_usd'])} charged",
    )


def signature(totals: LedgerTotals, spend: Sequence[SpendLine]) -> dict[str, float]:
    """What changes when the table does."""
    return {
        "requests": totals.used.requests,
        "tokens": totals.used.tokens,
        "amount": totals.used.amount,
        "day": (totals.last_day or datetime.date.min).toordinal(),
        "gpu_usd": sum(engine_cost(spend).values()),
    }


def is_news(cursor: str | None, known: dict[str, float]) -> bool:
    """Whether the table would be another one than the cursor says; a cursor that cannot be read says nothing."""
    try:
        before = json.loads(cursor or "{}")
        same = all(before[name] == known[name] for name in known if name != "gpu_usd")
        return not (same and abs(before["gpu_usd"] - known["gpu_usd"]) < STEADY_USD)
    except (ValueError, TypeError, KeyError):
        return any(known[name] for name in known if name != "day")
