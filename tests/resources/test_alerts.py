"""Alerts reach a webhook once each, whatever the webhook does, and its address stays a secret."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from support.webhooks import ANSWERS, SECRET, Webhook, serving

from gpu_runner.fleet_database.capacity_plan import CapacityMemory, memory_to_json, read_memory
from resources.alerts import AGAIN_SECONDS, CALM_SECONDS, Alert, AlertConfig, AlertKind, Alerts, State
from resources.fleet.fleet_config import FleetConfig, FleetConfigError


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving() as found:
        yield found


@dataclass
class Desk:
    """The sensor's side: its clock, its state as it is kept in the fleet's database, and what was logged."""

    config: AlertConfig | None
    now: float = 1e6
    state: State = field(default_factory=dict)
    logged: list[str] = field(default_factory=list)

    def tell(self, *alerts: Alert, after: float = 30) -> list[AlertKind]:
        """One look of a process that knows nothing but the state."""
        self.now += after
        desk = Alerts(self.config, self.state, clock=lambda: self.now, log=self.logged.append)
        told = desk.tell(alerts)
        kept = {dataset: memory_to_json(CapacityMemory(alerts=one)) for dataset, one in desk.state.items()}
        self.state = {dataset: read_memory(text).alerts for dataset, text in kept.items()}
        return [alert.kind for alert in told]


def patient(webhook: Webhook) -> AlertConfig:
    """Waits for the webhook's answer also on a busy machine."""
    return AlertConfig.model_validate({"webhook": webhook.url, "timeout_seconds": 30})


@pytest.fixture
def desk(webhook: Webhook) -> Desk:
    return Desk(patient(webhook))


def alert(kind: AlertKind, dataset: str = "sums", **figures: Any) -> Alert:
    return Alert(kind, dataset, f"{dataset}: {kind}", figures)


def test_an_alert_is_json_with_a_text_that_slack_shows(desk: Desk, webhook: Webhook):
    said = "sums will be late: P95 is 07:30, the deadline 06:00 & nothing is left"
    assert desk.tell(Alert("late", "sums", said, {"p95_seconds": 5400.0, "eta": math.inf, "at": Path("x")})) == ["late"]
    figures = {"p95_seconds": 5400.0, "eta": None, "at": "x"}
    assert webhook.posted == [{"text": said, "kind": "late", "dataset": "sums", "figures": figures}]
    assert webhook.heads[0].startswith(f"POST /services/{SECRET} ")
    assert "Content-Type: application/json" in webhook.heads[0]


def test_a_kind_is_told_once_and_again_after_six_hours_while_it_lasts(desk: Desk):
    assert desk.tell(alert("late")) == ["late"]
    assert [desk.tell(alert("late", p95=i)) for i in range(10)] == [[]] * 10
    assert desk.tell(alert("late"), after=AGAIN_SECONDS) == ["late"]
    assert desk.tell(alert("late")) == []


def test_each_change_of_kind_and_each_dataset_is_told(desk: Desk):
    assert desk.tell(alert("late"), alert("late", "plans")) == ["late", "late"]
    assert desk.tell(alert("infeasible"), alert("late", "plans")) == ["infeasible"]
    assert desk.tell(alert("infeasible"), alert("no_capacity"), alert("late", "plans")) == ["no_capacity"]
    assert desk.tell(alert("budget"), alert("late", "plans")) == ["budget"]


def test_the_end_is_told_once_and_only_after_something_was(desk: Desk):
    assert desk.tell(alert("on_time")) == []
    assert desk.tell(alert("late"), alert("budget")) == ["late", "budget"]
    assert desk.tell(alert("on_time"), alert("budget")) == []  # not over yet
    assert desk.tell(alert("on_time")) == ["on_time"]
    assert desk.tell(alert("on_time")) == []


def test_a_dataset_that_is_not_mentioned_stays_as_it_is(desk: Desk):
    assert desk.tell(alert("late")) == ["late"]
    assert desk.tell(alert("budget", "plans")) == ["budget"]
    assert desk.tell(alert("late"), alert("on_time", "plans")) == ["on_time"]


def test_what_comes_and_goes_rings_four_times_an_hour_at_most(desk: Desk):
    told = [kind for look in range(120) for kind in desk.tell(alert("on_time" if look % 2 else "late"), after=30)]
    assert told == ["late", "on_time"] * 4
    assert desk.tell(alert("late"), after=2 * CALM_SECONDS) == ["late"]


def test_a_desk_without_a_webhook_says_nothing():
    desk = Desk(None)
    assert desk.tell(alert("late")) == []
    assert (desk.state, desk.logged) == ({}, [])


@pytest.mark.parametrize("mode", [mode for mode in ANSWERS if mode != "ok"])
def test_what_was_not_delivered_is_tried_again_and_not_waited_for(desk: Desk, webhook: Webhook, mode: str):
    webhook.mode = mode
    desk.config = AlertConfig.model_validate({"webhook": webhook.url, "timeout_seconds": 2})
    assert desk.tell(alert("late"), alert("budget", "plans")) == []  # some of them never end their answer
    assert len(webhook.posted) == 2
    assert len(desk.logged) == 2
    assert desk.tell(alert("on_time")) == []  # nobody heard of it, so its end is no news either
    desk.config = patient(webhook)
    webhook.mode = "ok"
    assert desk.tell(alert("late"), alert("budget", "plans")) == ["late", "budget"]


