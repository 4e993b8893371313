"""What `batch-assets kubernetes check` prints: which rights the service account of this process has, and lacks."""

from __future__ import annotations

import sys

from batch_assets.cli.output import print_json
from batch_assets.kubernetes.rights import Account, Cluster, check_rights
from gpu_runner.errors import ExitStatus, UserFacingError
from gpu_runner.providers.checks import CheckOutcome, CheckResult
from gpu_runner.providers.kubernetes.api import ClusterApi


class UnknownAccount(UserFacingError):
    """There is no such account."""

    exit_status = ExitStatus.WRONG_REQUEST


def show_rights(account: str, namespace: str, *, as_json: bool) -> int:
    """Print a line for each right; 1 when one is missing that is required."""
    try:
        wanted = Account(account)
    except ValueError:
        known = ", ".join(one.value for one in Account)
        raise UnknownAccount(f"account: expected one of {known}, found {account[:40]!r}") from None
    results = check_rights(ClusterApi(Cluster(namespace)), wanted)
    failed = any(one.outcome is CheckOutcome.FAILED for one in results)
    if as_json:
        found = [{"outcome": one.outcome.value, "found": one.found, "remedy": one.remedy} for one in results]
        print_json({"account": account, "namespace": namespace, "rights": found, "failed": failed})
    else:
        sys.stdout.write("".join(_line(one) for one in results))
        if failed:
            missing = [one.remedy for one in results if one.outcome is CheckOutcome.FAILED]
            sys.stdout.write(f"The {account}'s account cannot work in namespace {namespace}: {'; '.join(missing)}\n")
    return int(failed)


def _line(result: CheckResult) -> str:
    return f"{result.outcome.value:8} {result.found}{f' -> {result.remedy}' if result.remedy else ''}\n"
