"""The market: what can be rented, why the rest is not, and how often anybody is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.market_offers import H100, L4, NOW, T4, FakeProvider

from gpu_runner.models.model_config import ModelConfig
from gpu_runner.offers.offer import OfferFilter, Ranking
from gpu_runner.offers.speed import GIB, LengthMix, Measurement, ModelFacts
from gpu_runner.providers.base import ProviderError, ProviderUnclear
from resources.pricing.market import OFFERS_SECONDS, PRICES_SECONDS, RETRY_SECONDS, Market
from resources.pricing.model_catalog import DeclaredModel, Models
from resources.pricing.sources import PricingConfig

MIX = LengthMix(300, 500)
MODEL = "meta-llama/Llama-3.1-8B"


class Clock:
    """Unix seconds that move only when told."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def offline(name: str) -> ModelConfig:
    raise AssertionError(f"the hub was asked for {name}")


def market(*providers: FakeProvider, clock: Clock | None = None, prices: PricingConfig | None = None) -> Market:
    return Market(providers, prices or PricingConfig(), models=Models(read=offline), clock=clock or Clock())


def ask(there: Market, model: str = MODEL, **more: object) -> Ranking:
    return there.ranking(model, "chat", MIX, 1e8, **more)


def reasons(ranking: Ranking) -> dict[str, str]:
    return {one.offer.name: one.reason for one in ranking.refused}


@pytest.fixture
def price_list(tmp_path: Path) -> Path:
    file = tmp_path / "prices.yaml"
    file.write_text(
        "offers:\n"
        "  - {provider: Elsewhere, instance_type: big, gpu: H100, price_per_hour: 1.5}\n"
        "  - {provider: North, instance_type: h100.1x, region: eu, gpu: H100, price_per_hour: 2.0}\n"
    )
    return file


# ranking


def test_every_offer_is_either_ranked_or_refused_with_a_reason() -> None:
    found = ask(market(FakeProvider("north", [H100, L4, T4])))
    assert [one.offer for one in found.ranked] == [H100, L4]
    assert reasons(found) == {"north/eu/t4.1x": f"T4 has no bfloat16, in which {MODEL} is served"}
    large = ask(market(FakeProvider("north", [H100, L4])), "meta-llama/Llama-3.1-70B")
    assert all("does not fit: with a row of 800 tokens" in one.reason for one in large.refused)


def test_filters_and_objectives_are_the_datasets() -> None:
    there = market(FakeProvider("north", [H100, L4]))
    assert ask(there, objective="fastest").objective == "fastest"
    found = ask(there, accept=OfferFilter(gpus=frozenset({"l4"}), max_price_per_hour=0.5))
    assert not found.ranked
    assert reasons(found) == {
        "north/eu/h100.1x": "GPU H100 is not among l4; price 2.50 $/h is above 0.50",
        "north/eu/l4.1x": "price 0.60 $/h is above 0.50",
    }


def test_a_measured_speed_beats_the_estimate_and_what_sizing_thinks() -> None:
    there = market(FakeProvider("north", [H100, T4]))
    measured = [Measurement(MODEL, "T4", 16, 1, MIX, 9e6, 900.0)]
    found = {one.offer.gpu: one.speed for one in ask(there, measurements=measured).ranked}
    assert (found["T4"].tokens_per_second, found["T4"].basis) == (10_000, "measured")
    assert found["H100"].basis == "estimate"


def test_the_longest_row_must_fit() -> None:
    there = market(FakeProvider("north", [H100, L4]))
    assert len(ask(there, longest=4000).ranked) == 2
    assert "a row of 100,000 tokens" in reasons(ask(there, longest=100_000))["north/eu/l4.1x"]
    assert len(ask(there, longest=100_000, max_model_len=4096).ranked) == 2


def test_an_embedding_has_no_completion() -> None:
    there = market(FakeProvider("north", [H100]))
    (found,) = there.ranking(MODEL, "embedding", MIX, 1e8).ranked
    (same,) = there.ranking(MODEL, "embedding", LengthMix(300, 0), 1e8).ranked
    assert found.speed == same.speed


def test_the_placement_is_the_one_that_was_ranked() -> None:
    eight = replace(H100, instance_type="h100.8x", gpus=8, price_per_hour=20.0)
    there = market(FakeProvider("north", [eight]))
    placed = there.placement(eight, "meta-llama/Llama-3.1-70B", "chat", MIX, longest=4000)
    assert placed is not None
    assert (placed.tensor_parallel, placed.engines) == (4, 2)
    assert there.placement(T4, MODEL, "chat", MIX) is None


# price lists


def test_offers_without_a_configured_provider_are_shown_and_refused(price_list: Path) -> None:
    there = market(FakeProvider("north", [H100]), prices=PricingConfig(lists=[price_list]))
    found = ask(there)
    assert [one.offer for one in found.ranked] == [H100]
    assert [(one.offer.name, one.offer.price_per_hour, one.reason) for one in found.refused] == [
        ("elsewhere/big", 1.5, "no provider configured for elsewhere"),
        ("north/eu/h100.1x", 2.0, "from prices.yaml: only what north itself offers can be rented"),
    ]


def test_a_refusal_holds_every_reason(price_list: Path) -> None:
    there = market(FakeProvider("north", [H100]), prices=PricingConfig(lists=[price_list]))
    found = ask(there, accept=OfferFilter(providers=frozenset({"north"}), max_price_per_hour=1.0))
    assert reasons(found)["elsewhere/big"] == (
        "no provider configured for elsewhere; provider elsewhere is not among north; price 1.50 $/h is above 1.00"
    )


