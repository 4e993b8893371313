"""Sizing against public figures: parameter counts of model cards and log lines of real vLLM runs.

Sources are named beside each figure; `vllm#N` is an issue or pull request of vllm-project/vllm. The fixture configs
under tests/fixtures/models hold only the keys that matter, written by hand from the public models.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runner.models.model_config import (
    MissingKey,
    ModelConfig,
    UnknownArchitecture,
    parse,
)
from gpu_runner.models.model_files import ModelFilesUnreadable, read_folder, read_hub
from gpu_runner.models.quantization import Quantization, UnknownQuantization, read_quantization
from gpu_runner.models.sizing import (
    GIB,
    Gpu,
    Serving,
    activation_bytes,
    catalog_gpu,
    gpu_memory_needed,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    kv_cache_bytes,
    kv_tokens,
    need,
    sequences_that_fit,
    tensor_parallel_sizes,
)
from gpu_runner.models.weights import active_parameters, parameters, weight_bytes

MODELS = Path(__file__).parents[2] / "fixtures" / "models"
NAMES = sorted(folder.name for folder in MODELS.iterdir())
H100 = Gpu("H100", int(79.22 * GIB))  # as torch sees it: vllm#10511
CONFIGS = {name: read_folder(MODELS / name) for name in NAMES}


def config(name: str) -> dict[str, object]:
    return json.loads((MODELS / name / "config.json").read_text())


# parameters


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3.1-8b", 8_030_261_248),  # the hub's safetensors.total of meta-llama/Llama-3.1-8B
        ("llama-3.1-70b", 70_553_706_496),  # the hub's safetensors.total of meta-llama/Llama-3.1-70B
        ("llama-2-7b", 6_738_415_616),  # the hub says 6,738,417,664, with 32 x 64 rotary frequencies
    ],
)
def test_parameter_counts_equal_the_hubs(name: str, expected: int) -> None:
    assert parameters(CONFIGS[name]) == expected


@pytest.mark.parametrize(
    ("name", "billions", "digits"),
    [
        ("qwen3-0.6b", 0.6, 1),  # model card Qwen/Qwen3-0.6B
        ("qwen3-8b", 8.2, 1),  # model card Qwen/Qwen3-8B
        ("qwen3-30b-a3b", 30.5, 1),  # model card Qwen/Qwen3-30B-A3B
        ("qwen3-235b-a22b-fp8", 235, 0),  # model card Qwen/Qwen3-235B-A22B
        ("qwen2.5-14b", 14.8, 1),  # model card deepseek-ai/DeepSeek-R1-Distill-Qwen-14B on the hub
        ("mixtral-8x7b", 46.7, 1),  # mistral.ai/news/mixtral-of-experts: 46.7B total
        ("deepseek-v3", 671, 0),  # model card deepseek-ai/DeepSeek-V3: 671B, multi-token prediction apart
        ("gemma-3-27b", 27.4, 1),  # Gemma 3 report, table 1: 25,600M + 1,416M embedding + 417M vision
        ("gemma-3-1b", 1.0, 1),  # Gemma 3 report, table 1: 698M + 302M embedding
        ("gpt-oss-20b", 20.9, 1),  # gpt-oss model card, table 1: 20.9B
    ],
)
def test_parameter_counts_equal_the_model_cards(name: str, billions: float, digits: int) -> None:
    assert round(parameters(CONFIGS[name]) / 1e9, digits) == billions


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.9),  # mistral.ai/news/mixtral-of-experts: uses 12.9B per token
        ("qwen3-30b-a3b", 3.3),  # model card Qwen/Qwen3-30B-A3B: 3.3B activated
        ("qwen3-235b-a22b-fp8", 22),  # model card Qwen/Qwen3-235B-A22B: 22B activated
        ("deepseek-v3", 37),  # model card deepseek-ai/DeepSeek-V3: 37B activated
    ],
)
def test_active_parameters_equal_the_model_cards(name: str, billions: float) -> None:
    assert active_parameters(CONFIGS[name]) / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_dense_model_uses_all_its_parameters() -> None:
    assert active_parameters(CONFIGS["llama-3.1-8b"]) == parameters(CONFIGS["llama-3.1-8b"])


def test_gemma_shapes_come_from_the_nested_text_config_and_the_familys_defaults() -> None:
    model = CONFIGS["gemma-3-27b"]
    assert (model.vocabulary, model.max_tokens, model.tied_embeddings) == (262_208, 131_072, True)
    # 5 local layers to each global one, Gemma 3 report section 2: 10 of 62 see the whole context
    assert [layer.window for layer in model.layers].count(None) == 10
    assert model.layers[5].window is None and model.layers[4].window == 1024


# weights on one GPU, against "model weights take" and "Model loading took" of vLLM


@pytest.mark.parametrize(
    ("name", "gpus", "gib", "tolerance"),
    [
        ("llama-3.1-8b", 1, 14.96, 0.001),  # vllm#10511 (Meta-Llama-3-8B has the same shapes)
        ("llama-3.1-8b", 2, 7.48, 0.001),  # vllm#10511, -tp 2
        ("llama-3.1-70b", 4, 32.95, 0.005),  # vllm#15039, Llama-3.3-70B-Instruct on 4 GPUs
        ("llama-3.1-70b-w8a8", 1, 67.7229, 0.001),  # vllm#12569, neuralmagic quantized.w8a8
        ("llama-2-7b", 1, 12.55, 0.001),  # kubernetes-sigs/gateway-api-inference-extension#550
        ("qwen3-30b-a3b", 4, 14.2474, 0.001),  # vllm#17469, 4 x A10
        ("qwen2.5-14b", 2, 13.9476, 0.015),  # vllm#13061, DeepSeek-R1-Distill-Qwen-14B
        ("gemma-3-27b", 4, 13.1665, 0.02),  # vllm#15676 and vllm#16378
        ("gemma-3-1b", 1, 1.9134, 0.03),  # vllm#14696
        ("deepseek-v3", 8, 79.41, 0.005),  # HabanaAI/vllm-fork#809, DeepSeek-R1 (V3's shapes), TP 8
        ("deepseek-v3", 8, 2 * 39.66, 0.005),  # vllm#13074, TP 8 x PP 2: half of the layers
    ],
)
def test_weights_on_one_gpu_are_what_vllm_logs(name: str, gpus: int, gib: float, tolerance: float) -> None:
    assert weight_bytes(CONFIGS[name], gpus) / GIB == pytest.approx(gib, rel=tolerance)


def test_the_index_total_size_is_taken_before_the_computed_size() -> None:
    index = {"metadata": {"total_size": 17_000_000_000}}
    assert weight_bytes(parse(config("llama-3.1-8b"), index)) == 17_000_000_000
    assert weight_bytes(parse(config("llama-3.1-8b"))) == 16_060_522_496  # total_size of the public index


def test_float32_checkpoints_are_served_in_two_bytes() -> None:
    stated = {**config("llama-2-7b"), "torch_dtype": "float32"}
    index = {"metadata": {"total_size": 4 * 6_738_415_616}}
    assert weight_bytes(parse(stated, index)) == weight_bytes(parse(stated)) == 2 * 6_738_415_616


def test_tied_embeddings_are_counted_once() -> None:
    untied = parse({**config("qwen3-0.6b"), "tie_word_embeddings": False})
    assert parameters(untied) - parameters(CONFIGS["qwen3-0.6b"]) == 151_936 * 1024


# quantization


@pytest.mark.parametrize(
    ("stated", "bits_per_weight"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),  # fp16 scale and 4-bit zero
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8 + 24 / 1024),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 4 + 20 / 32),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        ({"quant_method": "fp8", "activation_scheme": "static"}, 8 + 32 / 1024**2),
        ({"quant_method": "mxfp4"}, 4.25),  # OCP MX: 32 values and one 8-bit scale
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),  # 16 values and one FP8 scale
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, 8 + 32 / 1024**2),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),  # fp32 absmax per 64 weights
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8 + 32 / 1024),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
            },
            4 + 16 / 128,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}},
            },
            8 + 16 / 1024**2,
        ),
    ],
)
def test_bits_per_weight_follow_the_quantization_config(stated: dict[str, object], bits_per_weight: float) -> None:
    scheme = read_quantization(stated, "config.json")
    assert scheme.matrix_bytes(1024, 1024) * 8 / 1024**2 == pytest.approx(bits_per_weight, rel=1e-5)


def test_mxfp4_covers_the_experts_only() -> None:
    # openai/gpt-oss model card: the 20b checkpoint is 12.8 GiB
    assert weight_bytes(CONFIGS["gpt-oss-20b"]) / GIB == pytest.approx(12.8, abs=0.05)


def test_modules_that_the_checkpoint_skips_keep_their_width() -> None:
    stated = config("qwen3-8b-awq")
    whole = weight_bytes(parse(stated))
    for names in (["self_attn"], ["model.layers.*.self_attn"], ["re:.*self_attn.*"]):
        quantization = {**stated["quantization_config"], "modules_to_not_convert": names}
        assert weight_bytes(parse({**stated, "quantization_config": quantization})) > whole * 1.2
    one_layer = {**stated["quantization_config"], "modules_to_not_convert": ["model.layers.1.mlp"]}
    more = weight_bytes(parse({**stated, "quantization_config": one_layer})) - whole
    assert more == pytest.approx(3 * 4096 * 12288 * (2 - 4.15625 / 8), rel=1e-6)  # layer 1, not 10 to 19


def test_an_fp8_kv_cache_stated_by_the_checkpoint_halves_it() -> None:
    stated = config("llama-3.1-70b-w8a8")
    quantization = {**stated["quantization_config"], "kv_cache_scheme": {"num_bits": 8}}
    assert kv_bytes_per_token(parse({**stated, "quantization_config": quantization})) == 327_680 // 2


# KV cache


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-2-7b", 2 * 32 * 32 * 128 * 2),  # MHA
        ("llama-3.1-8b", 131_072),  # GQA: 2 x 32 layers x 8 heads x 128 x 2 bytes
        ("llama-3.1-70b", 327_680),
        ("mixtral-8x7b", 131_072),
        ("qwen3-0.6b", 114_688),
        ("qwen3-8b", 147_456),
        ("qwen3-30b-a3b", 98_304),
        ("gemma-3-1b", 26 * 2 * 1 * 256 * 2),  # MQA: one KV head
        ("gemma-3-27b", 62 * 2 * 16 * 128 * 2),
        ("deepseek-v3", 61 * (512 + 64) * 2),  # MLA: DeepSeek-V2 report, table 1: (4.5 d_h) per layer
    ],
)
def test_kv_bytes_of_one_token(name: str, expected: int) -> None:
    assert kv_bytes_per_token(CONFIGS[name]) == expected
    assert kv_bytes_per_token(CONFIGS[name], Serving(kv_dtype="fp8")) == expected // 2


@pytest.mark.parametrize(
    ("name", "gpus", "gib", "tokens", "tolerance"),
    [
        ("llama-2-7b", 1, 56.18, 7191 * 16, 0),  # gateway-api-inference-extension#550: "# cuda blocks: 7191"
        ("llama-3.1-70b", 4, 36.07, 29547 * 16, 0.0002),  # vllm#15039: "# cuda blocks: 29547"
        # vllm#21348: the GiB are one worker's, the tokens those of the smallest of four
        ("qwen3-235b-a22b-fp8", 4, 8.11, 178_880, 0.015),
    ],
)
def test_tokens_in_the_kv_cache_are_what_vllm_logs(
    name: str, gpus: int, gib: float, tokens: int, tolerance: float
) -> None:
    found = kv_tokens(CONFIGS[name], int(gib * GIB), Serving(tensor_parallel=gpus))
    assert found == pytest.approx(tokens, rel=tolerance)


def test_the_kv_cache_of_llama_8b_on_an_h100_is_what_vllm_measured() -> None:
    # vllm#10511: 79.22 GiB x 0.90 less 14.96 weights, 1.79 non-torch, 1.26 activations = 53.29 GiB
    assert kv_cache_bytes(CONFIGS["llama-3.1-8b"], H100) / GIB == pytest.approx(53.29, rel=0.01)
    assert activation_bytes(CONFIGS["llama-3.1-8b"]) / GIB == pytest.approx(1.26, rel=0.02)


def test_kv_heads_are_copied_and_latent_attention_is_never_split() -> None:
    sixteen = Serving(tensor_parallel=16)
    assert kv_bytes_per_token(CONFIGS["llama-3.1-70b"], sixteen) == 327_680 // 8
    assert kv_bytes_per_token(CONFIGS["deepseek-v3"], sixteen) == 70_272


def test_a_window_bounds_what_local_layers_keep() -> None:
    model = CONFIGS["gemma-3-27b"]
    layer = 2 * 16 * 128 * 2
    short, long = (kv_bytes_per_sequence(model, tokens) for tokens in (1024, 32768))
    # groups of 10 layers, 1 full and 6 sliding (52 layers padded to 60): run through vLLM 0.32.0's own grouping
    assert short == (1 + 6) * 10 * 1024 * layer
    assert long == 10 * 32768 * layer + 6 * 10 * (1024 + 16) * layer  # one block more than the window


def test_kinds_of_nearly_equal_number_form_one_group_each() -> None:
    model = CONFIGS["gpt-oss-20b"]  # 12 full and 12 sliding layers, window 128
    assert kv_bytes_per_sequence(model, 1600) == 12 * (1600 + 144) * 2 * 8 * 64 * 2


def test_a_sequence_takes_whole_blocks() -> None:
    model = CONFIGS["llama-3.1-8b"]
    assert kv_bytes_per_sequence(model, 1) == kv_bytes_per_sequence(model, 16) == 16 * 131_072
    with pytest.raises(ValueError, match="at least one token"):
        kv_bytes_per_sequence(model, 0)


# tensor parallel


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama-3.1-8b", (1, 2, 4, 8, 16)),  # 32 heads; at 16 the 8 KV heads are there twice
        ("qwen2.5-14b", (1, 2, 4, 8)),  # 40 heads, 8 KV heads: 5 and 10 divide only the heads
        ("gemma-3-1b", (1, 2, 4)),
        ("deepseek-v3", (1, 2, 4, 8, 16)),
        ("qwen3-235b-a22b-fp8", (1, 2, 4)),  # vllm#17569: 1536 / 8 = 192 is not whole blocks of 128
        ("gpt-oss-20b", (1, 2, 4, 8, 16)),
    ],
)
def test_tensor_parallel_sizes_follow_vllms_rules(name: str, sizes: tuple[int, ...]) -> None:
    assert tensor_parallel_sizes(CONFIGS[name], 16) == sizes


def smallest_group(model: ModelConfig, gpu: Gpu, sequences: int, tokens: int) -> int | None:
    """The fewest GPUs of this kind, up to 8, that hold so many sequences; None: no group does."""
    sizes = tensor_parallel_sizes(model, 8)
    held = {size: sequences_that_fit(model, gpu, tokens, Serving(tensor_parallel=size)) for size in sizes}
    return next((size for size in sizes if held[size] >= sequences), None)


def test_the_smallest_group_holds_the_sequences() -> None:
    h100, h200 = catalog_gpu("H100", 80), catalog_gpu("H200", 141)
    assert smallest_group(CONFIGS["llama-3.1-8b"], h100, 64, 4096) == 1
    assert smallest_group(CONFIGS["llama-3.1-70b"], h100, 64, 4096) == 4
    # vllm#21348 serves it on 4 x H100
    assert smallest_group(CONFIGS["qwen3-235b-a22b-fp8"], h100, 32, 4096) == 4
    # vLLM's DeepSeek-V3 recipe: 8 x H200; 8 x H100 do not hold its weights
    assert smallest_group(CONFIGS["deepseek-v3"], h200, 64, 4096) == 8
    assert smallest_group(CONFIGS["deepseek-v3"], h100, 1, 4096) is None


# what fits


def test_a_model_that_does_not_fit_holds_no_sequence() -> None:
    assert sequences_that_fit(CONFIGS["llama-3.1-70b"], H100, 1000) == 0
    assert kv_cache_bytes(CONFIGS["llama-3.1-70b"], H100) == 0


def test_sequences_longer_than_the_models_context_never_fit() -> None:
    model = CONFIGS["llama-2-7b"]
    assert sequences_that_fit(model, H100, 4096) > 0
    assert sequences_that_fit(model, H100, 4097) == 0


def test_yarn_stretches_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert parse({**config("qwen3-8b"), "rope_scaling": yarn}).max_tokens == 131_072


def test_the_memory_needed_holds_the_sequences_it_was_computed_for() -> None:
    for name, tokens in (("llama-3.1-8b", 3000), ("gemma-3-27b", 9000), ("deepseek-v3", 2000)):
        memory = gpu_memory_needed(CONFIGS[name], 40, tokens)
        assert sequences_that_fit(CONFIGS[name], Gpu("exact", memory), tokens) == 40
        assert sequences_that_fit(CONFIGS[name], Gpu("less", memory - GIB // 8), tokens) < 40


def test_catalog_memory_is_never_more_than_torch_sees() -> None:
    seen = {"H100": (80, 79.22), "H20": (141, 139.72), "RTX3090": (24, 23.58), "RTX5090": (32, 31.37)}
    for name, (sold, gib) in seen.items():
        assert 0.97 * gib < catalog_gpu(name, sold).memory_bytes / GIB <= gib
    assert catalog_gpu("NVIDIA L4", 24).memory_bytes / GIB < 22


# errors


def test_a_missing_key_is_named_with_its_place() -> None:
    stated = config("gemma-3-27b")
    del stated["text_config"]["hidden_size"]
    with pytest.raises(MissingKey, match=r"some/config\.json text_config: expected .* hidden_size, found nothing"):
        parse(stated, where="some/config.json")


def test_an_unknown_architecture_or_layer_is_refused() -> None:
    with pytest.raises(UnknownArchitecture, match="MambaForCausalLM") as refused:
        parse({**config("llama-3.1-8b"), "architectures": ["MambaForCausalLM"]})
    assert "FAMILIES" in refused.value.advice
    with pytest.raises(UnknownArchitecture, match="linear_attention"):
        parse({**config("gpt-oss-20b"), "layer_types": ["linear_attention", "full_attention"] * 12})
    with pytest.raises(MissingKey, match="architectures"):
        parse({})


def test_unknown_quantization_is_refused() -> None:
    for stated in ({"quant_method": "quip"}, {"quant_method": "awq"}, {"quant_method": "compressed-tensors"}):
        with pytest.raises(UnknownQuantization, match="quantization_config"):
            parse({**config("llama-3.1-8b"), "quantization_config": stated})


def test_unreadable_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesUnreadable, match=r"config\.json"):
        read_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelFilesUnreadable, match="JSON object"):
        read_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config("llama-3.1-8b")))
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(MissingKey, match="total_size"):
        read_folder(tmp_path)


# the hub


@contextmanager
def hub(files: dict[str, bytes], *, token: str | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = files.get(self.path)
            allowed = token is None or self.headers.get("Authorization") == f"Bearer {token}"
            self.send_response(401 if not allowed else 200 if body is not None else 404)
            self.end_headers()
            if allowed and body is not None:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_model_is_read_from_the_hub_with_or_without_an_index() -> None:
    base = "/meta-llama/Llama-3.1-8B/resolve/main/"
    files = {base + path.name: path.read_bytes() for path in (MODELS / "llama-3.1-8b").iterdir()}
    with hub(files) as url:
        assert read_hub("meta-llama/Llama-3.1-8B", hub=url).checkpoint_bytes == 16_060_522_496
        del files[base + "model.safetensors.index.json"]
        assert read_hub("meta-llama/Llama-3.1-8B", hub=url).checkpoint_bytes is None
        with pytest.raises(ModelFilesUnreadable, match="404"):
            read_hub("nobody/nothing", hub=url)


def test_a_gated_model_asks_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    files = {"/a/b/resolve/main/config.json": (MODELS / "llama-2-7b" / "config.json").read_bytes()}
    with hub(files, token="right") as url:
        with pytest.raises(ModelFilesUnreadable, match="HF_TOKEN"):
            read_hub("a/b", hub=url)
        assert read_hub("a/b", hub=url, token="right").hidden == 4096


def test_an_unreachable_hub_is_said() -> None:
    with hub({}) as url:
        pass
    with pytest.raises(ModelFilesUnreadable, match="local folder"):
        read_hub("a/b", hub=url, seconds=2)


# properties

models = st.sampled_from(NAMES).map(CONFIGS.__getitem__)
lengths = st.integers(1, 200_000)
light = settings(max_examples=40, deadline=None)


@light
@given(models, st.integers(0, 512), lengths, st.sampled_from(["auto", "fp8"]))
def test_more_gpus_never_need_more_memory_each(model: ModelConfig, sequences: int, tokens: int, kv_dtype: str) -> None:
    sizes = tensor_parallel_sizes(model, 16)
    totals = [need(model, sequences, tokens, Serving(tensor_parallel=size, kv_dtype=kv_dtype)).total for size in sizes]
    assert totals == sorted(totals, reverse=True)


@light
@given(models, lengths, lengths, st.integers(8, 192), st.integers(0, 3))
def test_longer_context_never_fits_more_sequences(
    model: ModelConfig, one: int, other: int, gib: int, choice: int
) -> None:
    sizes = tensor_parallel_sizes(model)
    serving = Serving(tensor_parallel=sizes[choice % len(sizes)])
    shorter, longer = sorted((one, other))
    gpu = catalog_gpu("any", gib)
    assert sequences_that_fit(model, gpu, longer, serving) <= sequences_that_fit(model, gpu, shorter, serving)


# Group sizes are the defaults of the tools: AWQ and GPTQ 128; MXFP4 32 values and NVFP4 16 values per 1-byte scale.
SCHEMES = {
    "fp8": Quantization("fp8", 8, scale_bytes=4),
    "int8": Quantization("int8", 8, scale_bytes=2, block_out=1),
    "awq": Quantization("awq", 4, scale_bytes=2, block_in=128, block_out=1, zero_bits=4),
    "gptq": Quantization("gptq", 4, scale_bytes=2, block_in=128, block_out=1, zero_bits=4),
    "mxfp4": Quantization("mxfp4", 4, scale_bytes=1, block_in=32, block_out=1),
    "nvfp4": Quantization("nvfp4", 4, scale_bytes=1, block_in=16, block_out=1),
}


@light
@given(models, st.sampled_from(sorted(SCHEMES)), st.sampled_from([1, 2, 4, 8]))
def test_quantizing_never_needs_more_memory(model: ModelConfig, scheme: str, gpus: int) -> None:
    computed = replace(model, checkpoint_bytes=None)
    plain = weight_bytes(replace(computed, quantization=None), gpus)
    assert weight_bytes(replace(computed, quantization=SCHEMES[scheme]), gpus) <= plain
    assert weight_bytes(replace(model, checkpoint_bytes=None), gpus) <= plain