def test_an_end_that_was_not_delivered_is_tried_again(desk: Desk, webhook: Webhook):
    assert desk.tell(alert("late")) == ["late"]
    webhook.mode = "error"
    assert desk.tell(alert("on_time")) == []
    webhook.mode = "ok"
    assert desk.tell(alert("on_time")) == ["on_time"]


def test_one_that_fails_does_not_hold_up_the_others(desk: Desk, webhook: Webhook):
    refused = Alert("late", "sums", "unprintable \udc80")
    assert desk.tell(refused, alert("late", "plans")) == ["late"]
    assert [one["dataset"] for one in webhook.posted] == ["plans"]


@pytest.mark.parametrize(
    "url",
    [
        f"http://127.0.0.1:1/{SECRET}",
        f"http://host-{SECRET}.invalid/",
        f"http://127.0.0.1:99999/{SECRET}",
        f"https://127.0.0.1:1/{SECRET}",
    ],
)
def test_no_message_holds_the_address(
    url: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ALERTS", url)
    config = AlertConfig(webhook_env="ALERTS", timeout_seconds=2)
    with caplog.at_level(logging.DEBUG):
        assert Alerts(config, {}).tell([alert("late")]) == []
    assert "was not delivered" in caplog.text
    assert SECRET.lower() not in (caplog.text + "".join(capfd.readouterr()) + repr(config)).lower()


@pytest.mark.parametrize("found", ["", "  ", "ftp://host/x", SECRET])
def test_a_variable_without_an_address_is_named(desk: Desk, found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ALERTS", found)
    desk.config = AlertConfig(webhook_env="ALERTS")
    assert desk.tell(alert("late")) == []
    assert "ALERTS: expected an address" in desk.logged[0]
    assert SECRET not in desk.logged[0]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({}, "expected one of webhook_env and webhook"),
        ({"webhook": f"https://x/{SECRET}", "webhook_env": "A"}, "expected one of"),
        ({"webhook": f"slack.com/{SECRET}"}, "expected an address with http"),
        ({"webhook": f"file:///{SECRET}"}, "expected an address with http"),
        ({"webhook": f"http://[{SECRET}"}, "expected an address with http"),
        ({"webook": f"https://x/{SECRET}"}, "found also webook"),
        ({"webhook_env": "A", "timeout_seconds": 0}, "greater than 0"),
    ],
)
def test_a_section_that_cannot_work_is_refused_without_showing_the_secret(written: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said) as refused:
        AlertConfig.model_validate(written)
    shown = [
        str(refused.value),
        *(repr(one["input"]) for one in refused.value.errors() if isinstance(one["input"], str)),
    ]
    assert SECRET not in "".join(shown)


def test_a_clock_that_was_set_back_does_not_silence_anything(desk: Desk):
    assert desk.tell(alert("late")) == ["late"]
    assert desk.tell(alert("late"), after=-1e5) == ["late"]


@pytest.fixture(autouse=True)
def no_surprises() -> Iterator[None]:
    """No alert raises, in no thread."""
    raised: list[threading.ExceptHookArgs] = []
    before: Callable[[threading.ExceptHookArgs], object] = threading.excepthook
    threading.excepthook = raised.append
    yield
    threading.excepthook = before
    assert raised == []


@pytest.mark.parametrize(
    "alerts", [f"https://hooks.example/{SECRET}", {"webhook_env": f"https://hooks.example/{SECRET}"}]
)
def test_a_fleet_yaml_with_the_address_in_the_wrong_place_is_refused_without_showing_it(tmp_path: Path, alerts: Any):
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"alerts": alerts}))
    with pytest.raises(FleetConfigError) as error:
        FleetConfig.load(tmp_path / "fleet.yaml")
    assert "alerts" in str(error.value) and SECRET not in str(error.value)


def test_a_password_of_netrc_is_not_sent_to_the_webhook(
    desk: Desk, webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert desk.tell(alert("late")) == ["late"]
    assert "authorization" not in webhook.heads[0].lower()


def test_a_webhook_is_reached_through_the_proxy_of_the_environment(webhook: Webhook, monkeypatch: pytest.MonkeyPatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    elsewhere = f"http://alerts.invalid/{SECRET}"
    desk = Desk(AlertConfig.model_validate({"webhook": elsewhere, "timeout_seconds": 1}))
    monkeypatch.setenv("http_proxy", webhook.url.removesuffix(f"/services/{SECRET}"))
    assert desk.tell(alert("late")) == ["late"]
    assert webhook.heads[0].startswith(f"POST {elsewhere} ")
    monkeypatch.setenv("no_proxy", "alerts.invalid")
    assert desk.tell(alert("late", "plans")) == []
