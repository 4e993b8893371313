"""Pricing: gpuhunt's catalogs, private price lists, recorded history, and what their errors say."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.market_offers import speed_of

from gpu_runner.offers.offer import BELIEVABLE, DAY, Offer, OfferFilter, Refusal, Sanity, rank, screen
from gpu_runner.offers.speed import LengthMix, ModelFacts, Throughput
from resources.pricing.price_files import PricingError
from resources.pricing.sources import (
    CATALOG_DIR,
    Conduct,
    GpuhuntSource,
    PriceHistory,
    PriceList,
    PricingConfig,
    Source,
)

PRICES = Path(__file__).parents[2] / "fixtures" / "prices"
SHARED = Path(__file__).parents[4] / "shared" / "data" / "prices" / "history.csv"


def moment(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


def prices(offers: list[Offer]) -> dict[str, float]:
    return {offer.name: offer.price_per_hour for offer in offers}


# gpuhunt


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "catalog"
    shutil.copytree(PRICES / "catalog", folder)
    monkeypatch.setenv(CATALOG_DIR, str(folder))
    return folder


def test_gpuhunt_offline_gives_every_gpu_offer_of_the_folder(catalog: Path) -> None:
    found = GpuhuntSource().offers(0)
    assert prices(found) == {
        "aws/us-east-1/g6.xlarge": 0.80,
        "aws/us-east-1/g6.xlarge spot": 0.35,
        "aws/us-east-1/p5.48xlarge": 55.04,
        "lambdalabs/us-west-1/gpu_1x_h100_pcie": 2.49,
        "lambdalabs/us-west-1/gpu_1x_h100_sxm5": 3.29,
    }
    assert [offer.gpu for offer in found] == ["L4", "L4", "H100", "H100PCIe", "H100"]
    assert prices(GpuhuntSource(("lambdalabs",)).offers(0)).keys() == {
        "lambdalabs/us-west-1/gpu_1x_h100_pcie",
        "lambdalabs/us-west-1/gpu_1x_h100_sxm5",
    }


def collect_offers(
    sources: Iterable[Source], now: float, sanity: Sanity = BELIEVABLE
) -> tuple[list[Offer], list[Refusal]]:
    """Offers of all sources with a believable price, and the refused ones with the reason."""
    return screen([offer for source in sources for offer in source.offers(now)], now, sanity)


def test_an_offline_catalog_is_as_old_as_its_file(catalog: Path) -> None:
    now = time.time()
    os.utime(catalog / "aws.csv", (now - 30 * DAY, now - 30 * DAY))
    kept, refused = collect_offers([GpuhuntSource()], now)
    assert {offer.provider for offer in kept} == {"lambdalabs"}
    assert {(one.offer.provider, one.reason) for one in refused} == {("aws", "price is 30.0 days old, 7 allowed")}


def test_a_provider_without_its_file_is_an_error(catalog: Path) -> None:
    with pytest.raises(PricingError, match=r"expected gcp\.csv, found none"):
        GpuhuntSource(("aws", "gcp")).offers(0)


def test_a_catalog_of_a_provider_that_gpuhunt_does_not_know_is_an_error(catalog: Path) -> None:
    shutil.copy(catalog / "aws.csv", catalog / "ours.csv")
    with pytest.raises(PricingError, match=r"ours\.csv: Unknown provider: ours\. Other providers belong"):
        GpuhuntSource().offers(0)


def test_a_catalog_with_other_columns_is_an_error(catalog: Path) -> None:
    (catalog / "aws.csv").write_text("name,price\nx,1\n")
    with pytest.raises(PricingError, match=r"aws\.csv, line 1: expected the columns gpu_count, .* found name, price"):
        GpuhuntSource().offers(0)


def test_a_folder_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CATALOG_DIR, "/nowhere")
    with pytest.raises(PricingError, match="GPUHUNT_CATALOG_DIR=/nowhere: expected a folder"):
        GpuhuntSource().offers(0)


class _Published:
    """A stand-in for gpuhunt's download: items under a version, a failure, or no answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import gpuhunt
        from gpuhunt._internal.catalog import ProviderCatalog

        self.loads: list[str | None] = []
        self.failure: Exception | None = None
        self.wait = 0.0
        item = gpuhunt.CatalogItem(
            "aws", "g6.xlarge", "us-east-1", 0.8, 4, 16, 1, "L4", 24, False, None, gpuhunt.AcceleratorVendor.NVIDIA
        )

        def load(catalog: gpuhunt.Catalog, version: str | None = None) -> None:
            self.loads.append(version)
            time.sleep(self.wait)
            if self.failure:
                raise self.failure
            catalog.catalog["aws"] = ProviderCatalog("20260818-42", [item])
            catalog.loaded_at = time.monotonic()

        monkeypatch.setattr(gpuhunt.Catalog, "load", load)
        monkeypatch.delenv(CATALOG_DIR, raising=False)


