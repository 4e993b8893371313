"""`batch-assets usage`: lines of the ledger, as a table and as JSON."""

from __future__ import annotations

import contextlib
import datetime
import json
from pathlib import Path

import pytest

from batch_assets.api.access.api_keys import KeyRequestError
from batch_assets.api.billing.usage import Kind, UsageKey, Used
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.service_database import Records
from batch_assets.cli.usage import show_usage

TODAY = datetime.date(2027, 3, 2)


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Usage of two tenants, on two days."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("BATCH_ASSETS_API_DB", database := f"sqlite:///{tmp_path}/api.db")
    found = {
        UsageKey(TODAY, "acme", "interactive", "m", Kind.COMPLETIONS): Used(2, 0, 1_000, 10, 500, 0, 25 * 10**10),
        UsageKey(TODAY, "other", "batch", "n", Kind.EMBEDDINGS): Used(1, 0, 7, 0, 0, 7, 0),
        UsageKey(TODAY - datetime.timedelta(days=1), "acme", "batch", "m", Kind.COMPLETIONS): Used(1, 1),
    }
    with contextlib.closing(UsageLedger(Records(database))) as opened:
        opened.apply("j", 0, 1, found)


def test_json_has_every_count_of_the_tenant_and_the_days(capsys: pytest.CaptureFixture[str]) -> None:
    show_usage("acme", 1, as_json=True, today=TODAY)
    assert json.loads(capsys.readouterr().out) == {
        "usage": [
            {
                "day": "2027-03-02",
                "tenant": "acme",
                "class": "interactive",
                "model": "m",
                "kind": "completions",
                "requests": 2,
                "unmetered": 0,
                "input_tokens": 1_000,
                "cached_tokens": 10,
                "output_tokens": 500,
                "unpriced_tokens": 0,
                "usd": 0.25,
            }
        ]
    }


def test_the_table_adds_up_and_says_what_has_no_price(capsys: pytest.CaptureFixture[str]) -> None:
    show_usage(None, 2, as_json=False, today=TODAY)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2027-03-02", "acme", "interactive", "m", "2", "1,000", "500", "0.2500"] in lines
    assert ["all", "4", "1,007", "500", "0.2500"] in lines
    assert any(line[:4] == ["7", "tokens", "have", "no"] for line in lines)


def test_what_cannot_be_a_tenant_is_refused() -> None:
    with pytest.raises(KeyRequestError, match="tenant"):
        show_usage("ACME!", 1, as_json=True, today=TODAY)
