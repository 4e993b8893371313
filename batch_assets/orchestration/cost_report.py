"""The asset `platform/spend`: what every dataset cost, by day and kind of instance, as a table and as plots.

The whole table of a fleet is made anew from its database each time, in one object of its own: so it is right after a
crash, two writers at once do no harm, and what a lost book once said stays beside it. The sensor writes it without a
run.

No postponed annotations here: Dagster reads the classes of resources.
"""

import datetime
import json
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

from batch_assets.capacity_planning.clock_scale import scale_words
from gpu_runner.fleet_database.accounting.charges import SpendLine, by_day
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.reporting.reports import Billed
from gpu_runner.money import format_usd
from resources.fleet.resource import GpuFleet
from resources.objects.opening import Objects, open_for_sensor, open_objects
from resources.store.dataset_store import BatchStore

SPEND_KEY = dg.AssetKey(["platform", "spend"])
FOLDER = "_platform/spend"  # no dataset's: their names do not begin with _
LOOK_SECONDS = 60
WRITE_SECONDS = 900.0  # between two tables while something is rented: an event stays in the catalog for ever
STEADY_SECONDS = 0.001  # of all instances' bills together: less is rounding
SHOWN_DATASETS = 50
DIGITS = 6

_TEXT, _USD, _COUNT = pa.string(), pa.float64(), pa.int64()
COLUMNS = [
    ("fleet", _TEXT, "which fleet's database says so: what its instances' names begin with"),
    ("day", pa.date32(), "UTC"),
    ("provider", _TEXT, "provider that rented it out"),
    ("gpu", _TEXT, "name of the GPU"),
    ("gpus", _COUNT, "GPUs of one instance"),
    ("spot", pa.bool_(), "it could be taken away"),
    ("dataset", _TEXT, "dataset that pays: from its lease to the next lease of the instance"),
    ("useful_usd", _USD, "time in which rows got their outcome"),
    ("booting_usd", _USD, "time until the engine was ready"),
    ("idle_usd", _USD, "time in which nothing was in flight"),
    ("wasted_usd", _USD, "time for rows that got no outcome, and boots that failed"),
    ("usd", _USD, "all four together"),
    ("rows", _COUNT, "outcomes"),
    ("prompt_tokens", _COUNT, "tokens of prompts"),
    ("completion_tokens", _COUNT, "tokens written"),
    ("usd_per_1k_rows", _USD, "everything included; null without rows"),
    ("usd_per_million_tokens", _USD, "prompt and completion, everything included; null without tokens"),
    ("instances", _COUNT, "instances with a part of their bill in this line"),
]


def spend_table(fleet: str, lines: Sequence[SpendLine]) -> pa.Table:
    """The lines as a table of COLUMNS."""
    schema = pa.schema([(name, kind) for name, kind, _ in COLUMNS])
    of_fleet = [{"fleet": fleet, **{name: getattr(line, name) for name in schema.names[1:]}} for line in lines]
    return pa.Table.from_pylist(of_fleet, schema=schema)


def put_table(objects: Objects, path: str, table: pa.Table) -> None:
    """Replace a table of one object."""
    written = pa.BufferOutputStream()
    pq.write_table(table, written, compression="zstd")
    objects.put(path, written.getvalue().to_pybytes())


def table_metadata(columns: Sequence[tuple[str, pa.DataType, str]], rows: int, uri: str) -> dict[str, Any]:
    """What Dagster shows of a table, below its figures. `columns`: name, kind, what it holds."""
    return {
        "dagster/row_count": rows,
        "columns": dg.TableSchema([dg.TableColumn(n, str(kind), about) for n, kind, about in columns]),
        "dagster/uri": uri,
    }


def write_spend(objects: Objects, fleet_db: FleetDatabase, simulated: Container[str] = ()) -> dict[str, Any]:
    """Replace this fleet's part of the table; returns the metadata of its materialization.

    `simulated`: providers that only play their machines.
    """
    lines, billed, fleet = by_day(fleet_db.charges()), fleet_db.billed(), fleet_db.tag().rstrip("-")
    put_table(objects, f"{FOLDER}/{fleet}.parquet", spend_table(fleet, lines))
    today = datetime.datetime.fromtimestamp(billed.now, datetime.UTC).date()
    played = sum(line.usd for line in lines if line.provider in simulated)
    return spend_metadata(lines, today, played) | {
        **table_metadata(COLUMNS, len(lines), objects.uri(FOLDER)),
        "files": dg.MetadataValue.path(objects.uri(f"{FOLDER}/*.parquet")),
        "instances": billed.standing,
        **({"clock": scale} if (scale := scale_words({one.provider: one.clock for one in fleet_db.costs()})) else {}),
    }


def spend_metadata(lines: Sequence[SpendLine], today: datetime.date, simulated_usd: float = 0.0) -> dict[str, Any]:
    """Numbers that Dagster plots over time, and a table of datasets. US dollars; of all days unless named so."""
    table = datasets_markdown(lines, today)
    if simulated_usd:
        table += f"\n\n{_usd(simulated_usd)} $ of it simulated, paid by nobody."
    whole = Summary.of(lines)
    return {
        "datasets": dg.MetadataValue.md(table),
        "usd_today": round(Summary.of([line for line in lines if line.day == today]).usd, DIGITS),
        "usd_total": round(whole.usd, DIGITS),
        **({"usd_simulated": round(simulated_usd, DIGITS)} if simulated_usd else {}),
        **{name: round(getattr(whole, name), DIGITS) for name in Summary.PARTS},
        "rows": whole.rows,
        "tokens": whole.tokens,
        **({"usd_per_1k_rows": round(whole.per_1k_rows, DIGITS)} if whole.per_1k_rows is not None else {}),
        **({"usd_per_million_tokens": round(whole.per_mtok, DIGITS)} if whole.per_mtok is not None else {}),
    }


