"""What EC2 says of VMs, read as the fleet's machines. Pure: the clock is an argument.

What EC2 answers is outside data: a VM that lacks what every VM has is left out rather than believed in part.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_runner.providers.base import EndReason, Machine, MachineState
from gpu_runner.providers.cloud.engine_container import ENGINE_PORT
from gpu_runner.providers.ec2.launch import NAME_TAG, READY_TAG, SLOTS_TAG
from gpu_runner.providers.ec2.user_data import USER

SSH_PORT = 22
LONGEST_RECOMMENDATION = 4096  # characters
NOTICE_SECONDS = 120.0  # between the notice of an interruption and the end, says EC2's documentation
LONGEST_CODE = 100  # characters of a reason's code that we do not know
_ENDED = ("shutting-down", "terminated")  # billed in neither
_AT = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")
_REASONS = {
    "": EndReason.TERMINATED,
    "Client.UserInitiatedShutdown": EndReason.TERMINATED,
    "Server.SpotInstanceTermination": EndReason.INTERRUPTED,
    "Server.SpotInstanceShutdown": EndReason.INTERRUPTED,
    "Server.InternalError": EndReason.BOOT_FAILED,
    "Server.InsufficientInstanceCapacity": EndReason.BOOT_FAILED,
    "Client.VolumeLimitExceeded": EndReason.BOOT_FAILED,
    "Client.InternalError": EndReason.BOOT_FAILED,
}
_ITS_OWN = "Client.InstanceInitiatedShutdown"
_TAKEN = "marked-for-termination"


@dataclass(frozen=True, slots=True)
class Vm:
    """One instance of EC2. `created_at`: Unix seconds. `spot_request`: id of the request that it fulfils, if any.

    `state`, `reason_code` and `transition` are EC2's own words.
    """

    name: str
    id: str
    region: str
    state: str
    created_at: float
    public_address: str | None = None
    private_address: str | None = None
    spot: bool = False
    spot_request: str | None = None
    ready: bool = False
    max_num_seqs: int | None = None
    reason_code: str = ""
    transition: str = ""

    @property
    def ended(self) -> bool:
        """Whether it is billed no more."""
        return self.state in _ENDED


@dataclass(frozen=True, slots=True)
class SpotStatus:
    """What EC2 says of a spot request: code, and since when (Unix seconds)."""

    code: str
    since: float


def read_vm(found: Mapping[str, Any], region: str) -> Vm | None:
    """An instance of DescribeInstances; None for one that has no name of ours or no id."""
    tags = {one.get("Key"): one.get("Value") for one in found.get("Tags", [])}
    name, machine_id, launched = tags.get(NAME_TAG), found.get("InstanceId"), found.get("LaunchTime")
    if not (isinstance(name, str) and isinstance(machine_id, str) and isinstance(launched, dt.datetime)):
        return None
    return Vm(
        name=name,
        id=machine_id,
        region=region,
        state=str(found.get("State", {}).get("Name", "")),
        created_at=launched.timestamp(),
        public_address=found.get("PublicIpAddress") or None,
        private_address=found.get("PrivateIpAddress") or None,
        spot=found.get("InstanceLifecycle") == "spot",
        spot_request=found.get("SpotInstanceRequestId") or None,
        ready=READY_TAG in tags,
        max_num_seqs=_slots(tags.get(SLOTS_TAG)),
        reason_code=str(found.get("StateReason", {}).get("Code", "")),
        transition=str(found.get("StateTransitionReason", ""))[:200],
    )


def read_spot_status(found: Mapping[str, Any]) -> tuple[str, SpotStatus] | None:
    """A request of DescribeSpotInstanceRequests: its id and status."""
    status = found.get("Status", {})
    request, code, since = found.get("SpotInstanceRequestId"), status.get("Code"), status.get("UpdateTime")
    if not (isinstance(request, str) and isinstance(code, str)):
        return None
    return request, SpotStatus(code, since.timestamp() if isinstance(since, dt.datetime) else 0.0)


def machine(vm: Vm, now: float, *, public: bool, spot: SpotStatus | None = None, at_risk: bool = False) -> Machine:
    """The VM as the fleet sees it at `now` (Unix seconds)."""
    state: MachineState = "ended" if vm.ended else "running" if vm.ready else "booting"
    address = vm.public_address if public else vm.private_address
    reason = end_reason(vm) if vm.ended else None
    past = ended_seconds(vm, now) if vm.ended else None
    return Machine(
        name=vm.name,
        id=vm.id,
        state=state,
        endpoint=endpoint(address) if address and not vm.ended else None,
        max_num_seqs=vm.max_num_seqs,
        notice_seconds=None if vm.ended else notice_seconds(spot, now),
        at_risk=at_risk and not vm.ended,
        ended_seconds=past,
        billed_seconds=max(0.0, now - vm.created_at - (past or 0.0)),
        reason=reason,
        detail=vm.reason_code[:LONGEST_CODE] if reason is EndReason.UNKNOWN else "",
    )


def rebalance_recommended(said: str) -> bool:
    """Whether EC2 recommends to leave a spot VM: its metadata has `{"noticeTime": "2026-11-23T08:00:00Z"}` then."""
    try:
        found = json.loads(said) if len(said) <= LONGEST_RECOMMENDATION else None
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("noticeTime"), str)


def notice_seconds(spot: SpotStatus | None, now: float) -> float | None:
    """Seconds until a spot VM is taken away, of which EC2 has given notice."""
    if spot is None or spot.code != _TAKEN:
        return None
    return min(NOTICE_SECONDS, max(0.0, spot.since + NOTICE_SECONDS - now))


def ended_seconds(vm: Vm, now: float) -> float | None:
    """Since when it has ended; EC2 says it in a text only, `User initiated (2026-11-22 08:00:00 GMT)`, if at all."""
    found = _AT.search(vm.transition)
    if found is None:
        return None
    at = dt.datetime.strptime(found.group(1), "%Y-%m-%d %H:%M:%S").replace(tzinfo=dt.UTC)
    return max(0.0, now - at.timestamp())


def end_reason(vm: Vm) -> EndReason:
    """Why it ended. One that powers itself off does so because its engine never came up, or nobody looked after it."""
    if vm.reason_code == _ITS_OWN:
        return EndReason.ORPHANED if vm.ready else EndReason.BOOT_FAILED
    return _REASONS.get(vm.reason_code, EndReason.UNKNOWN)


def endpoint(address: str) -> str:
    """How any process names the engine of a VM to `Ec2Provider.access`."""
    host = f"[{address}]" if ":" in address else address
    return f"ssh://{USER}@{host}:{SSH_PORT}/{ENGINE_PORT}"


def _slots(text: object) -> int | None:
    return int(text) if isinstance(text, str) and re.fullmatch(r"[1-9]\d{0,5}", text) else None
