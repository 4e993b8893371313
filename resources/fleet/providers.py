"""The providers of real machines that `fleet.yaml` names. A cloud's client library is loaded where it is named only."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.base import Provider
from gpu_runner.providers.local import LocalProvider
from resources.fleet.fleet_config import FleetConfig
from resources.pricing.price_files import PricingError
from resources.pricing.sources import PriceHistory, PricingConfig, Source

AWS, RUNPOD = "aws", "runpod"  # as price lists call them, whatever the entry of fleet.yaml is called


def rented_providers(home: Path, config: FleetConfig) -> list[Provider]:
    """A provider for each entry, in the order of `FleetConfig.rented`. `home`: where they keep what they know."""
    found: list[Provider] = [LocalProvider(home, one) for one in config.local]
    if config.kubernetes:
        from gpu_runner.providers.kubernetes.provider import KubernetesProvider

        listed_by = cache(lambda cloud: listed_offers(config.prices, cloud))
        found += [KubernetesProvider(home, one, listed=lambda cloud: listed_by(cloud)()) for one in config.kubernetes]
    if config.ssh:
        from gpu_runner.providers.ssh.provider import SshProvider

        found += [SshProvider(home, one) for one in config.ssh]
    if config.ec2:
        from gpu_runner.providers.ec2.provider import Ec2Provider
        from gpu_runner.providers.ssh.engine_tunnel import open_engine_tunnel
        from gpu_runner.providers.ssh.host_words import latest_words

        listed = listed_offers(config.prices, AWS)
        found += [
            Ec2Provider(home, one, tunnel=open_engine_tunnel, words=latest_words(), listed=listed) for one in config.ec2
        ]
    if config.runpod:
        from gpu_runner.providers.runpod.provider import RunPodProvider

        listed = listed_offers(config.prices, RUNPOD)
        found += [RunPodProvider(home, one, listed=listed) for one in config.runpod]
    return found


def listed_offers(prices: PricingConfig, cloud: str) -> Callable[[], list[Offer]]:
    """Asks the price sources what they say of a cloud now. One that cannot be read says nothing: the market tells."""
    sources: list[Source] = []

    def ask() -> list[Offer]:
        found: list[Offer] = []
        try:
            if not sources:
                sources.extend(one for one in prices.sources() if not isinstance(one, PriceHistory))
        except PricingError:
            return found
        for source in sources:
            try:
                found += [offer for offer in source.offers(time.time()) if offer.provider == cloud]
            except PricingError:
                continue
        return found

    return ask
