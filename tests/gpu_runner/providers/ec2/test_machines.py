"""EC2's words, read as the fleet's machines."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from gpu_runner.providers.base import EndReason
from gpu_runner.providers.ec2.machines import SpotStatus, machine, read_vm

NOW = 1_800_000_000.0


def instance(state: str = "running", tags: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    given = {"batch-assets:name": "ba-1"} if tags is None else tags
    return {
        "InstanceId": "i-1",
        "State": {"Name": state},
        "LaunchTime": dt.datetime.fromtimestamp(NOW - 60, dt.UTC),
        "PublicIpAddress": "203.0.113.7",
        "PrivateIpAddress": "10.0.0.7",
        "Tags": [{"Key": key, "Value": value} for key, value in given.items()],
        **more,
    }


def seen(spot: SpotStatus | None = None, public: bool = True, **more: Any) -> Any:
    vm = read_vm(instance(**more), "eu-central-1")
    assert vm is not None
    return machine(vm, NOW, public=public, spot=spot)


def test_a_vm_runs_once_its_engine_has_answered():
    ready = {"batch-assets:name": "ba-1", "batch-assets:ready": "yes", "batch-assets:max-num-seqs": "64"}
    assert [seen(state=state).state for state in ("pending", "running", "stopping", "stopped")] == ["booting"] * 4
    assert (seen(tags=ready).state, seen(tags=ready).max_num_seqs) == ("running", 64)
    assert [seen(state=state, tags=ready).state for state in ("shutting-down", "terminated")] == ["ended"] * 2


def test_it_is_billed_from_its_launch_to_its_end():
    end = dt.datetime.fromtimestamp(NOW - 20, dt.UTC).strftime("User initiated (%Y-%m-%d %H:%M:%S GMT)")
    assert seen().billed_seconds == pytest.approx(60)
    assert seen(state="terminated", StateTransitionReason=end).billed_seconds == pytest.approx(40, abs=1)
    ahead = dt.datetime.fromtimestamp(NOW + 5, dt.UTC)
    assert seen(LaunchTime=ahead).billed_seconds == 0


def test_the_address_is_the_one_that_runs_can_reach():
    assert seen().endpoint == "ssh://batch-assets@203.0.113.7:22/8000"
    assert seen(public=False).endpoint == "ssh://batch-assets@10.0.0.7:22/8000"
    assert seen(PublicIpAddress=None).endpoint is None
    assert seen(state="terminated").endpoint is None


@pytest.mark.parametrize(
    ("code", "ready", "reason"),
    [
        ("Client.UserInitiatedShutdown", True, EndReason.TERMINATED),
        ("Server.SpotInstanceTermination", True, EndReason.INTERRUPTED),
        ("Server.InsufficientInstanceCapacity", False, EndReason.BOOT_FAILED),
        ("Client.InstanceInitiatedShutdown", True, EndReason.ORPHANED),
        ("Client.InstanceInitiatedShutdown", False, EndReason.BOOT_FAILED),
        ("Server.SomethingNew", True, EndReason.UNKNOWN),
        ("", True, EndReason.TERMINATED),
    ],
)
def test_why_a_vm_has_ended(code: str, ready: bool, reason: EndReason):
    tags = {"batch-assets:name": "ba-1"} | ({"batch-assets:ready": "yes"} if ready else {})
    ended = seen(state="terminated", tags=tags, StateReason={"Code": code})
    assert ended.reason is reason
    assert ended.describe_end() == (f"unknown reason: {code}" if reason is EndReason.UNKNOWN else reason.value)
    assert seen(state="running", tags=tags, StateReason={"Code": code}).reason is None


def test_since_when_it_has_ended_is_read_from_the_only_text_that_says_it():
    at = dt.datetime.fromtimestamp(NOW - 90, dt.UTC)
    ended = seen(state="terminated", StateTransitionReason=f"User initiated ({at:%Y-%m-%d %H:%M:%S} GMT)")
    assert ended.ended_seconds == pytest.approx(90, abs=1)
    assert seen(state="terminated", StateTransitionReason="no date").ended_seconds is None


def test_notice_counts_down_from_when_ec2_marked_the_request():
    assert seen(spot=SpotStatus("marked-for-termination", NOW - 30)).notice_seconds == 90
    assert seen(spot=SpotStatus("marked-for-termination", NOW - 300)).notice_seconds == 0
    assert seen(spot=SpotStatus("fulfilled", NOW - 30)).notice_seconds is None
    assert seen().notice_seconds is None


@pytest.mark.parametrize("broken", [{"Tags": []}, {"InstanceId": None}, {"LaunchTime": "yesterday"}])
def test_what_is_no_vm_of_ours_is_left_out(broken: dict[str, Any]):
    assert read_vm({**instance(), **broken}, "eu-central-1") is None
