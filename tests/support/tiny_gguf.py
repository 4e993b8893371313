"""Tiny models with random weights as GGUF files: a Llama that chats and a BERT that embeds, for llama.cpp.

The text is noise; they stand in for a model where only the engine's behaviour matters. 0.2 s, 1 MB.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

CONTEXT, BERT_CONTEXT, DIMENSIONS = 4096, 512, 64
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|{{ message['role'] }}|>{{ message['content'] }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
SPECIAL = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
MERGES = ["t h", "th e", "Ġ a", "i n", "e r", "Ġ t"]
NORMAL, CONTROL = 1, 3


def byte_letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


class _Model:
    """Collects the parts of one file."""

    def __init__(self, file: Path, architecture: str, tokens: list[str], seed: int) -> None:
        self.writer = gguf.GGUFWriter(file, architecture)
        self.random = np.random.default_rng(seed)
        self.writer.add_name("tiny")
        self.writer.add_token_list(tokens)
        special = sum(token in SPECIAL or token.startswith("[") for token in tokens)
        self.writer.add_token_types([CONTROL] * special + [NORMAL] * (len(tokens) - special))

    def shape(self, context: int, layers: int, heads: int, groups: int, hidden: int) -> None:
        writer = self.writer
        writer.add_context_length(context)
        writer.add_embedding_length(DIMENSIONS)
        writer.add_block_count(layers)
        writer.add_feed_forward_length(hidden)
        writer.add_head_count(heads)
        writer.add_head_count_kv(groups)

    def matrix(self, name: str, outputs: int, inputs: int) -> None:
        values = self.random.standard_normal((outputs, inputs)) / inputs**0.5
        self.writer.add_tensor(name, values.astype(np.float32))

    def norm(self, name: str, *, bias: bool = False) -> None:
        self.writer.add_tensor(f"{name}.weight", np.ones(DIMENSIONS, np.float32))
        if bias:
            self.bias(name, DIMENSIONS)

    def bias(self, name: str, length: int) -> None:
        self.writer.add_tensor(f"{name}.bias", np.zeros(length, np.float32))

    def write(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_llama(file: Path) -> None:
    """A two-layer Llama whose vocabulary has every byte, so any prompt can be encoded."""
    tokens = [*SPECIAL, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]
    model = _Model(file, "llama", tokens, seed=7)
    model.shape(CONTEXT, layers=2, heads=2, groups=1, hidden=128)
    writer = model.writer
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    model.matrix("token_embd.weight", len(tokens), DIMENSIONS)
    model.matrix("output.weight", len(tokens), DIMENSIONS)
    model.norm("output_norm")
    for layer in ("blk.0", "blk.1"):
        model.norm(f"{layer}.attn_norm")
        model.norm(f"{layer}.ffn_norm")
        model.matrix(f"{layer}.attn_q.weight", 64, DIMENSIONS)
        model.matrix(f"{layer}.attn_k.weight", 32, DIMENSIONS)
        model.matrix(f"{layer}.attn_v.weight", 32, DIMENSIONS)
        model.matrix(f"{layer}.attn_output.weight", DIMENSIONS, 64)
        model.matrix(f"{layer}.ffn_gate.weight", 128, DIMENSIONS)
        model.matrix(f"{layer}.ffn_up.weight", 128, DIMENSIONS)
        model.matrix(f"{layer}.ffn_down.weight", DIMENSIONS, 128)
    model.write()


def write_bert(file: Path) -> None:
    """A one-layer BERT with vectors of 64 numbers. In GGUF the beginning of a word is marked, not its continuation."""
    letters = [chr(code) for code in range(33, 127)]
    words = ["\u2581one", "\u2581two", "\u2581apple", "\u2581ping"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *(f"\u2581{c}" for c in letters), *letters]
    model = _Model(file, "bert", tokens, seed=8)
    model.shape(BERT_CONTEXT, layers=1, heads=2, groups=2, hidden=128)
    writer = model.writer
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_vocab_size(len(tokens))
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)  # llama.cpp begins a text with it
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)
    model.matrix("token_embd.weight", len(tokens), DIMENSIONS)
    model.matrix("position_embd.weight", BERT_CONTEXT, DIMENSIONS)
    model.matrix("token_types.weight", 2, DIMENSIONS)
    model.norm("token_embd_norm", bias=True)
    for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
        model.matrix(f"blk.0.{part}.weight", DIMENSIONS, DIMENSIONS)
        model.bias(f"blk.0.{part}", DIMENSIONS)
    model.norm("blk.0.attn_output_norm", bias=True)
    model.matrix("blk.0.ffn_up.weight", 128, DIMENSIONS)
    model.bias("blk.0.ffn_up", 128)
    model.matrix("blk.0.ffn_down.weight", DIMENSIONS, 128)
    model.bias("blk.0.ffn_down", DIMENSIONS)
    model.norm("blk.0.layer_output_norm", bias=True)
    model.write()
