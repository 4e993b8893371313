"""Prices by the token: in fleet.yaml, with an address of the command line, and how they are planned."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_runner.fleet_database.database import FleetDatabase, Lease
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.offers.offer import Offer, RankedOffer
from gpu_runner.offers.speed import LengthMix, Speed
from gpu_runner.offers.workload import Workload
from gpu_runner.token_price import TokenPrice
from resources.endpoints import allow
from resources.fleet.client import FleetClient
from resources.fleet.fleet_config import FleetConfig, FleetConfigError
from resources.fleet.hosted_engines import hosted_engines, hosted_offers, hosted_options, weigh_batches
from resources.fleet.leased_engine import LeasedEngine, Requirement, StaticEngine
from resources.pricing.market import Market
from resources.pricing.token_prices import TokenPriceConfig, parse_token_price

URL = "http://127.0.0.1:9"
WORK = Workload(1000, 1000, LengthMix(100, 300), 1200, "measured", "measured", (), 1000)


def load(home: Path, *engines: dict[str, Any]) -> FleetConfig:
    (home / "fleet.yaml").write_text(yaml.safe_dump({"engines": list(engines)}))
    return FleetConfig.load(home / "fleet.yaml", home)


def engine(price: object, name: str = "api", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "endpoint", "url": URL, "usd_per_million_tokens": price, **more}


@pytest.mark.parametrize("price", [0.5, {"input": 0.5, "output": 0.5}])
def test_a_price_is_one_number_or_two(tmp_path: Path, price: object) -> None:
    (found,) = load(tmp_path, engine(price)).engines
    assert found.token_price == TokenPrice(0.5, 0.5)
    assert parse_token_price("0.5") == found.usd_per_million_tokens


def test_what_comes_from_the_cache_has_a_price_of_its_own(tmp_path: Path) -> None:
    (found,) = load(tmp_path, engine({"input": 2, "output": 8, "cached": 0.5})).engines
    assert found.token_price == TokenPrice(2, 8, 0.5)
    assert parse_token_price("2,8,0.5") == found.usd_per_million_tokens
    with pytest.raises(
        FleetConfigError, match=r"usd_per_million_tokens\.cached: expected at most input \(2\), found 3"
    ):
        load(tmp_path, engine({"input": 2, "output": 8, "cached": 3}))
    for wrong in ("2,8,3", "2,8,1,1", "2,8,-1", "2,8,nan", "2,8,"):
        with pytest.raises(ValueError, match="a third, at most the first"):
            parse_token_price(wrong)
    assert WORK.usd(TokenPrice(2, 8, 0.5)) == WORK.usd(TokenPrice(2, 8)), "a plan counts on no cache"


@pytest.mark.parametrize(
    "wrong", [engine(-1), engine({"input": 1}), engine("free"), {"name": "p", "kind": "process", **engine(1, url=None)}]
)
def test_a_price_that_cannot_be_is_an_error_of_the_file(tmp_path: Path, wrong: dict[str, Any]) -> None:
    kind = {"kind": "process"} if wrong["url"] is None else {}
    with pytest.raises(FleetConfigError, match="usd_per_million_tokens"):
        load(tmp_path, {name: value for name, value in {**wrong, **kind}.items() if value is not None})


def test_an_address_of_the_command_line_keeps_its_price_and_has_that_of_fleet_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_ASSETS_API_KEY", "secret")
    config = load(tmp_path, engine(2.0))
    allow(tmp_path, URL, "secret")
    (found,) = config.engines_for("m", URL)
    assert (found.token_price, found.api_key_env) == (TokenPrice(2.0, 2.0), "BATCH_ASSETS_API_KEY")
    allow(tmp_path, URL, "secret", TokenPriceConfig(input=0.1, output=0.4))
    allow(tmp_path, URL, "secret")  # a later run says nothing of it
    (found,) = config.engines_for("m", URL)
    assert found.token_price == TokenPrice(0.1, 0.4)


def test_an_address_that_is_given_with_a_key_keeps_the_name_and_the_limits_that_fleet_yaml_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_ASSETS_API_KEY", "secret")
    config = load(tmp_path, engine(2.0, api_key_env="K", timeout=77, concurrency=2, requests_per_minute=60))
    allow(tmp_path, URL, "secret")
    (found,) = config.engines_for("m", URL)
    assert found == config.engines[0].model_copy(update={"api_key_env": "BATCH_ASSETS_API_KEY"})


def test_an_address_that_is_given_without_a_key_keeps_the_key_that_fleet_yaml_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATCH_ASSETS_API_KEY", raising=False)
    config = load(tmp_path, engine(2.0, api_key_env="K", timeout=77))
    allow(tmp_path, URL, None)
    assert list(config.engines_for("m", URL)) == config.engines  # run --endpoint
    monkeypatch.setenv("BATCH_ASSETS_ENDPOINT", URL)
    assert list(config.engines_for("m", URL)) == config.engines


@pytest.mark.parametrize(
    ("field", "own", "said"),
    [
        ("threads", "llama_cpp", "threads, context: expected for kind llama_cpp only"),
        ("context", "llama_cpp", "threads, context: expected for kind llama_cpp only"),
        (
            "usd_per_million_tokens",
            "endpoint",
            "usd_per_million_tokens: expected for kind endpoint or batch_api, and for no other",
        ),
        *(
            (field, "endpoint", "concurrency, requests_per_minute, tokens_per_minute: expected for kind endpoint only")
            for field in ("concurrency", "requests_per_minute", "tokens_per_minute")
        ),
    ],
)
def test_a_field_of_one_kind_is_refused_for_every_other(tmp_path: Path, field: str, own: str, said: str) -> None:
    needed = {"endpoint": {"url": URL}, "llama_cpp": {"gguf": "m.gguf", "models": ["m"]}}
    for kind in ("simulated", "process", "llama_cpp", "endpoint"):
        given = {"name": "e", "kind": kind, field: 64, **needed.get(kind, {})}
        if kind == own:
            assert getattr(load(tmp_path, given).engines[0], field) is not None
        else:
            with pytest.raises(FleetConfigError) as refused:
                load(tmp_path, given)
            assert str(refused.value) == f"{tmp_path}/fleet.yaml: engines.0: {said} (line 2)"


BATCH: dict[str, Any] = {"name": "b", "kind": "batch_api", "url": URL, "usd_per_million_tokens": 0.5}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({**BATCH, "usd_per_million_tokens": None}, "usd_per_million_tokens: expected for kind batch_api, which"),
        ({**BATCH, "batch": {"completion_window": "1 day"}}, r"batch\.completion_window: expected"),
        ({**BATCH, "batch": {"max_request": 5}}, r"batch\.max_request: expected"),
        ({**BATCH, "url": None}, "url: expected for kind endpoint or batch_api"),
        ({**engine(1.0), "batch": {"completion_window": "7d"}}, "batch: expected for kind batch_api only"),
    ],
)
def test_a_batch_api_says_what_is_missing(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(FleetConfigError, match=said):
        load(tmp_path, {name: value for name, value in given.items() if value is not None})


def test_a_batch_api_takes_as_long_as_its_window_and_costs_its_tokens(tmp_path: Path) -> None:
    config = load(tmp_path, {**BATCH, "batch": {"completion_window": "2h", "max_requests_per_batch": 700}})
    limits = config.engines[0].limits.batches
    assert limits is not None and (limits.window_seconds, limits.max_requests) == (7200, 700)
    assert config.may_serve("m") and not config.may_serve("m", batches=False)
    (option,) = hosted_options(hosted_engines(config, "m", None), WORK, {"b": Speed(5.0, "measured")})
    assert WORK.tokens / option.tokens_per_second == pytest.approx(7200)
    assert option.usd_per_hour * 2 == pytest.approx(WORK.tokens * 0.5 / 1e6)


def rented(usd: float, seconds: float) -> RankedOffer:
    offer = Offer("gpus", "eu", "h100", "H100", 1, 80.0, False, 2.0, 60.0, 0.99, 0.0, "test")
    return RankedOffer(offer, Speed(1000.0, "measured"), seconds, usd)


HOUR = 3600.0


@pytest.mark.parametrize(
    ("deadline", "offers", "more", "taken", "why"),
    [
        (None, [], {}, True, "nothing else can be had"),
        (None, [rented(1.0, HOUR)], {}, True, "its tokens cost 0.20 $, gpus/eu/h100 1.00 $"),
        (None, [rented(0.1, HOUR)], {}, False, "its tokens cost 0.20 $, gpus/eu/h100 0.10 $"),
        (30 * HOUR, [rented(1.0, HOUR)], {}, True, "its window of 24h fits the 30 h that are left"),
        (5 * HOUR, [rented(1.0, HOUR)], {}, False, "its window of 24h is longer than the 5 h that are left"),
        (25 * HOUR, [rented(1.0, HOUR)], {}, False, "is longer than the 25 h"),
        (10 * HOUR, [rented(1.0, HOUR)], {"sent_ago": 20 * HOUR}, True, "fits the 10 h that are left"),
        (1 * HOUR, [rented(1.0, HOUR)], {"sent_ago": 29 * HOUR}, False, "the 1 h that are left are needed to do"),
        (None, [rented(1.0, HOUR)], {"objective": "fastest"}, False, "the fastest is wanted"),
    ],
)
def test_a_batch_api_is_weighed_against_what_can_be_rented(
    tmp_path: Path, deadline: float | None, offers: list[RankedOffer], more: dict[str, Any], taken: bool, why: str
) -> None:
    (api,) = load(tmp_path, BATCH).engines
    given: dict[str, Any] = {"objective": "cheapest", **more}
    found = weigh_batches(api, WORK, deadline_in=deadline, rivals=[], rented=offers, **given)
    assert (found.taken, found.elsewhere) == (taken, bool(offers)) and why in found.describe()


def test_a_batch_api_is_weighed_against_engines_of_the_file_and_by_all_its_rounds(tmp_path: Path) -> None:
    batch = {**BATCH, "batch": {"max_requests_per_batch": 100, "max_open_batches": 2}}
    api, dear, free = load(tmp_path, batch, engine(2.0), {"name": "own", "kind": "endpoint", "url": URL}).engines
    given: dict[str, Any] = {"objective": "cheapest", "rented": ()}
    assert weigh_batches(api, WORK, deadline_in=None, rivals=[dear], **given).taken
    assert not weigh_batches(api, WORK, deadline_in=None, rivals=[dear, free], **given).taken
    late = weigh_batches(api, WORK, deadline_in=100 * HOUR, rivals=[dear], **given)  # 1,000 rows in rounds of 200
    assert not late.taken and "24h × 5 is longer" in late.why


def test_a_run_leaves_a_batch_api_whose_window_passes_the_deadline_where_it_has_another_engine(tmp_path: Path) -> None:
    batch_api, other = {**BATCH, "name": "b"}, engine(2.0)

    def late(dataset: str, hours: float, *engines: dict[str, Any], held: int = 0) -> str | None:
        config = load(tmp_path, *engines)
        fleet_db.begin_request(dataset, "r", deadline_at=fleet_db.now() + hours * HOUR)
        heartbeat = Heartbeat(fleet_db, "run", ttl=60)
        client = FleetClient(config, {}, Market(()), fleet_db, heartbeat, lambda *_: pytest.fail("nothing starts"))
        need = Requirement(dataset, "m", "chat", batches=True, work=lambda: WORK)
        one = config.engines[held]
        lease = Lease(one.name, 1, "run", dataset)
        leased = LeasedEngine(URL, None, None, one.name, one.kind, limits=one.limits, lease=lease)
        return client.look_for_dataset(need, leased).late

    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db:
        assert late("tomorrow", 30, batch_api, other) is None
        assert "its window of 24h is longer than the 1 h that are left" in (late("soon", 1, batch_api, other) or "")
        assert late("alone", 1, batch_api) is None
        assert late("other", 1, batch_api, other, held=1) is None


def test_the_earlier_name_of_the_time_out_of_a_request_is_understood(tmp_path: Path) -> None:
    (found,) = load(tmp_path, engine(1.0, request_seconds=90)).engines
    assert found.timeout == 90
    with pytest.raises(FleetConfigError, match="request_seconds"):
        load(tmp_path, engine(1.0, request_seconds=90, timeout=80))


def test_the_cost_of_the_work_is_that_of_its_tokens_whatever_the_speed(tmp_path: Path) -> None:
    engines = hosted_engines(load(tmp_path, engine({"input": 1.0, "output": 2.0})), "m", None)
    for speeds in ({}, {"api": Speed(50.0, "measured")}):
        (option,), (offer,) = hosted_options(engines, WORK, speeds), hosted_offers(engines, WORK, speeds, 0.0)
        assert option.usd_per_token * WORK.tokens == pytest.approx(WORK.usd(TokenPrice(1.0, 2.0))) == pytest.approx(0.7)
        assert offer.usd == pytest.approx(0.7) and offer.usd_per_million_tokens == pytest.approx(1.75)
        assert option.row_usd == pytest.approx((1.25 * 200 + 32 + 2 * 1000) / 1e6)


def test_where_one_engine_has_no_price_none_is_counted_with(tmp_path: Path) -> None:
    free = {"name": "lab", "kind": "endpoint", "url": "http://127.0.0.1:10"}
    assert hosted_engines(load(tmp_path, free, engine(1.0)), "m", None) == ()


def test_what_an_engine_without_a_price_did_is_kept_as_it_says_how_fast_it_is(tmp_path: Path) -> None:
    config = load(tmp_path, {"name": "lab", "kind": "endpoint", "url": URL})
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db:
        heartbeat = Heartbeat(fleet_db, "run", ttl=60)
        fleet_db.begin_run("run", "d", "00000", "00009")
        client = FleetClient(config, {}, Market(()), fleet_db, heartbeat, lambda one, *_: StaticEngine(str(one.url)))
        fleet_db.begin_request("d", "r")
        need = Requirement("d", "m", "chat", work=lambda: WORK)
        leased = client.acquire(need, say=lambda _: None, pause=lambda _: pytest.fail("it is free"))
        leased.spending.begin(100.0)
        assert leased.spending.settle(100, 300, 0, 102.0) is None
        client.release(leased)
        found = fleet_db.engine_speeds(["lab"], "d")["lab"]
        assert (found.tokens_per_second, found.rows) == (200.0, 1)
        assert fleet_db.costs() == [], "it costs nothing"
