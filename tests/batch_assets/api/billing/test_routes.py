"""Usage and costs as the stock client reads them; each tenant sees its own."""

from __future__ import annotations

import asyncio
import datetime
import time
from pathlib import Path
from typing import Any

import pytest
from support.api_service import ApiService, api_service

from batch_assets.api.billing.usage import Kind, UsageKey, Used, midnight

NOBODY = "http://127.0.0.1:9"
TODAY = datetime.datetime.fromtimestamp(time.time(), datetime.UTC).date()


def day(ago: int) -> datetime.date:
    return TODAY - datetime.timedelta(days=ago)


def key(ago: int, service_class: str = "interactive", model: str = "m", kind: Kind = Kind.COMPLETIONS) -> UsageKey:
    return UsageKey(day(ago), "default", service_class, model, kind)


LINES = {
    key(2): Used(requests=2, input_tokens=30, cached_tokens=10, output_tokens=5, amount=4 * 10**12),
    key(2, "batch_1h"): Used(requests=1, input_tokens=7, output_tokens=1, amount=10**12),
    key(2, "batch_1h", "n"): Used(requests=1, input_tokens=100, output_tokens=1, amount=10**11),
    key(2, "batch", "e", Kind.EMBEDDINGS): Used(requests=1, input_tokens=9, amount=2 * 10**12),
    key(0): Used(requests=1, input_tokens=1, output_tokens=1),
    UsageKey(day(2), "other", "interactive", "m", Kind.COMPLETIONS): Used(requests=999, input_tokens=999),
}


async def asked(site: ApiService, path: str, status: int = 200, **query: Any) -> Any:
    answer = await site.client.get(f"/v1/organization/{path}", params={"start_time": midnight(day(2)), **query})
    assert answer.status_code == status, answer.text
    return answer.json()


def test_usage_and_costs_have_the_documented_shapes(tmp_path: Path) -> None:
    # Here: the client takes 0.6 s of CPU to import, and all workers import all modules.
    from openai.types.admin.organization import UsageCompletionsResponse, UsageCostsResponse, UsageEmbeddingsResponse

    async def steps() -> None:
        async with api_service(tmp_path, NOBODY) as site:
            site.app.state.ledger.apply("j", 0, 1, LINES)
            found = UsageCompletionsResponse.model_validate(await asked(site, "usage/completions"))
            assert [bucket.start_time for bucket in found.data] == [midnight(day(ago)) for ago in (2, 1, 0)]
            (result,) = found.data[0].results
            assert (result.input_tokens, result.output_tokens, result.num_model_requests) == (137, 7, 4)  # type: ignore[union-attr]
            assert (result.input_cached_tokens, result.model, result.batch) == (10, None, None)  # type: ignore[union-attr]
            assert found.data[1].results == [] and not found.has_more and found.next_page is None
            groups = await asked(site, "usage/completions", **{"group_by[]": ["model", "batch"]})
            seen = {(one["model"], one["batch"]): one["input_tokens"] for one in groups["data"][0]["results"]}
            assert seen == {("m", False): 30, ("m", True): 7, ("n", True): 100}
            batches = await asked(site, "usage/completions", batch="true", models="m")
            assert [one["input_tokens"] for one in batches["data"][0]["results"]] == [7]
            embeddings = UsageEmbeddingsResponse.model_validate(await asked(site, "usage/embeddings"))
            assert embeddings.data[0].results[0].input_tokens == 9  # type: ignore[union-attr]
            costs = UsageCostsResponse.model_validate(await asked(site, "costs"))
            amount = costs.data[0].results[0].amount  # type: ignore[union-attr]
            assert amount is not None and (amount.value, amount.currency) == (7.1, "usd")
            items = await asked(site, "costs", group_by="line_item")
            told = {one["line_item"]: one["amount"]["value"] for one in items["data"][0]["results"]}
            assert told == {"m, interactive": 4.0, "m, batch_1h": 1.0, "n, batch_1h": 0.1, "e, batch": 2.0}

    asyncio.run(steps())


def test_pages_follow_each_other_and_tenants_see_their_own(tmp_path: Path) -> None:
    async def steps() -> None:
        async with api_service(tmp_path, NOBODY) as site:
            site.app.state.ledger.apply("j", 0, 1, LINES)
            starts, page = [], None
            for _ in range(3):
                found = await asked(site, "usage/completions", limit=1, **({} if page is None else {"page": page}))
                starts += [bucket["start_time"] for bucket in found["data"]]
                page = found["next_page"]
            assert starts == [midnight(day(ago)) for ago in (2, 1, 0)] and page is None
            answer = await site.client.get(
                "/v1/organization/usage/completions",
                params={"start_time": midnight(day(2))},
                headers={"x-tenant": "nobody"},
            )
            assert all(bucket["results"] == [] for bucket in answer.json()["data"])

    asyncio.run(steps())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"bucket_width": "1m"}, "bucket_width"),
        ({"limit": "32"}, "limit"),
        ({"limit": "0"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"group_by": "project_id"}, "group_by"),
        ({"batch": "maybe"}, "batch"),
        ({"page": "x"}, "page"),
        ({"page": "1"}, "page"),
        ({"end_time": "1"}, "end_time"),
        ({"start_time": "-1"}, "start_time"),
        ({"start_time": "99999999999999999999"}, "start_time"),
        ({"models": ["m"] * 101}, "models"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path: Path, query: dict[str, Any], param: str) -> None:
    async def steps() -> None:
        async with api_service(tmp_path, NOBODY) as site:
            error = (await asked(site, "usage/completions", 400, **query))["error"]
            assert error["param"] == param and error["type"] == "invalid_request_error"

    asyncio.run(steps())
