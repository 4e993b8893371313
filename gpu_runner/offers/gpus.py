"""Datasheet facts of GPUs, and one spelling for their names. Pure.

Names follow gpuhunt: no spaces, `RTX` before GeForce and workstation cards, `PCIe` or `NVL` only for the slower board.
A name and its memory together say which card is meant (A100 with 40 or 80 GiB).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuSheet:
    """What the maker says. `memory` as marketed (taken as GiB), `bandwidth` in GB/s, TFLOP/s dense (without sparsity).

    `half` is bf16 or fp16 with fp32 accumulation; `fp8` is None where the card has no FP8 units.
    """

    name: str
    memory: float
    bandwidth: float
    half: float
    fp8: float | None
    source: str


# Where a datasheet only states the figure with sparsity, half of it stands here.
SHEETS: tuple[GpuSheet, ...] = (
    GpuSheet("B200", 180, 8000, 2250, 4500, "NVIDIA DGX B200 datasheet, one of 8 GPUs"),
    GpuSheet("H200", 141, 4800, 989, 1979, "NVIDIA H200 datasheet, SXM"),
    GpuSheet("H200NVL", 141, 4800, 835, 1671, "NVIDIA H200 datasheet, NVL"),
    GpuSheet("H100", 80, 3350, 989, 1979, "NVIDIA H100 datasheet, SXM"),
    GpuSheet("H100NVL", 94, 3900, 835, 1671, "NVIDIA H100 datasheet, NVL"),
    GpuSheet("H100PCIe", 80, 2000, 756, 1513, "NVIDIA H100 PCIe product brief"),
    GpuSheet("A100", 80, 2039, 312, None, "NVIDIA A100 datasheet, SXM 80 GB"),
    GpuSheet("A100", 40, 1555, 312, None, "NVIDIA A100 datasheet, 40 GB"),
    GpuSheet("A100PCIe", 80, 1935, 312, None, "NVIDIA A100 datasheet, PCIe 80 GB"),
    GpuSheet("L40S", 48, 864, 362, 733, "NVIDIA L40S datasheet"),
    GpuSheet("L40", 48, 864, 181, 362, "NVIDIA L40 datasheet"),
    GpuSheet("L4", 24, 300, 121, 242, "NVIDIA L4 datasheet"),
    GpuSheet("A40", 48, 696, 150, None, "NVIDIA A40 datasheet"),
    GpuSheet("A10", 24, 600, 125, None, "NVIDIA A10 datasheet"),
    GpuSheet("A10G", 24, 600, 70, None, "NVIDIA A10G datasheet as published by AWS for G5"),
    GpuSheet("A6000", 48, 768, 155, None, "NVIDIA RTX A6000 datasheet"),
    GpuSheet("A5000", 24, 768, 111, None, "NVIDIA RTX A5000 datasheet"),
    GpuSheet("A4000", 16, 448, 77, None, "NVIDIA RTX A4000 datasheet"),
    GpuSheet("RTX6000Ada", 48, 960, 364, 728, "NVIDIA RTX 6000 Ada datasheet"),
    GpuSheet("RTX5090", 32, 1792, 209, 419, "NVIDIA RTX Blackwell architecture paper"),
    GpuSheet("RTX4090", 24, 1008, 165, 330, "NVIDIA Ada architecture paper"),
    GpuSheet("RTX3090", 24, 936, 71, None, "NVIDIA GA102 architecture paper"),
    GpuSheet("T4", 16, 300, 65, None, "NVIDIA T4 datasheet"),
    GpuSheet("V100", 32, 900, 125, None, "NVIDIA V100 datasheet, SXM2"),
    GpuSheet("V100", 16, 900, 125, None, "NVIDIA V100 datasheet, SXM2"),
    GpuSheet("MI300X", 192, 5300, 1307, 2615, "AMD Instinct MI300X datasheet"),
    GpuSheet("MI325X", 256, 6000, 1307, 2615, "AMD Instinct MI325X datasheet"),
)

# Below compute capability 8.0: vLLM does not start a bfloat16 model on them (T4: vllm#1157, V100: vllm#946).
WITHOUT_BFLOAT16 = frozenset({"T4", "V100"})

_SPELLING = {sheet.name.lower(): sheet.name for sheet in SHEETS}
_BOARDS = {sheet.name.lower(): sheet.name for sheet in SHEETS if sheet.name.endswith(("PCIe", "NVL"))}
_NOISE = re.compile(r"nvidia|geforce|quadro|tesla|amd|instinct|nvlink|tensor\s*core|sxm\d?|[\s_-]+", re.IGNORECASE)
_MEMORY = re.compile(r"\(\s*(\d+)\s*(?:gi?b)?\s*\)|[\s_-](\d+)\s*gi?b?\b", re.IGNORECASE)


def spell_gpu(name: str, instance_type: str = "") -> tuple[str, float | None]:
    """One spelling of a GPU's name, and the memory in GiB where the name carries it: `H100 (80GB)` is `H100`, 80.

    An instance type with `pcie` or `nvl` in its name selects that board where its datasheet differs.
    """
    memory = _MEMORY.search(name)
    gib = float(memory.group(1) or memory.group(2)) if memory else None
    bare = _NOISE.sub("", _MEMORY.sub("", name))
    if re.fullmatch(r"\d{4}(Ti|SUPER|Ada|D)?", bare, re.IGNORECASE):
        bare = f"RTX{bare}"  # a GeForce or workstation card without its family name: 4090, 6000 Ada
    bare = re.sub(r"^RTX(?=A\d{4})", "", bare, flags=re.IGNORECASE)  # RTX A6000 is sold as A6000 too
    for board in ("pcie", "nvl"):
        if re.search(rf"{board}(?!ink)", instance_type, re.IGNORECASE):
            bare = _BOARDS.get(f"{bare}{board}".lower(), bare)
    known = _SPELLING.get(bare.lower())
    if known is None and bare.lower().endswith("pcie"):
        return spell_gpu(bare[:-4])[0], gib  # no datasheet of its own: V100 PCIe
    return known or bare, gib


def find_sheet(name: str, memory_gib: float | None) -> GpuSheet | None:
    """Datasheet of a GPU in the spelling of `spell_gpu`, or None.

    Of several sizes the nearest counts, within 15 %: providers round, and a card shows a little less than is sold.
    Without a memory size the name must leave no choice.
    """
    named = [sheet for sheet in SHEETS if sheet.name == name]
    if memory_gib is None:
        return named[0] if len(named) == 1 else None
    near = [sheet for sheet in named if abs(sheet.memory - memory_gib) <= 0.15 * sheet.memory]
    return min(near, key=lambda sheet: abs(sheet.memory - memory_gib), default=None)
