"""Speed: the roofline estimate, and measurements that beat it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runner.offers.gpus import SHEETS, GpuSheet, find_sheet, spell_gpu
from gpu_runner.offers.speed import (
    Assumptions,
    LengthMix,
    Measurement,
    ModelFacts,
    NoSpeed,
    Speed,
    Throughput,
    default_slots,
    estimate_speed,
)
from gpu_runner.simulator.scheduler import StepModel

# Llama-3.1-8B, bf16: 8.03e9 parameters, KV of 2 * 32 layers * 8 heads * 128 * 2 bytes (its config.json)
EIGHT = ModelFacts("llama-8b", 16.06e9, 8.03e9, 131_072)
SEVENTY = ModelFacts("llama-70b", 141e9, 70.6e9, 327_680)
CHAT = LengthMix(200, 300)


def sheet(name: str, memory: float | None = None) -> GpuSheet:
    found = find_sheet(name, memory)
    assert found is not None
    return found


def estimate(facts: ModelFacts, name: str, gpus: int = 1, mix: LengthMix = CHAT, memory: float | None = None) -> float:
    card = sheet(name, memory)
    speed = estimate_speed(facts, card, card.memory, gpus, mix)
    assert isinstance(speed, Speed) and speed.basis == "estimate"
    return speed.tokens_per_second


@pytest.mark.parametrize(
    ("name", "instance_type", "spelled", "memory"),
    [
        ("A100", "p4de.24xlarge", "A100", None),
        ("T4 (16)", "g4dn.xlarge", "T4", 16),
        ("H100 (80GB)", "", "H100", 80),
        ("NVIDIA A100-SXM4-80GB", "", "A100", 80),
        ("A100 40GB PCIe", "", "A100PCIe", 40),
        ("H100", "gpu_1x_h100_pcie", "H100PCIe", None),
        ("V100 PCIe", "", "V100", None),
        ("V100 NVLink", "", "V100", None),
        ("4090", "", "RTX4090", None),
        ("GeForce RTX 4090", "", "RTX4090", None),
        ("6000 Ada", "", "RTX6000Ada", None),
        ("RTX A6000", "", "A6000", None),
        ("AMD Instinct MI300X", "", "MI300X", None),
        ("H200 NVL", "", "H200NVL", None),
        ("K80", "", "K80", None),
    ],
)
def test_a_gpu_has_one_spelling(name: str, instance_type: str, spelled: str, memory: float | None) -> None:
    assert spell_gpu(name, instance_type) == (spelled, memory)


def test_every_datasheet_has_a_source_and_its_own_name_and_memory() -> None:
    assert len({(one.name, one.memory) for one in SHEETS}) == len(SHEETS)
    for one in SHEETS:
        assert one.source and spell_gpu(one.name) == (one.name, None)
        assert find_sheet(one.name, one.memory) == one


def test_memory_tells_two_cards_of_one_name_apart() -> None:
    assert sheet("A100", 40).bandwidth < sheet("A100", 79.6).bandwidth
    assert find_sheet("A100", None) is None and find_sheet("A100", 24) is None
    assert sheet("L4").memory == 24 and find_sheet("K80", 12) is None


def test_vllm_gives_big_cards_more_slots() -> None:
    assert [
        default_slots(sheet(name, memory), memory) for name, memory in (("H100", 80), ("A100", 80), ("L4", 24))
    ] == [
        1024,
        256,
        256,
    ]


def test_the_estimate_agrees_with_the_simulator_of_the_same_constants() -> None:
    """StepModel's defaults are an 8B model on one H200 with 256 slots and full bandwidth: the same step by hand."""
    model = StepModel()
    running, context = 256, CHAT.prompt_tokens + CHAT.output_tokens / 2
    tokens = running * CHAT.tokens / CHAT.output_tokens
    by_hand = tokens / (model.compute_seconds(int(tokens)) + running * context * model.context_seconds)
    card = replace(sheet("A100", 80), memory=141, bandwidth=4800, half=989)  # an A100's 256 slots, an H200's speed
    speed = estimate_speed(EIGHT, card, 141, 1, CHAT, Assumptions(bandwidth=1.0))
    assert isinstance(speed, Speed)
    assert speed.tokens_per_second == pytest.approx(by_hand, rel=0.03)


def test_the_estimate_is_within_a_small_factor_of_published_figures() -> None:
    """Neither source gives the lengths; those here are ours. The 9B model keeps KV in a quarter of its layers."""
    nine = ModelFacts("9b", 18e9, 9e9, 32_768)
    published = 29_800  # tokens/s, prompt and completion, Qwen3.5-9B on one H100
    assert published / 2 < estimate(nine, "H100", mix=LengthMix(500, 500)) < published * 2
    embedding = ModelFacts("7b", 14e9, 7e9, 131_072)
    published = 2_000  # tokens/s of 7B embeddings on one L4, a card of 72 W
    assert published / 2.5 < estimate(embedding, "L4", mix=LengthMix(500, 0)) < published * 2.5


