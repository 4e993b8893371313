"""What renting at RunPod needs, looked at without renting: the key, the image, prices, and how engines are reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpu_runner.money import format_usd
from gpu_runner.offers.offer import Offer
from gpu_runner.providers.base import ProviderError, ProviderUnclear
from gpu_runner.providers.checks import CheckOutcome, CheckResult, CheckSubject
from gpu_runner.providers.runpod.config import RunPodConfig

OK, WARNING, FAILED = CheckOutcome.OK, CheckOutcome.WARNING, CheckOutcome.FAILED


def check_account(
    config: RunPodConfig, pods: Callable[[], Sequence[object]], offers: Callable[[], Sequence[Offer]]
) -> list[CheckResult]:
    """Every look. RunPod says of no key what it may do, and of no account what it may rent: that is said, too."""
    try:
        count = len(pods())
    except (ProviderError, ProviderUnclear) as error:
        remedy = f"put a key of RunPod that may read and write pods into {config.api_key_env}"
        return [CheckResult(CheckSubject.CREDENTIALS, FAILED, str(error), remedy)]
    found = [
        CheckResult(CheckSubject.CREDENTIALS, OK, f"the key of {config.api_key_env} lists pods, {count} now"),
        CheckResult(
            CheckSubject.PERMISSIONS,
            WARNING,
            "whether the key may rent, and within which limits, is not known before it does",
            "use a key with write access to pods, and set a spending limit at RunPod",
        ),
    ]
    if "@sha256:" not in config.engine_image:
        words = f"engine_image {config.engine_image} is not named by its digest: it may change between pods"
        found.append(CheckResult(CheckSubject.IMAGE, WARNING, words, "write NAME@sha256:…"))
    if config.reach == "tcp":
        words = "engines are asked over a public port without encryption: their key and all rows can be read on the way"
        found.append(CheckResult(CheckSubject.MACHINES, WARNING, words, "reach: proxy, if no row takes 100 s"))
    else:
        words = "RunPod's proxy cuts each request after 100 s: rows that take longer fail"
        found.append(CheckResult(CheckSubject.MACHINES, WARNING, words, "bound max_tokens, or reach: tcp"))
    return [*found, _prices(config, offers())]


def _prices(config: RunPodConfig, offers: Sequence[Offer]) -> CheckResult:
    without = [one.instance_type for one in config.gpus if one.instance_type not in {o.instance_type for o in offers}]
    remedy = "set price_per_hour, or a price source under `prices` that has RunPod"
    if without:
        return CheckResult(
            CheckSubject.PRICES, WARNING if offers else FAILED, f"no price: {', '.join(without)}", remedy
        )
    cheapest = min(offers, key=lambda one: one.price_per_hour)
    words = (
        f"{len(offers)} offers, from {cheapest.name} at {format_usd(cheapest.price_per_hour)} $/h ({cheapest.source})"
    )
    return CheckResult(CheckSubject.PRICES, OK, words)
