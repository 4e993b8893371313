"""The embedded default: three invented providers that compete, so that a newcomer sees the fleet choose.

Names say that they are simulated. GPUs are real. Prices are round figures of the order at which one such GPU is
rented by the hour, spot at about half; no provider asks exactly these. Boot times are ours as well: 2, 4 and 7 minutes.
"""

from __future__ import annotations

from gpu_runner.providers.simulated.config import SimulatedCloudConfig, SimulatedOffer, SimulatedProviderConfig

DEFAULT_CLOCK = 60.0


def default_cloud(*, clock: float = DEFAULT_CLOCK, seed: int = 0) -> SimulatedCloudConfig:
    """sim-north: data-centre GPUs, sure and not cheap. sim-east: cheaper, slow to boot. sim-spot: cheapest, taken
    away now and then with 20 real seconds of notice.
    """
    return SimulatedCloudConfig(clock=clock, seed=seed, providers=(_north(), _east(), _spot()))


def _north() -> SimulatedProviderConfig:
    return SimulatedProviderConfig(
        name="sim-north",
        region="north-1",
        boot_seconds=120,
        reliability=0.995,
        offers=(
            SimulatedOffer(instance_type="n.h100", gpu="H100", price_per_hour=2.99, capacity=8),
            SimulatedOffer(instance_type="n.a100", gpu="A100", gpu_memory_gib=80, price_per_hour=1.79, capacity=8),
            SimulatedOffer(instance_type="n.l40s", gpu="L40S", price_per_hour=1.09, capacity=16),
        ),
    )


def _east() -> SimulatedProviderConfig:
    return SimulatedProviderConfig(
        name="sim-east",
        region="east-2",
        boot_seconds=420,
        reliability=0.98,
        offers=(
            SimulatedOffer(instance_type="e.h100", gpu="H100", price_per_hour=2.29, capacity=4),
            SimulatedOffer(instance_type="e.a100", gpu="A100", gpu_memory_gib=80, price_per_hour=1.39, capacity=4),
            SimulatedOffer(instance_type="e.4090", gpu="RTX4090", price_per_hour=0.49, capacity=16),
        ),
    )


def _spot() -> SimulatedProviderConfig:
    return SimulatedProviderConfig(
        name="sim-spot",
        region="west-1",
        boot_seconds=240,
        reliability=0.9,
        interruptions_per_hour=0.05,
        notice_seconds=20,
        offers=(
            SimulatedOffer(instance_type="s.h100", gpu="H100", spot=True, price_per_hour=1.49, capacity=4),
            SimulatedOffer(
                instance_type="s.a100", gpu="A100", gpu_memory_gib=80, spot=True, price_per_hour=0.89, capacity=4
            ),
            SimulatedOffer(instance_type="s.4090", gpu="RTX4090", spot=True, price_per_hour=0.27, capacity=8),
        ),
    )