def test_a_faster_card_is_faster_and_twice_the_cards_serve_twice() -> None:
    speeds = [estimate(EIGHT, name) for name in ("B200", "H200", "L40S", "L4")]
    assert speeds == sorted(speeds, reverse=True)
    assert estimate(EIGHT, "H100", gpus=8) == pytest.approx(8 * estimate(EIGHT, "H100"))


def test_a_large_model_is_split_where_that_is_fastest_and_refused_where_it_does_not_fit() -> None:
    pair = estimate(SEVENTY, "H100", gpus=2)
    in_pairs = estimate(replace(SEVENTY, tensor_parallel=(2,)), "H100", gpus=4)
    assert in_pairs == pytest.approx(2 * pair)
    assert estimate(SEVENTY, "H100", gpus=4) > in_pairs  # split over four, the KV cache holds far more sequences
    refused = estimate_speed(SEVENTY, sheet("H100"), 80, 1, CHAT)
    assert isinstance(refused, NoSpeed) and "llama-70b does not fit: 131 GiB of weights" in refused.reason
    only_pairs = replace(EIGHT, tensor_parallel=(2, 4))
    alone = estimate_speed(only_pairs, sheet("H100"), 80, 1, CHAT)
    assert alone == NoSpeed("llama-8b runs on 2 GPUs or more, the instance has 1", permanent=True)


def test_fp8_is_faster_only_where_the_card_has_it() -> None:
    fp8 = replace(EIGHT, fp8=True)
    assert estimate(fp8, "H100") > 1.3 * estimate(EIGHT, "H100")
    assert estimate(fp8, "A10G") == estimate(EIGHT, "A10G")


def test_a_measurement_beats_the_estimate() -> None:
    catalog = Throughput(
        [
            Measurement("llama-8b", "H100", 80, 1, CHAT, 1e6, 100),
            Measurement("llama-8b", "H100", 80, 1, LengthMix(220, 280), 3e6, 100),
        ]
    )
    assert catalog.speed(EIGHT, "H100", 80, 1, LengthMix(210, 290)) == Speed(20_000, "measured")
    assert catalog.speed(EIGHT, "H100", 80, 2, CHAT) == Speed(estimate(EIGHT, "H100", gpus=2), "estimate")
    assert catalog.speed(EIGHT, "H200", 141, 1, CHAT) == Speed(estimate(EIGHT, "H200"), "estimate")


def test_a_measurement_on_other_lengths_corrects_the_estimate() -> None:
    half = Measurement("llama-8b", "H100", 80, 1, CHAT, estimate(EIGHT, "H100") / 2 * 60, 60)
    long = LengthMix(200, 3000)
    speed = Throughput([half]).speed(EIGHT, "H100", 80, 1, long)
    assert isinstance(speed, Speed) and speed.basis == "scaled"
    assert speed.tokens_per_second == pytest.approx(estimate(EIGHT, "H100", mix=long) / 2)


def test_embeddings_are_not_taken_for_completions() -> None:
    catalog = Throughput([Measurement("llama-8b", "H100", 80, 1, LengthMix(200, 0), 1e6, 10)])
    speed = catalog.speed(EIGHT, "H100", 80, 1, LengthMix(200, 50))
    assert isinstance(speed, Speed) and speed.basis == "scaled"


def test_an_unknown_card_has_a_speed_only_once_measured() -> None:
    refused = Throughput().speed(EIGHT, "K80", 12, 1, CHAT)
    assert refused == NoSpeed("no datasheet for K80 with 12 GiB, and no measured speed of llama-8b")
    catalog = Throughput([Measurement("llama-8b", "K80", 12, 1, CHAT, 1000, 10)])
    assert catalog.speed(EIGHT, "K80", 12, 1, CHAT) == Speed(100, "measured")
    assert catalog.speed(EIGHT, "K80", 12, 1, LengthMix(9, 9)) == Speed(100, "scaled")


@pytest.mark.parametrize("bad", [(0, 0), (0.4, 0.4), (-1, 5), (5, -1), (float("nan"), 1), (float("inf"), 1)])
def test_a_mix_without_tokens_is_an_error(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="length mix: expected"):
        LengthMix(*bad)


def test_a_measurement_without_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="measurement: expected tokens and seconds above 0"):
        Measurement("m", "H100", 80, 1, CHAT, 10, 0)


@settings(deadline=None, max_examples=60)
@given(
    card=st.sampled_from(SHEETS),
    gpus=st.sampled_from([1, 2, 3, 4, 8]),
    parameters=st.floats(1e8, 1e12),
    kv=st.just(0.0) | st.floats(1, 1e6),
    prompt=st.floats(1, 30_000),
    output=st.floats(0, 30_000),
)
def test_an_estimate_is_a_positive_number_within_the_compute_limit_or_a_reason(
    card: GpuSheet, gpus: int, parameters: float, kv: float, prompt: float, output: float
) -> None:
    facts = ModelFacts("m", 2 * parameters, parameters, kv)
    speed = estimate_speed(facts, card, card.memory, gpus, LengthMix(prompt, output))
    if isinstance(speed, NoSpeed):
        assert speed.reason
    else:
        assert 0 < speed.tokens_per_second <= gpus * card.half * 1e12 * 0.5 / (2 * parameters) * 1.0001
