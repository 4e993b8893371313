"""What is known of a model, from where, and how an instance would serve it. No test asks the real hub."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_runner.models.facts import Placement, ServedAs, facts_of, of_config, of_declared, place, served_as
from gpu_runner.models.known import NAMES, built_in
from gpu_runner.models.model_config import ModelConfig
from gpu_runner.models.model_files import ModelFilesUnreadable, cached_folder, read_folder
from gpu_runner.models.sizing import GIB, kv_bytes_per_token, largest_stage
from gpu_runner.models.weights import weight_bytes
from gpu_runner.offers.speed import LengthMix, ModelFacts, NoSpeed
from resources.engine_options import EngineOptions
from resources.pricing.model_catalog import DeclaredModel, Models

FIXTURES = Path(__file__).parents[2] / "fixtures" / "models"
MIX = LengthMix(300, 500)
FACTS = ModelFacts("mine", 15 * GIB, 8e9, 131_072.0)


def fixture(name: str) -> ModelConfig:
    return read_folder(FIXTURES / name)


def no_hub(name: str) -> ModelConfig:
    raise AssertionError(f"the hub was asked for {name}")


# built-in shapes


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
    ],
)
def test_built_in_shapes_are_those_of_the_public_config(name: str, folder: str) -> None:
    here = built_in(name)
    assert here is not None
    assert replace(here, where="", checkpoint_bytes=None) == replace(fixture(folder), where="", checkpoint_bytes=None)


def test_every_built_in_name_has_shapes_in_any_letter_case() -> None:
    assert len(NAMES) == len({name.lower() for name in NAMES})
    for name in NAMES:
        assert built_in(name.upper()) is not None
    assert built_in("Qwen/Qwen9-1T") is None


# facts


def test_facts_of_llama_8b_are_its_public_figures() -> None:
    facts = facts_of("llama", fixture("llama-3.1-8b"), 800)
    assert facts.weight_bytes == 16_060_522_496  # total_size of the hub's safetensors index
    assert facts.active_parameters == 8_030_261_248
    assert facts.kv_bytes_per_token == 131_072  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    assert (facts.tensor_parallel, facts.fp8) == ((1, 2, 4, 8), False)


def test_a_mixture_of_experts_computes_with_its_active_experts_only() -> None:
    facts = facts_of("moe", fixture("qwen3-30b-a3b"), 800)
    assert facts.active_parameters / 1e9 == pytest.approx(3.3, rel=0.02)
    assert facts.weight_bytes / 2e9 == pytest.approx(30.5, rel=0.01)


def test_only_fp8_weights_and_activations_count_as_fp8() -> None:
    assert facts_of("fp8", fixture("qwen3-235b-a22b-fp8"), 800).fp8
    assert not facts_of("awq", fixture("qwen3-8b-awq"), 800).fp8
    assert not facts_of("w8a8", fixture("llama-3.1-70b-w8a8"), 800).fp8


def test_windows_make_a_long_row_cheaper_per_token() -> None:
    gemma = fixture("gemma-3-27b")
    short, long = facts_of("g", gemma, 500), facts_of("g", gemma, 50_000)
    assert short.kv_bytes_per_token == kv_bytes_per_token(gemma)
    assert long.kv_bytes_per_token < 0.4 * short.kv_bytes_per_token


# placement


def test_a_small_model_runs_once_per_gpu_and_a_large_one_over_several() -> None:
    small = of_config("s", fixture("llama-3.1-8b"), "files", "")
    large = of_config("l", fixture("llama-3.1-70b"), "files", "")
    one, many = place(small, "H100", 80, 8, MIX, 3000), place(large, "H100", 80, 8, MIX, 3000)
    assert isinstance(one, Placement) and isinstance(many, Placement)
    assert (one.tensor_parallel, one.engines) == (1, 8)
    assert (many.tensor_parallel, many.engines) == (4, 2)
    assert many.arguments()[:4] == ("--tensor-parallel-size", "4", "--data-parallel-size", "2")
    assert many.slots == 2 * many.max_num_seqs


def test_a_model_that_does_not_fit_says_what_it_needs() -> None:
    large = of_config("70B", fixture("llama-3.1-70b"), "files", "")
    found = place(large, "H100", 80, 1, MIX, 3000)
    assert isinstance(found, NoSpeed)
    assert found.reason == ("70B does not fit: with a row of 3,000 tokens it needs 152.6 GiB on the GPU, H100 has 80")


def test_a_card_without_bfloat16_serves_no_bfloat16_model() -> None:
    model = of_config("0.6B", fixture("qwen3-0.6b"), "files", "")
    found = place(model, "T4", 16, 1, MIX, 3000)
    assert isinstance(found, NoSpeed) and found.reason == "T4 has no bfloat16, in which 0.6B is served"
    half = of_config("0.6B", replace(fixture("qwen3-0.6b"), dtype="float16"), "files", "")
    assert isinstance(place(half, "T4", 16, 1, MIX, 3000), Placement)


def test_the_longest_row_decides_whether_an_instance_will_do() -> None:
    model = of_config("8B", fixture("llama-3.1-8b"), "files", "")
    assert isinstance(place(model, "L4", 24, 1, MIX, 4_000), Placement)
    refused = place(model, "L4", 24, 1, MIX, 100_000)
    assert isinstance(refused, NoSpeed) and "a row of 100,000 tokens" in refused.reason
    capped = place(model, "L4", 24, 1, MIX, 100_000, 8192)  # whoever sets max_model_len gives up the longer rows
    assert isinstance(capped, Placement) and capped.max_model_len == 8192


def test_rows_beyond_the_models_own_context_are_no_reason_against_an_instance() -> None:
    model = of_config("0.6B", fixture("qwen3-0.6b"), "files", "")
    assert isinstance(place(model, "H100", 80, 1, MIX, 10_000_000), Placement)


def test_the_context_is_cut_to_what_the_card_holds_or_vllm_would_not_start() -> None:
    model = of_config("8B", fixture("llama-3.1-8b"), "files", "")
    small, large = place(model, "L4", 24, 1, MIX, 3000), place(model, "H100", 80, 1, MIX, 3000)
    assert isinstance(small, Placement) and isinstance(large, Placement)
    assert large.max_model_len is None
    assert small.max_model_len is not None and 3000 < small.max_model_len < 131_072
    assert small.max_model_len % 16 == 0


def test_no_more_slots_than_rows_fit_the_kv_cache() -> None:
    model = of_config("8B", fixture("llama-3.1-8b"), "files", "")
    small, large = place(model, "L4", 24, 1, MIX, 3000), place(model, "A100", 80, 1, MIX, 3000)
    assert isinstance(small, Placement) and isinstance(large, Placement)
    assert small.max_num_seqs < 32 and large.max_num_seqs == 256


def test_declared_facts_are_enough_to_place_a_model() -> None:
    model = of_declared(FACTS, "here", 32_768)
    assert isinstance(place(model, "L4", 24, 1, MIX, 3000), Placement)
    refused = place(model, "T4", 16, 1, MIX, 3000)
    assert isinstance(refused, NoSpeed) and "on the GPU, T4 has 16" in refused.reason
    encoder = of_declared(replace(FACTS, weight_bytes=1 * GIB, kv_bytes_per_token=0.0), "here")
    assert place(encoder, "T4", 16, 1, LengthMix(300, 0), 500) == Placement(1, 1, 256, None)


def test_a_model_that_needs_more_gpus_than_there_are_says_so() -> None:
    model = of_declared(replace(FACTS, tensor_parallel=(4, 8)), "here")
    found = place(model, "H100", 80, 2, MIX, 100)
    assert isinstance(found, NoSpeed) and found.reason == "mine runs on 4 GPUs or more, the instance has 2"


# looking models up


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put_into_cache(cache: Path, name: str, config: str) -> None:
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc123\n")
    (folder / "snapshots" / "abc123").mkdir(parents=True)
    (folder / "snapshots" / "abc123" / "config.json").write_text(config)


def test_stages_hold_a_part_of_the_layers_and_count_as_gpus_of_one_engine() -> None:
    name = "meta-llama/Llama-3.1-70B"
    model = of_config(name, fixture("llama-3.1-70b"), "hub", "x")
    staged = served_as(model, ServedAs(pipeline_parallel=2))
    alone, both = place(model, "H100", 80, 2, MIX, 2000), place(staged, "H100", 80, 4, MIX, 2000)
    assert isinstance(alone, NoSpeed) or alone.tensor_parallel == 2
    assert isinstance(both, Placement) and (both.tensor_parallel, both.engines) in {(2, 1), (1, 2)}
    assert set(staged.facts(800).tensor_parallel) == {2 * size for size in model.facts(800).tensor_parallel}
    whole, stage = fixture("llama-3.1-70b"), largest_stage(fixture("llama-3.1-70b"), 2)
    assert len(stage.layers) == 40 and 0.5 < weight_bytes(stage) / weight_bytes(whole) < 0.55
    assert largest_stage(whole, 1) is whole
    found = place(staged, "H100", 80, 1, MIX, 2000)
    assert isinstance(found, NoSpeed) and found.permanent
    assert found.reason.endswith(
        "runs on 2 GPUs or more, the instance has 1; no engine is rented over several machines"
    )
    declared = served_as(of_declared(FACTS, "here"), ServedAs(pipeline_parallel=2))
    split = place(declared, "L4", 24, 2, MIX, 2000)
    assert isinstance(split, Placement) and (split.tensor_parallel, split.engines) == (1, 1)
    options = EngineOptions(pipeline_parallel_size=2)
    assert options.served.pipeline_parallel == 2 and options.arguments() == ("--pipeline-parallel-size=2",)
    assert not options.identity()


def test_what_is_declared_comes_first(cache: Path) -> None:
    declared = DeclaredModel(replace(FACTS, model="Qwen/Qwen3-8B"), 4096)
    found = Models(read=no_hub).known("Qwen/Qwen3-8B", declared)
    assert (found.knowledge, found.where, found.context) == ("declared", "hardware.model_facts", 4096)
    assert found.facts(1.0).weight_bytes == 15 * GIB


def test_a_local_folder_is_read(cache: Path) -> None:
    found = Models(read=no_hub).known(str(FIXTURES / "qwen2.5-14b"))
    assert (found.knowledge, found.context) == ("files", 131_072)


def test_the_hugging_face_cache_comes_before_built_in_shapes(cache: Path) -> None:
    config = json.loads((FIXTURES / "qwen3-8b" / "config.json").read_text()) | {"max_position_embeddings": 1234}
    put_into_cache(cache, "Qwen/Qwen3-8B", json.dumps(config))
    found = Models(read=no_hub).known("Qwen/Qwen3-8B")
    assert (found.knowledge, found.context) == ("files", 1234)
    assert found.where.startswith(str(cached_folder("Qwen/Qwen3-8B")))


def test_a_cache_without_the_model_is_passed_over(cache: Path) -> None:
    assert cached_folder("Qwen/Qwen3-8B") is None
    (cache / "models--Qwen--Qwen3-8B" / "refs").mkdir(parents=True)
    (cache / "models--Qwen--Qwen3-8B" / "refs" / "main").write_text("gone")
    assert cached_folder("Qwen/Qwen3-8B") is None
    assert Models(read=no_hub).known("Qwen/Qwen3-8B").knowledge == "built in"


def test_the_hub_is_asked_once(cache: Path) -> None:
    asked: list[str] = []

    def read(name: str) -> ModelConfig:
        asked.append(name)
        return fixture("qwen2.5-14b")

    models = Models(read=read)
    assert [models.known("our/finetune").knowledge for _ in range(3)] == ["files"] * 3
    assert asked == ["our/finetune"]


def test_a_hub_out_of_reach_is_asked_again_only_later(cache: Path) -> None:
    asked, now = [], [0.0]

    def read(name: str) -> ModelConfig:
        asked.append(name)
        raise ModelFilesUnreadable("an answer from the hub", "no route", name, "Name a folder.")

    models = Models(read=read, clock=lambda: now[0], retry=600)
    for moment, times in ((0.0, 1), (599.0, 1), (601.0, 2)):
        now[0] = moment
        found = models.known("our/finetune")
        assert (found.knowledge, len(asked)) == ("assumed", times)
        assert "no route" in found.where and "hardware.model_facts" in found.where


def test_a_hub_that_hangs_is_not_waited_for(cache: Path) -> None:
    answers = threading.Event()

    def read(name: str) -> ModelConfig:
        answers.wait()
        return fixture("qwen3-8b")

    found = Models(read=read, seconds=0.1).known("our/finetune")
    answers.set()
    assert "nothing within 0.1 s" in found.where


def test_an_assumed_model_is_an_8b_and_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("simulated/tiny", "m", "a model"):
        found = Models(read=no_hub).known(name)
        assert (found.name, found.knowledge) == (name, "assumed")
        assert f"{name}: expected a folder with config.json" in found.where
        assert found.facts(800).active_parameters == pytest.approx(8.03e9, rel=0.01)
    assert "not to be asked" in Models(read=no_hub).known("our/finetune", hub=False).where
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not to be asked" in Models(read=no_hub).known("our/finetune").where


def test_files_that_cannot_be_used_are_a_reason_and_not_a_crash(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    found = Models(read=no_hub).known(str(tmp_path / "mamba"))
    assert found.knowledge == "assumed"
    assert "MambaForCausalLM" in found.where and "hardware.model_facts" in found.where
