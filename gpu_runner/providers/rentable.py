"""Clouds that a provider rents from, as price lists call them, and what fleet.yaml needs for one of their offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.ec2 import config as ec2
from gpu_runner.providers.runpod import config as runpod

CLOUDS: Mapping[str, Callable[[Offer], str | None]] = {"aws": ec2.lines_for, "runpod": runpod.lines_for}


def lines_to_rent(offer: Offer) -> str | None:
    """The lines of fleet.yaml that would make a listed offer one that can be rented; None where no provider can."""
    lines = CLOUDS.get(offer.provider)
    return None if lines is None else lines(offer)