def test_a_downloaded_catalog_is_dated_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    published = _Published(monkeypatch)
    source = GpuhuntSource(version="20260818-42")
    first = source.offers(0)
    assert prices(first) == {"aws/us-east-1/g6.xlarge": 0.8}
    assert first[0].observed_at == moment("2026-08-18T00:00:00+00:00")
    source.offers(0)
    assert published.loads == ["20260818-42"]


def test_a_failed_download_is_an_error_only_while_there_is_no_earlier_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    published = _Published(monkeypatch)
    source = GpuhuntSource(refresh=0)
    published.failure = OSError("no route")
    with pytest.raises(PricingError, match=r"expected a catalog, found: no route\. Set GPUHUNT_CATALOG_DIR"):
        source.offers(0)
    published.failure = None
    assert source.offers(0)
    published.failure = OSError("no route")
    assert source.offers(0) and source.offers(0)
    assert len(published.loads) == 3
    assert "the earlier catalog stays in use" in caplog.text


def test_a_download_without_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    published = _Published(monkeypatch)
    published.wait = 0.5
    with pytest.raises(PricingError, match=r"no answer within 0\.05 s"):
        GpuhuntSource(seconds=0.05).offers(0)


def test_gpuhunt_is_imported_only_where_it_is_asked() -> None:
    code = "import sys, resources.pricing.sources; print('gpuhunt' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "False\n"


# private price lists


def test_a_private_list_is_filled_up_from_datasheet_and_conduct() -> None:
    now = moment("2026-03-02T00:00:00+00:00")
    source = PriceList(PRICES / "private.yaml", {"our-cluster": Conduct(boot_seconds=90, reliability=0.97)})
    node, card = source.offers(now)
    assert node == Offer(
        provider="our-cluster",
        region="rack 3",
        instance_type="h200-node",
        gpu="H200",
        gpus=8,
        gpu_memory_gib=141,
        spot=False,
        price_per_hour=14.5,
        boot_seconds=40,
        reliability=0.999,
        observed_at=now,
        source="private.yaml",
        capacity=2,
    )
    assert (card.gpu, card.gpus, card.gpu_memory_gib) == ("A6000", 1, 48)
    assert (card.boot_seconds, card.reliability) == (90, 0.97)
    assert card.observed_at == moment("2026-03-01T09:00:00+00:00")


def test_a_list_may_be_csv(tmp_path: Path) -> None:
    path = tmp_path / "ours.csv"
    path.write_text("provider,gpu,gpus,spot,price_per_hour,capacity\nus,A100 (40GB),2,true,1.5,\nus,L4,,,0.3,4\n")
    first, second = PriceList(path).offers(0)
    assert (first.gpu, first.gpu_memory_gib, first.gpus, first.spot, first.capacity) == ("A100", 40, 2, True, None)
    assert first.reliability < second.reliability
    assert (second.gpus, second.spot, second.capacity) == (1, False, 4)


