"""What `batch-assets fleet check` prints: whether the configured providers can be rented from. Rents nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from batch_assets.cli.output import output_console, print_json
from batch_assets.kubernetes.rights import Account, Cluster, check_rights
from batch_assets.local_dagster.local_fleet import the_fleet
from gpu_runner.errors import ExitStatus, UserFacingError
from gpu_runner.providers.base import Provider, ProviderError, ProviderUnclear
from gpu_runner.providers.checks import CheckedProvider, CheckOutcome, CheckResult, CheckSubject
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


SECONDS = 30.0
_STYLES = {CheckOutcome.OK: "green", CheckOutcome.WARNING: "yellow", CheckOutcome.FAILED: "red"}


@dataclass(frozen=True, slots=True)
class ProviderChecks:
    """One provider's results. `checked`: it has a check of its own; of others only the offers are asked."""

    provider: str
    checked: bool
    results: tuple[CheckResult, ...]

    @property
    def failed(self) -> bool:
        """Whether nothing can be rented there."""
        return any(one.outcome is CheckOutcome.FAILED for one in self.results)


def check_providers(providers: Mapping[str, Provider], seconds: float = SECONDS) -> list[ProviderChecks]:
    """Ask all providers at once. One that has not answered after `seconds` has failed."""
    found: dict[str, tuple[CheckResult, ...]] = {}

    def ask(name: str, provider: Provider) -> None:
        found[name] = tuple(_results(provider))

    threads = [threading.Thread(target=ask, args=item, daemon=True) for item in providers.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    silent = CheckResult(
        CheckSubject.CREDENTIALS, CheckOutcome.FAILED, f"no answer within {seconds:.0f} s", "can it be reached?"
    )
    return [
        ProviderChecks(name, isinstance(provider, CheckedProvider), found.get(name, (silent,)))
        for name, provider in providers.items()
    ]


def _results(provider: Provider) -> list[CheckResult]:
    try:
        return provider.check() if isinstance(provider, CheckedProvider) else [_offers(provider)]
    except Exception as error:  # a defect of one provider does not hide what the others say
        return [
            CheckResult(
                CheckSubject.CREDENTIALS, CheckOutcome.FAILED, f"its check broke: {type(error).__name__}", "report it"
            )
        ]


def _offers(provider: Provider) -> CheckResult:
    subject = CheckSubject.PRICES
    try:
        prices = [offer.price_per_hour for offer in provider.offers()]
    except (ProviderError, ProviderUnclear) as error:
        return CheckResult(subject, CheckOutcome.FAILED, str(error)[:300])
    if not prices:
        return CheckResult(subject, CheckOutcome.WARNING, "it offers nothing now")
    priced = f"{min(prices):.4g} to {max(prices):.4g}" if len(prices) > 1 else f"{prices[0]:.4g}"
    return CheckResult(
        subject, CheckOutcome.OK, f"{len(prices)} offers at {priced} $/h; there is nothing else to check"
    )


def check_table(checks: list[ProviderChecks]) -> Table:
    """A line for each result, and what to do about those that are not ok."""
    table = Table("provider", "subject", "", "found", box=SIMPLE_HEAD)
    table.columns[3].overflow = "fold"
    for one in checks:
        for number, result in enumerate(one.results):
            table.add_row(
                Text("" if number else one.provider),
                result.subject.value,
                Text(result.outcome.value, _STYLES[result.outcome]),
                Text(result.found + (f"\n→ {result.remedy}" if result.remedy else "")),
            )
        table.add_section()
    return table


def check_json(one: ProviderChecks) -> dict[str, Any]:
    """Stable keys of one provider."""
    results = [
        {"subject": each.subject.value, "outcome": each.outcome.value, "found": each.found, "remedy": each.remedy}
        for each in one.results
    ]
    return {"provider": one.provider, "checked": one.checked, "failed": one.failed, "results": results}


def show_checks(*, as_json: bool) -> int:
    """Print what was found; exit status 1 when a provider has failed."""
    fleet = the_fleet()
    checks = check_providers(fleet.providers(fleet.config()))
    failed = any(one.failed for one in checks)
    if as_json:
        print_json({"providers": [check_json(one) for one in checks], "failed": failed})
    elif checks:
        output_console().print(check_table(checks))
    else:
        sys.stdout.write("No provider is configured: fleet.yaml names only engines that stand somewhere.\n")
    return int(failed)