def test_stale_and_absurd_prices_are_refused_and_said() -> None:
    cards = [replace(H100, instance_type=f"h{i}", price_per_hour=2.0 + i / 10) for i in range(3)]
    odd = [
        replace(H100, instance_type="free", price_per_hour=0.0),
        replace(H100, instance_type="gold", price_per_hour=400.0),
        replace(H100, instance_type="old", observed_at=NOW - 30 * 86400),
    ]
    found = ask(market(FakeProvider("north", [*cards, *odd])))
    assert len(found.ranked) == 3
    said = reasons(found)
    assert "expected more than 0 $/h, found 0" in said["north/eu/free"]
    assert "400 $/h per GPU, the median of H100 is" in said["north/eu/gold"]
    assert said["north/eu/old"] == "price is 30.0 days old, 7 allowed"


def test_price_lists_help_to_see_an_absurd_price_of_a_provider(tmp_path: Path) -> None:
    lines = "".join(f"  - {{provider: p{i}, gpu: H100, price_per_hour: {2 + i / 10}}}\n" for i in range(3))
    (tmp_path / "prices.yaml").write_text(f"offers:\n{lines}")
    prices = PricingConfig(lists=[Path("prices.yaml")]).below(tmp_path)
    gold = replace(H100, price_per_hour=900.0)
    found = ask(market(FakeProvider("north", [gold]), prices=prices))
    assert not found.ranked
    assert "absurd price" in reasons(found)["north/eu/h100.1x"]


def test_a_broken_price_list_is_a_problem_and_stops_nobody(price_list: Path) -> None:
    clock = Clock()
    there = market(FakeProvider("north", [H100]), prices=PricingConfig(lists=[price_list]), clock=clock)
    assert there.stock().problems == ()
    price_list.write_text("offers: 7")
    clock.now += PRICES_SECONDS
    stock = there.stock()
    assert len(stock.problems) == 1 and "prices.yaml" in stock.problems[0]
    assert stock.offers == (H100,)
    assert {one.offer.provider for one in stock.refused} == {"elsewhere", "north"}  # the list before still counts


# models of which nothing is known


def test_an_unknown_model_is_an_8b_for_simulated_providers_only() -> None:
    sim = replace(H100, provider="sim", source="sim")
    there = market(FakeProvider("north", [H100]), FakeProvider("sim", [sim], clock=60.0))
    found = ask(there, "simulated/tiny")
    assert [one.offer.provider for one in found.ranked] == ["sim"]
    assert "nothing is known of the model: simulated/tiny: expected a folder" in reasons(found)["north/eu/h100.1x"]
    assert "hardware.model_facts" in reasons(found)["north/eu/h100.1x"]


def test_declared_facts_make_an_unknown_model_rentable() -> None:
    facts = DeclaredModel(ModelFacts("our-model", 15 * GIB, 8e9, 131_072.0), 8192)
    found = ask(market(FakeProvider("north", [H100, T4])), "our-model", declared=facts)
    assert [one.offer for one in found.ranked] == [H100]


def test_a_measured_model_needs_no_facts() -> None:
    measured = [Measurement("our-model", "H100", 80, 1, MIX, 9e6, 900.0)]
    found = ask(market(FakeProvider("north", [H100, L4])), "our-model", measurements=measured)
    assert [one.offer for one in found.ranked] == [H100]


def test_the_hub_is_not_asked_for_simulated_providers_alone() -> None:
    sim = FakeProvider("sim", [replace(H100, provider="sim")], clock=60.0)
    assert "not to be asked" in market(sim).model("our/finetune").where


# silence and repetition


@pytest.mark.parametrize("failure", [ProviderError("rate limit"), ProviderUnclear("time-out")])
def test_a_silent_provider_is_said_and_its_last_offers_are_refused(failure: Exception) -> None:
    clock = Clock()
    north, south = FakeProvider("north", [H100]), FakeProvider("south", [replace(L4, provider="south")])
    there = market(north, south, clock=clock)
    assert len(ask(there).ranked) == 2
    north.failure = failure
    clock.now += OFFERS_SECONDS
    found = ask(there)
    assert [one.offer.provider for one in found.ranked] == ["south"]
    assert reasons(found) == {"north/eu/h100.1x": f"north does not answer: {failure}"}
    assert there.stock().problems == (f"north does not say what it offers: {failure}",)
    north.failure = None
    clock.now += RETRY_SECONDS
    assert len(ask(there).ranked) == 2


def test_providers_are_asked_every_two_seconds_and_silent_ones_less_often() -> None:
    clock = Clock()
    north = FakeProvider("north", [H100])
    there = market(north, clock=clock)
    for _ in range(10):
        ask(there)
    assert north.asked == 1
    clock.now += OFFERS_SECONDS
    north.listed = [replace(H100, price_per_hour=1.0)]
    assert ask(there).ranked[0].offer.price_per_hour == 1.0
    north.failure = ProviderUnclear("time-out")
    for _ in range(5):
        clock.now += OFFERS_SECONDS
        ask(there)
    assert north.asked == 3


def test_a_clock_that_was_set_back_makes_nothing_eternal() -> None:
    clock = Clock()
    north = FakeProvider("north", [H100])
    there = market(north, clock=clock)
    ask(there)
    clock.now -= 3600
    ask(there)
    assert north.asked == 2
