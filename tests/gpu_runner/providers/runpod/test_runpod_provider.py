"""RunPod as a provider, against a server of its shape: names are single without a token, whatever is lost or late."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.fake_runpod import GPU, FakeRunPod, fake_runpod
from support.machines import ORDER, first_offer

from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.reaper import sweep
from gpu_runner.offers.offer import Offer
from gpu_runner.providers.base import NoCapacity, ProviderError, ProviderUnclear
from gpu_runner.providers.checks import CheckOutcome, CheckSubject
from gpu_runner.providers.cloud.ordered_once import SETTLE_SECONDS
from gpu_runner.providers.runpod.provider import RunPodProvider, https_proxy


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FakeRunPod]:
    with fake_runpod(tmp_path) as made:
        yield made


def ordered_without_an_answer(site: FakeRunPod) -> tuple[RunPodProvider, Offer]:
    provider = site.provider()
    offer = first_offer(provider)
    site.fault("lost_reply", "create")
    with pytest.raises(ProviderUnclear):
        provider.create(offer, "ba-1", ORDER)
    return provider, offer


def test_a_lost_reply_and_its_repeat_are_one_pod(site: FakeRunPod):
    provider, offer = ordered_without_an_answer(site)
    assert provider.create(offer, "ba-1", ORDER) == site.pods[0].id
    assert len(site.pods) == 1


def test_a_pod_that_no_list_shows_yet_is_not_ordered_again(site: FakeRunPod):
    site.lag_seconds = 10
    provider = site.provider()
    offer = first_offer(provider)
    site.fault("lost_reply", "create")
    for _ in range(2):
        with pytest.raises(ProviderUnclear):
            site.provider().create(offer, "ba-1", ORDER)
    site.skip(11)
    assert site.provider().create(offer, "ba-1", ORDER) == site.pods[0].id
    assert len(site.pods) == 1


def test_an_order_that_was_never_taken_is_sent_again_once_lists_have_settled(site: FakeRunPod):
    provider = site.provider()
    offer = first_offer(provider)
    site.fault("time_out", "create")
    with pytest.raises(ProviderUnclear):
        provider.create(offer, "ba-1", ORDER)
    with pytest.raises(ProviderUnclear, match="may still be listed"):
        provider.create(offer, "ba-1", ORDER)
    site.skip(SETTLE_SECONDS)
    assert provider.create(offer, "ba-1", ORDER) == site.pods[0].id


def test_a_list_that_settles_too_late_gives_two_pods_of_which_the_older_stays(site: FakeRunPod):
    site.lag_seconds = SETTLE_SECONDS * 2
    provider, offer = ordered_without_an_answer(site)
    site.skip(SETTLE_SECONDS + 1)
    provider.create(offer, "ba-1", ORDER)
    older, younger = site.named("ba-1")
    site.skip(SETTLE_SECONDS * 2)
    assert [one.id for one in provider.list("ba-")] == [older.id]
    assert younger.ended_at is not None and older.ended_at is None
    provider.terminate("ba-1")
    assert not site.running()


def test_a_late_list_does_not_make_a_second_pod_of_orders_at_once(site: FakeRunPod):
    site.lag_seconds = 60
    offer = first_offer(site.provider())
    with ThreadPoolExecutor(6) as pool:
        ids = list(pool.map(lambda _: site.provider().create(offer, "ba-1", ORDER), range(6)))
    assert ids == [site.pods[0].id] * 6
    assert len(site.pods) == 1


@pytest.mark.parametrize(("kind", "raised"), [("error", ProviderError), ("no_capacity", NoCapacity)])
def test_a_refusal_is_certain_and_the_name_may_be_ordered_at_once(site: FakeRunPod, kind: str, raised: type[Exception]):
    provider = site.provider()
    offer = first_offer(provider)
    site.fault(kind, "create")
    with pytest.raises(raised):
        provider.create(offer, "ba-1", ORDER)
    assert not site.pods
    provider.create(offer, "ba-1", ORDER)


@pytest.mark.parametrize(("kind", "raised"), [("error", ProviderError), ("time_out", ProviderUnclear)])
def test_a_list_without_an_answer_orders_nothing(site: FakeRunPod, kind: str, raised: type[Exception]):
    provider = site.provider()
    offer = first_offer(provider)
    site.fault(kind, "list")
    with pytest.raises(raised):
        provider.create(offer, "ba-1", ORDER)
    assert site.calls == ["list"] and not site.pods


def test_an_end_that_was_accepted_and_not_done_is_not_believed(site: FakeRunPod):
    provider = site.provider()
    provider.create(first_offer(provider), "ba-1", ORDER)
    site.fault("deaf_terminate")
    provider.terminate("ba-1")
    (machine,) = provider.list("ba-")
    assert machine.state != "ended"
    provider.terminate("ba-1")
    (machine,) = provider.list("ba-")
    assert machine.state == "ended" and not site.running()


def test_a_pod_is_billed_until_the_end_that_was_done(site: FakeRunPod):
    provider = site.provider()
    provider.create(first_offer(provider), "ba-1", ORDER)
    site.fault("deaf_terminate")
    provider.terminate("ba-1")
    site.skip(12)
    provider.terminate("ba-1")
    site.skip(5)
    provider.terminate("ba-1")
    (machine,) = provider.list("ba-")
    assert machine.state == "ended" and machine.ended_seconds == pytest.approx(5, abs=1)


def test_a_pod_that_is_gone_and_still_listed_has_ended_when_it_was_ended(
    site: FakeRunPod, monkeypatch: pytest.MonkeyPatch
):
    provider = site.provider()
    provider.create(first_offer(provider), "ba-1", ORDER)
    behind, now = site.listed(), site.listed
    provider.terminate("ba-1")
    monkeypatch.setattr(site, "listed", lambda: behind)
    site.skip(10)
    provider.terminate("ba-1")
    monkeypatch.setattr(site, "listed", now)
    site.skip(5)
    (machine,) = provider.list("ba-")
    assert machine.state == "ended" and machine.ended_seconds == pytest.approx(15, abs=1)


def test_the_end_of_a_pod_is_known_whose_order_was_not_answered(site: FakeRunPod):
    provider, _ = ordered_without_an_answer(site)
    provider.terminate("ba-1")
    site.skip(5)
    (machine,) = provider.list("ba-")
    assert machine.state == "ended" and machine.ended_seconds == pytest.approx(5, abs=1)
    assert machine.id == site.pods[0].id and not site.running()


def test_an_end_that_was_not_done_is_not_believed_for_one_list_that_is_empty_by_error(site: FakeRunPod):
    provider = site.provider()
    provider.create(first_offer(provider), "ba-1", ORDER)
    site.fault("deaf_terminate")
    provider.terminate("ba-1")
    site.fault("empty_list", "list")
    (machine,) = provider.list("ba-")
    assert machine.state != "ended" and site.running()
    provider.terminate("ba-1")
    (machine,) = provider.list("ba-")
    assert machine.state == "ended" and not site.running()
    before = site.calls.count("list")
    site.skip(61)
    provider.list("ba-")
    assert site.calls.count("list") == before + 1


def test_a_pod_that_is_not_listed_yet_is_ended_by_its_id(site: FakeRunPod):
    site.lag_seconds = 60
    provider = site.provider()
    provider.create(first_offer(provider), "ba-1", ORDER)
    site.provider().terminate("ba-1")
    assert not site.running()


def test_a_pod_that_costs_more_than_its_offer_is_ended_at_once(site: FakeRunPod):
    site.usd_per_hour = 4.0
    provider = site.provider()
    with pytest.raises(NoCapacity, match="costs 4 "):
        provider.create(first_offer(provider), "ba-1", ORDER)
    assert len(site.pods) == 1 and not site.running()


def test_a_pod_is_billed_since_it_was_made_not_since_it_was_listed(site: FakeRunPod, tmp_path: Path):
    provider = site.provider()
    provider.create(first_offer(provider), "ba-1", ORDER)
    site.skip(7)
    (machine,) = provider.list("ba-")
    assert machine.billed_seconds == pytest.approx(7, abs=1)
    provider.terminate("ba-1")
    (machine,) = provider.list("ba-")
    assert machine.billed_seconds is None, "RunPod says nothing of pods that have ended"


def test_the_reaper_ends_an_orphan_and_survives_every_fault_of_a_list(site: FakeRunPod, tmp_path: Path):
    provider = site.provider()
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db:
        name = f"{fleet_db.tag()}lost"
        provider.create(first_offer(provider), name, ORDER)
        provider.create(first_offer(provider), "ba-other", ORDER)
        for kind in ("time_out", "error", "empty_list"):
            site.fault(kind, "list")
            sweep(fleet_db, [provider], tag=fleet_db.tag(), idle_seconds=60)
            assert len(site.running()) == 2
        sweep(fleet_db, [provider], tag=fleet_db.tag(), idle_seconds=60)
    assert [pod.body["name"] for pod in site.running()] == ["ba-other"]


def test_a_pod_is_asked_for_with_its_key_in_the_environment_and_reached_as_configured(site: FakeRunPod):
    provider = site.provider(reach="tcp")
    provider.create(first_offer(provider), "ba-1", ORDER)
    body = site.pods[0].body
    assert body["ports"] == ["8000/tcp"] and body["interruptible"] is False and body["gpuTypeIds"] == ["NVIDIA L40S"]
    machine = provider.wait_ready("ba-1", 20, time.sleep)
    assert machine.endpoint == site.pods[0].engine.url
    access = provider.access("ba-1", machine.endpoint)
    assert access.api_key == body["env"]["VLLM_API_KEY"] and access.api_key not in repr(access)
    assert not any(str(access.api_key) in word for word in body["dockerStartCmd"])
    assert https_proxy("abc123") == "https://abc123-8000.proxy.runpod.net"


def test_prices_of_lists_count_where_fleet_yaml_has_none(site: FakeRunPod):
    own = first_offer(site.provider())

    def listed() -> list[Offer]:
        return [
            replace(own, price_per_hour=usd, spot=spot, source="list")
            for usd, spot in ((1, False), (2, False), (9, True))
        ]

    unpriced = {name: value for name, value in GPU.items() if name != "price_per_hour"}
    (offer,) = site.provider(gpus=[unpriced], listed=listed).offers()
    assert (offer.price_per_hour, offer.source) == (2, "list")
    assert not site.provider(gpus=[unpriced]).offers()


def test_the_key_is_sent_encrypted_only_and_never_said(site: FakeRunPod, monkeypatch: Any):
    with pytest.raises(ValidationError, match="https://"):
        site.provider(api="http://rest.runpod.io/v1")
    for wrong in ("", "two\nlines"):
        monkeypatch.setenv("RUNPOD_API_KEY", wrong)
        with pytest.raises(ProviderError, match="RUNPOD_API_KEY"):
            site.provider().list("ba-")
    monkeypatch.setenv("RUNPOD_API_KEY", "wrong-secret")
    with pytest.raises(ProviderError, match="status 401") as raised:
        site.provider().list("ba-")
    assert "wrong-secret" not in str(raised.value)


def test_check_says_what_is_known_and_what_is_not(site: FakeRunPod, monkeypatch: Any):
    found = {one.subject: one.outcome for one in site.provider().check()}
    assert found == {
        CheckSubject.CREDENTIALS: CheckOutcome.OK,
        CheckSubject.PERMISSIONS: CheckOutcome.WARNING,
        CheckSubject.MACHINES: CheckOutcome.WARNING,
        CheckSubject.PRICES: CheckOutcome.OK,
    }
    assert not site.pods
    monkeypatch.delenv("RUNPOD_API_KEY")
    (failed,) = site.provider().check()
    assert (failed.subject, failed.outcome) == (CheckSubject.CREDENTIALS, CheckOutcome.FAILED)
