"""The rights that each service account needs, and a look at which of them are missing.

A missing right was seen to do more harm than an error: without `get jobs/status` stock Dagster declares every run dead
while its worker goes on, without `delete pods` a canceled run works on. So they are asked for before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from batch_assets.kubernetes.worker_observation import (
    API_ERRORS,
    DELETE_JOBS,
    DELETE_PODS,
    GET_NODES,
    GET_STATUS,
    LIST_JOBS,
    LIST_PODS,
)
from gpu_runner.providers.checks import CheckOutcome, CheckResult, CheckSubject
from gpu_runner.providers.kubernetes.api import ClusterApi, Verb
from gpu_runner.providers.kubernetes.inspection import NEEDED


@dataclass(frozen=True, slots=True)
class Right:
    """A verb and what goes wrong without it. `required`: nothing is started without it."""

    verb: Verb
    without: str
    required: bool = True


class Account(Enum):
    """The account whose rights are meant, by what the process does."""

    DAEMON = "daemon"  # starts run workers, watches and sweeps them
    WEBSERVER = "webserver"  # cancels runs
    WORKER = "worker"  # code server and run workers: rent engine pods, in another namespace


LIST_NODES = Verb("list", "nodes")
_CANCELED = "a canceled run works on"
RIGHTS: dict[Account, tuple[Right, ...]] = {
    Account.DAEMON: (
        Right(Verb("create", "jobs", "batch"), "no run starts"),
        Right(GET_STATUS, "a lost run worker is never noticed"),
        Right(LIST_JOBS, "Jobs of ended runs stay for ever"),
        Right(DELETE_JOBS, _CANCELED),
        Right(LIST_PODS, f"a lost run worker is never noticed, {_CANCELED}"),
        Right(DELETE_PODS, _CANCELED),
        Right(GET_NODES, "a run on a lost node waits until the node is removed or its time is over", required=False),
        Right(Verb("get", "pods", subresource="log"), "failures are told without the worker's last words", False),
        Right(Verb("list", "events"), "failures are told without the cluster's events", False),
    ),
    Account.WEBSERVER: (
        Right(DELETE_JOBS, _CANCELED),
        Right(LIST_PODS, _CANCELED),
        Right(DELETE_PODS, _CANCELED),
    ),
    Account.WORKER: (
        *(Right(verb, "no engine pod is rented") for verb in NEEDED),
        Right(GET_NODES, "a GPU that fails under an engine pod is not seen", required=False),
        Right(LIST_NODES, "nothing says which nodes an engine pod fits on", required=False),
    ),
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster of this process, by its service account or a kubeconfig (see ClusterAddress)."""

    namespace: str
    name: str = "kubernetes"
    kubeconfig: Path | None = None
    context: str | None = None


def check_rights(api: ClusterApi, account: Account) -> list[CheckResult]:
    """One result for each right, in the order of RIGHTS; one alone when the API server does not answer."""
    try:
        return list(_results(api, account))
    except API_ERRORS as error:
        found = f"rights cannot be asked for: {type(error).__name__}: {error}"[:300]
        remedy = "is the API server reachable from this pod, and its service-account token mounted?"
        return [CheckResult(CheckSubject.CREDENTIALS, CheckOutcome.FAILED, found, remedy)]


def _results(api: ClusterApi, account: Account) -> Iterator[CheckResult]:
    subject = CheckSubject.PERMISSIONS
    for right in RIGHTS[account]:
        group = f" ({right.verb.group})" if right.verb.group else ""
        if api.allowed(right.verb):
            yield CheckResult(subject, CheckOutcome.OK, f"{right.verb}{group}")
            continue
        outcome = CheckOutcome.FAILED if right.required else CheckOutcome.WARNING
        where = "a ClusterRole" if right.verb in (GET_NODES, LIST_NODES) else f"its Role in namespace {api.namespace}"
        remedy = f"allow the verb {right.verb.verb} on {right.verb.name} in {where}"
        yield CheckResult(subject, outcome, f"missing: {right.verb}{group}: without it {right.without}", remedy)
