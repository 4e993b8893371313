"""GPUs of instance types, as `GpuInfo` of EC2's DescribeInstanceTypes has them; a test compares with moto's copy."""

from __future__ import annotations

GPUS_OF: dict[str, tuple[str, int, float]] = {}  # instance type: GPU, how many, GiB of each as marketed


def _add(family: str, gpu: str, memory: float, counts: dict[str, int]) -> None:
    GPUS_OF.update({f"{family}.{size}": (gpu, gpus, memory) for size, gpus in counts.items()})


_ONE_TO_EIGHT = {
    "xlarge": 1,
    "2xlarge": 1,
    "4xlarge": 1,
    "8xlarge": 1,
    "16xlarge": 1,
    "12xlarge": 4,
    "24xlarge": 4,
    "48xlarge": 8,
}
_add("g4dn", "T4", 16, {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1, "12xlarge": 4})
_add("g5", "A10G", 24, _ONE_TO_EIGHT)
_add("g6", "L4", 24, _ONE_TO_EIGHT)
_add("g6e", "L40S", 48, _ONE_TO_EIGHT)
_add("p4d", "A100", 40, {"24xlarge": 8})
_add("p4de", "A100", 80, {"24xlarge": 8})
_add("p5", "H100", 80, {"4xlarge": 1, "48xlarge": 8})
_add("p5e", "H200", 141, {"48xlarge": 8})
_add("p5en", "H200", 141, {"48xlarge": 8})