YAML_ERRORS = {
    "offers:\n  - provider: us\n    gpu: L4\n    gpus: two\n    price_per_hour: 1\n": (
        "{path}, line 4: gpus: expected a whole number of GPUs, 1 or more, found 'two'"
    ),
    "offers:\n  - provider: us\n    gpu: L4\n": (
        "{path}, line 2: price_per_hour: expected US dollars per hour for the whole instance, found nothing"
    ),
    "offers:\n  - provider: us\n    gpu: L4\n    price_per_hour: 1\n    observed_at: 2026-03-01T09:00:00\n": (
        "{path}, line 5: observed_at: expected a time with its zone, 2026-08-18T12:00:00Z, found '2026-03-01T09:00:00'"
    ),
    "offers:\n  - L4\n": "{path}, line 2: expected a mapping of fields, found 'L4'",
    "offers: 3\n": "{path}: expected one key `offers` with a list, found keys offers, offers: int",
    "prices: []\n": "{path}: expected one key `offers` with a list, found keys prices",
    "": "{path}: expected one key `offers` with a list, found NoneType",
    "offers: [\n": "{path}, line 2, column 1: expected YAML, a value, found none",
}


@pytest.mark.parametrize("text", YAML_ERRORS)
def test_an_error_in_a_list_names_file_line_expected_and_found(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(text)
    with pytest.raises(PricingError) as caught:
        PriceList(path).offers(0)
    assert str(caught.value) == YAML_ERRORS[text].format(path=path)


def test_all_problems_of_a_list_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ours.csv"
    path.write_text("provider,gpu,price_per_hour,color\nus,L4,dear,red\n,L4,1,\n")
    with pytest.raises(PricingError) as caught:
        PriceList(path).offers(0)
    lines = str(caught.value).splitlines()
    assert (
        lines[0] == f"{path}, line 2: price_per_hour: expected US dollars per hour for the whole instance, found 'dear'"
    )
    assert lines[1].startswith(f"{path}, line 2: expected only provider, region,")
    assert lines[2] == f"{path}, line 3: provider: expected a name, found nothing"


def test_a_csv_line_with_another_number_of_cells_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ours.csv"
    path.write_text("provider,gpu,price_per_hour\nus,L4,1\nus,L4,1,5\n")
    with pytest.raises(PricingError, match="line 3: expected 3 cells, as in the header"):
        PriceList(path).offers(0)


@pytest.mark.parametrize("name", ["none.csv", "none.yaml"])
def test_a_list_that_is_not_there_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(PricingError, match=f"{name}: expected a readable file, found: No such file"):
        PriceList(tmp_path / name).offers(0)


# recorded history


def test_history_gives_the_prices_as_of_a_moment() -> None:
    history = PriceHistory(PRICES / "invented.csv")
    assert history.offers(moment("2026-03-01T08:00:00+00:00")) == []
    assert prices(history.offers(moment("2026-03-02T00:00:00+00:00"))) == {
        "alpha/a100.8x": 20.0,
        "alpha/a100.8x spot": 9.0,
        "alpha/l4.1x": 0.8,
        "alpha/l4.1x spot": 0.3,
        "beta-cloud/1x A100 (80GB), 14 vCPU, 120 GiB": 1.9,
    }
    assert prices(history.offers(moment("2026-03-10T00:00:00+00:00"))) == {
        "alpha/a100.8x": 18.0,
        "beta-cloud/1x A100 (80GB), 14 vCPU, 120 GiB": 1.7,
        "beta-cloud/?x A100": 1.6,
    }


def test_history_is_ordered_by_instant_and_not_by_its_text() -> None:
    times = PriceHistory(PRICES / "invented.csv").times()
    assert times == [
        moment("2026-03-01T09:00:00+00:00"),
        moment("2026-03-01T09:30:00+00:00"),
        moment("2026-03-03T09:00:00+00:00"),
        moment("2026-03-09T09:00:00+00:00"),
    ]


def test_what_history_does_not_know_is_refused_and_said() -> None:
    history = PriceHistory(PRICES / "invented.csv")
    kept, refused = collect_offers([history], moment("2026-03-11T00:00:00+00:00"))
    assert {offer.provider for offer in kept} == {"alpha"}
    assert sorted(one.reason for one in refused) == [
        "number of GPUs unknown; price is 7.6 days old, 7 allowed",
        "price is 7.6 days old, 7 allowed",
    ]


def test_history_with_a_time_without_zone_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    head = (PRICES / "invented.csv").read_text().splitlines()[0]
    path.write_text(f"{head}\n2026-03-01T09:00:00,Alpha,,L4,1,24,,,1,\n")
    with pytest.raises(PricingError, match="line 2: observed_at: expected a time with its zone"):
        PriceHistory(path)


def test_the_sources_of_a_deployment_are_ranked_together(catalog: Path) -> None:
    config = PricingConfig(
        gpuhunt=["lambdalabs"],
        lists=[PRICES / "private.yaml"],
        history=PRICES / "invented.csv",
        max_age_days=3650,
        conduct={"Beta Cloud": Conduct(boot_seconds=1)},
    )
    kept, refused = collect_offers(config.sources(), time.time(), config.sanity())
    assert {offer.source for offer in kept} == {"gpuhunt", "private.yaml", "invented.csv"}
    assert [one.reason for one in refused] == ["number of GPUs unknown"]
    assert {offer.boot_seconds for offer in kept if offer.provider == "beta-cloud"} == {1}
    facts = ModelFacts("llama-8b", 16.06e9, 8.03e9, 131_072)
    ranking = rank(kept, 1e9, speed_of(Throughput(), facts, LengthMix(200, 300)), accept=OfferFilter(spot=True))
    assert ranking.ranked[0].offer.instance_type == "h200-node"
    assert len(ranking.ranked) == len(kept)


# replay of the public history


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED.name}: the shared price history is not here")
def test_the_public_history_replays() -> None:
    history = PriceHistory(SHARED)
    times = history.times()
    assert len(times) == 38
    facts = ModelFacts("llama-8b", 16.06e9, 8.03e9, 131_072)
    speed = speed_of(Throughput(), facts, LengthMix(200, 300))
    best: list[float] = []
    for now in times:
        known = history.offers(now)
        assert all(offer.observed_at <= now for offer in known)
        kept, refused = screen(known, now, Sanity(max_age=30 * DAY))
        ranking = rank(kept, 1e9, speed)
        assert len(ranking.ranked) + len(ranking.refused) + len(refused) == len(known)
        assert all(one.reason for one in (*refused, *ranking.refused))
        best.append(ranking.ranked[0].usd)
    assert 0.5 < min(best) <= max(best) < 1000
    assert len({round(usd, 6) for usd in best}) > 1  # prices moved
    counts = [offer for offer in history.offers(moment("2023-05-24T18:00:00+02:00")) if offer.gpus == 0]
    assert {offer.provider for offer in counts} == {"oblivus-cloud"}


@pytest.mark.slow
def test_prices_that_cannot_be_downloaded_are_one_error_without_a_traceback():
    code = (
        "from resources.pricing.price_files import PricingError\n"
        "from resources.pricing.sources import GpuhuntSource\n"
        "try:\n    GpuhuntSource().offers(0.0)\n"
        "except PricingError as error:\n    print(error)\n"
    )
    with socket.socket() as nobody:  # bound, not listening: connections are refused
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        environment = {**os.environ, "https_proxy": dead, "http_proxy": dead, "no_proxy": ""}
        environment.pop("GPUHUNT_CATALOG_DIR", None)
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("gpuhunt: expected a catalog, found: ")
    assert "Traceback" not in done.stderr
