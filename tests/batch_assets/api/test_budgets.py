"""`metadata.budget_usd` of a batch: it is kept to, its lines wait, and the bill is that of the answers."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from support.api_service import CHAT, ApiService, api_service, line
from support.simulated_engine import simulated_engine

from batch_assets.api.billing.price_list import PriceList

PRICES = PriceList.model_validate({"default": {"batch": [{"within": "1h", "input": 1, "output": 2}, {"input": 9}]}})
LINES = 300


def lines(count: int = LINES) -> list[Any]:
    return [line(f"r{number}", max_tokens=8) for number in range(count)]


def cost(answers: list[Any]) -> Decimal:
    usage = [one["response"]["body"]["usage"] for one in answers]
    micro = sum(one["prompt_tokens"] + 2 * one["completion_tokens"] for one in usage)
    return Decimal(micro) / 10**6


async def paused(site: ApiService, batch_id: str) -> Any:
    while (batch := await site.get(batch_id))["metadata"].get("budget_state") != "paused":
        assert batch["status"] in ("validating", "in_progress"), batch
        await asyncio.sleep(0.02)
    return batch


@pytest.mark.slow
def test_a_batch_waits_at_its_budget_and_ends_with_its_window(tmp_path: Path) -> None:
    async def steps(url: str) -> None:
        async with api_service(tmp_path, url, prices=PRICES) as site:
            made = await site.create(lines(), window="15m", metadata={"budget_usd": "0.004"})
            seen = await paused(site, made["id"])
            spent = Decimal(seen["metadata"]["spent_usd"])
            assert Decimal("0.0038") < spent <= Decimal("0.004"), "no room is left for another line"
            beside = await site.until((await site.create(lines(20)))["id"])
            assert beside["status"] == "completed", "other batches do not wait"
            await site.client.post(f"/v1/batches/{made['id']}/cancel")
            ended = await site.until(made["id"])
            output, errors = await site.results(ended)
            assert ended["status"] == "cancelled" and len(output) + len(errors) == LINES and len(output) > 100
            assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
            assert cost(output) == spent == Decimal(ended["metadata"]["spent_usd"])
            used = site.app.state.ledger.batch_usage(made["id"])
            assert Decimal(used.amount) / 10**12 == spent and used.requests == len(output)

    with simulated_engine("--speed", "50", "--output-tokens", "fixed:8", model="tiny") as engine:
        asyncio.run(steps(engine.url))


@pytest.mark.slow
def test_a_window_that_ends_while_the_budget_holds_expires_the_rest(tmp_path: Path) -> None:
    async def steps(url: str) -> None:
        async with api_service(tmp_path, url, prices=PRICES) as site:
            made = await site.create(lines(), window="6s", metadata={"budget_usd": "0.002"})
            ended = await site.until(made["id"])
            output, errors = await site.results(ended)
            assert ended["status"] == "expired" and ended["metadata"]["budget_state"] == "paused"
            assert {one["error"]["code"] for one in errors} == {"batch_expired"}
            assert 0 < cost(output) <= Decimal("0.002") and len(output) + len(errors) == LINES

    with simulated_engine("--speed", "50", "--output-tokens", "fixed:8", model="tiny") as engine:
        asyncio.run(steps(engine.url))


def test_a_batch_within_its_budget_completes_and_is_charged_by_its_window(tmp_path: Path) -> None:
    async def steps(url: str) -> None:
        async with api_service(tmp_path, url, prices=PRICES) as site:
            made = await site.create(lines(), window="1h", metadata={"budget_usd": "5", "a": "b"})
            ended = await site.until(made["id"])
            output, _ = await site.results(ended)
            assert ended["status"] == "completed" and len(output) == LINES
            assert ended["metadata"]["a"] == "b" and ended["metadata"]["budget_state"] == "within"
            assert Decimal(ended["metadata"]["spent_usd"]) == cost(output)
            (found,) = site.app.state.ledger.lines()
            assert (found.key.service_class, found.key.tenant, found.key.model) == ("batch_1h", "default", "tiny")
            assert found.used.requests == LINES and found.used.unpriced_tokens == 0

    with simulated_engine("--speed", "50", "--output-tokens", "fixed:8", model="tiny") as engine:
        asyncio.run(steps(engine.url))


def test_a_budget_without_a_price_is_refused_with_the_input(tmp_path: Path) -> None:
    async def steps(url: str) -> None:
        async with api_service(tmp_path, url) as site:
            ended = await site.until((await site.create(lines(2), metadata={"budget_usd": "5"}))["id"])
            (error,) = ended["errors"]["data"]
            assert ended["status"] == "failed" and error["param"] == "metadata.budget_usd" and error["line"] is None

    with simulated_engine(model="tiny") as engine:
        asyncio.run(steps(engine.url))


@pytest.mark.parametrize("budget", ["0", "-1", "lots", "nan"])
def test_what_is_no_budget_is_refused_at_once(tmp_path: Path, budget: str) -> None:
    async def steps() -> None:
        async with api_service(tmp_path, "http://127.0.0.1:9") as site:
            file_id = await site.upload(lines(1))
            asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "1h"}
            answer = await site.client.post("/v1/batches", json={**asked, "metadata": {"budget_usd": budget}})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "metadata.budget_usd"

    asyncio.run(steps())