@dataclass(frozen=True, slots=True)
class Summary:
    """Several lines together."""

    PARTS = ("useful_usd", "booting_usd", "idle_usd", "wasted_usd")

    usd: float
    useful_usd: float
    booting_usd: float
    idle_usd: float
    wasted_usd: float
    rows: int
    tokens: int

    @classmethod
    def of(cls, lines: Sequence[SpendLine]) -> Self:
        return cls(**{name: sum(getattr(line, name) for line in lines) for name in cls.__dataclass_fields__})

    @property
    def per_1k_rows(self) -> float | None:
        """US dollars per thousand rows, everything included."""
        return self.usd / self.rows * 1e3 if self.rows else None

    @property
    def per_mtok(self) -> float | None:
        """US dollars per million tokens, everything included."""
        return self.usd / self.tokens * 1e6 if self.tokens else None


def datasets_markdown(lines: Sequence[SpendLine], today: datetime.date) -> str:
    """A table with a line per dataset, the dearest first."""
    of: dict[str, list[SpendLine]] = {}
    for line in lines:
        of.setdefault(line.dataset, []).append(line)
    if not of:
        return "Nothing was rented yet."
    ranked = sorted(of, key=lambda name: -Summary.of(of[name]).usd)
    found = [
        "| dataset | $ today | $ | useful | $/1k rows | $/M tokens | rows |",
        "|:--|" + "--:|" * 6,
    ]
    for name in ranked[:SHOWN_DATASETS]:
        whole, now = Summary.of(of[name]), Summary.of([line for line in of[name] if line.day == today])
        useful = f"{whole.useful_usd / whole.usd:.0%}" if whole.usd else "–"
        cells = (_usd(now.usd), _usd(whole.usd), useful, _usd(whole.per_1k_rows), _usd(whole.per_mtok))
        found.append(f"| {name} | {' | '.join(cells)} | {whole.rows:,} |")
    more = len(ranked) - SHOWN_DATASETS
    return "\n".join(found) + (f"\n\nand {more} datasets of less." if more > 0 else "")


def _usd(amount: float | None) -> str:
    if amount is None:
        return "–"
    return format_usd(amount, fine=True)


@dg.asset(
    key=SPEND_KEY,
    group_name="platform",
    kinds={"parquet", "table"},
    description="What every dataset cost: US dollars by day, provider, GPU and dataset, split into useful, booting, "
    f"idle and wasted. Written every {WRITE_SECONDS / 60:.0f} minutes while something is rented, and at its end.",
)
def spend(store: BatchStore, fleet: GpuFleet) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster looks for the bare name
    """The same by hand."""
    with fleet.open_database() as fleet_db:
        return dg.MaterializeResult(
            metadata=write_spend(open_objects(store.root), fleet_db, fleet.simulated_providers(fleet_db))
        )


@dataclass(frozen=True, slots=True)
class Written:
    """When the sensor wrote the table last, by the database's clock, and what had been billed until then."""

    at: float
    seconds: float

    @classmethod
    def parse(cls, cursor: str | None) -> Self | None:
        """None when there is no cursor, or one that nobody can read."""
        try:
            found = json.loads(cursor or "null")
            return None if found is None else cls(float(found["at"]), float(found["seconds"]))
        except (ValueError, TypeError, KeyError):
            return None


def why_not(last: Written | None, billed: Billed) -> str | None:
    """Why the table need not be written now; None when it is due."""
    if abs(billed.seconds - (last.seconds if last else 0.0)) < STEADY_SECONDS:
        return "nothing was spent since the table was written" if last else "nothing was spent yet"
    if last is None:
        return None
    age, due = billed.now - last.at, WRITE_SECONDS if billed.standing else LOOK_SECONDS
    return f"written {age:.0f} s ago, next in {due - age:.0f} s" if 0 <= age < due else None


@dg.sensor(
    name="cost_report",
    target=spend,
    minimum_interval_seconds=LOOK_SECONDS,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Writes the table of spend when something was spent; needs no run for it.",
)
def cost_report_sensor(context: dg.SensorEvaluationContext, store: BatchStore, fleet: GpuFleet) -> dg.SensorResult:
    """An event per quarter of an hour at most while something is rented, and one when all of it has ended."""
    with fleet.open_database() as fleet_db:
        billed = fleet_db.billed()
        if reason := why_not(Written.parse(context.cursor), billed):
            return dg.SensorResult(skip_reason=reason, cursor=context.cursor)
        metadata = write_spend(open_for_sensor(store.root), fleet_db, fleet.simulated_providers(fleet_db))
    return dg.SensorResult(
        asset_events=[dg.AssetMaterialization(SPEND_KEY, metadata=metadata)],
        cursor=json.dumps(asdict(Written(billed.now, billed.seconds))),
        skip_reason=f"${format_usd(metadata['usd_total'])} so far, ${format_usd(metadata['usd_today'])} today",
    )
