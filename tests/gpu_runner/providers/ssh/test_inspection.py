"""What an inspection of a host means for whoever wants to rent there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_runner.providers.checks import CheckOutcome, CheckSubject
from gpu_runner.providers.ssh.config import SshProviderConfig
from gpu_runner.providers.ssh.host_requests import FailedEnd, Inspection, SeenGpu
from gpu_runner.providers.ssh.inspection import judge

CONFIG = SshProviderConfig.model_validate(
    {
        "key_env": "KEY",
        "known_hosts": "known_hosts",
        "hosts": [{"name": "a", "address": "10.0.0.5", "gpu": "H100", "gpus": 2, "gpu_memory_gib": 80}],
    }
)
CARD = SeenGpu(0, 81559, "NVIDIA H100 80GB HBM3")
GOOD = Inspection((), True, 100 << 20, 1_700_000_000, (CARD, replace(CARD, index=1)))


def problems(found: Inspection) -> list[tuple[CheckSubject, CheckOutcome]]:
    """What is not OK, each with something to do about it."""
    results = judge(found, CONFIG, CONFIG.hosts[0], 1_700_000_001.0)
    assert all(one.remedy for one in results if one.outcome is not CheckOutcome.OK)
    assert all("host a" in one.found for one in results)
    return [(one.subject, one.outcome) for one in results if one.outcome is not CheckOutcome.OK]


def test_a_good_host_has_no_problem():
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("found", "subject", "outcome"),
    [
        (replace(GOOD, missing_tools=("flock",)), CheckSubject.MACHINES, CheckOutcome.FAILED),
        (replace(GOOD, command=False), CheckSubject.IMAGE, CheckOutcome.FAILED),
        (replace(GOOD, gpus=(CARD,)), CheckSubject.MACHINES, CheckOutcome.FAILED),
        (replace(GOOD, gpus=(CARD, replace(CARD, memory_mib=40960))), CheckSubject.MACHINES, CheckOutcome.FAILED),
        (replace(GOOD, gpus=()), CheckSubject.MACHINES, CheckOutcome.FAILED),
        (replace(GOOD, gpus=None), CheckSubject.MACHINES, CheckOutcome.WARNING),
        (replace(GOOD, disk_kib=1 << 20), CheckSubject.MACHINES, CheckOutcome.WARNING),
        (replace(GOOD, disk_kib=None), CheckSubject.MACHINES, CheckOutcome.FAILED),
        (replace(GOOD, clock=1_700_000_200), CheckSubject.MACHINES, CheckOutcome.WARNING),
        (replace(GOOD, failed_ends=(FailedEnd("ba-1", 3),)), CheckSubject.MACHINES, CheckOutcome.WARNING),
    ],
)
def test_each_problem_is_told_with_what_to_do(found: Inspection, subject: CheckSubject, outcome: CheckOutcome):
    assert problems(found) == [(subject, outcome)]
