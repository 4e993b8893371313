"""`batch-assets usage`: what tenants of the front door used, and what they are charged."""

from __future__ import annotations

import contextlib
import datetime

from rich.box import SIMPLE_HEAD
from rich.table import Table

from batch_assets.api.access.api_keys import checked_tenant
from batch_assets.api.billing.usage import Used
from batch_assets.api.billing.usage_ledger import UsageLedger, UsageLine
from batch_assets.api.database.service_database import Records
from batch_assets.api.settings import records_database
from batch_assets.cli.output import output_console, print_json
from batch_assets.local_dagster.home import prepare_home
from gpu_runner.money import format_usd


def show_usage(tenant: str | None, days: int, *, as_json: bool, today: datetime.date) -> None:
    """Usage of the last days, today included, by day, tenant, class and model. Raises KeyRequestError."""
    if tenant is not None:
        checked_tenant(tenant)
    prepare_home()
    with contextlib.closing(UsageLedger(Records(records_database()))) as ledger:
        lines = ledger.lines(tenant, today - datetime.timedelta(days=days - 1))
    if as_json:
        print_json({"usage": [_shown(line) for line in lines]})
        return
    table = Table("day", "tenant", "class", "model", "requests", "input", "output", "$", box=SIMPLE_HEAD)
    whole = Used()
    for line in lines:
        whole = whole.plus(line.used)
        key = line.key
        table.add_row(str(key.day), key.tenant, key.service_class, key.model, *_cells(line.used))
    if lines:
        table.add_section()
        table.add_row("all", "", "", "", *_cells(whole))
    console = output_console()
    console.print(table)
    if whole.unpriced_tokens:
        console.print(
            f"{whole.unpriced_tokens:,} tokens have no price: prices.yaml names none for their model and class"
        )


def _cells(used: Used) -> tuple[str, str, str, str]:
    return f"{used.requests:,}", f"{used.input_tokens:,}", f"{used.output_tokens:,}", format_usd(used.usd, fine=True)


def _shown(line: UsageLine) -> dict[str, object]:
    return {
        "day": str(line.key.day),
        "tenant": line.key.tenant,
        "class": line.key.service_class,
        "model": line.key.model,
        "kind": line.key.kind.value,
        **line.used.counts(),
        "usd": line.used.usd,
    }
