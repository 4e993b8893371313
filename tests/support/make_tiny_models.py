"""Write tiny models with random weights: a Llama that chats, BERTs that embed, classify and score, and a LoRA adapter.

    PYTHON tests/contract/make_tiny_models.py FOLDER

PYTHON has torch and transformers, such as that of .venv-vllm. Writes FOLDER/llama, FOLDER/adapter (of the
Llama), FOLDER/bert, FOLDER/classifier and FOLDER/scorer in about 5 s, without a network. The text is noise: they stand
in for a model where only the engine's behaviour matters.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HIDDEN, LAYERS, HEADS, HEAD_SIZE = 64, 2, 4, 32  # of the Llama

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|{{ message['role'] }}|>{{ message['content'] }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""

CORPUS = [
    f"Question {n}: a farmer sells {n} apples for {n * 3} cents each. How much does she earn in {n % 7 + 1} weeks?"
    for n in range(300)
]


def make_llama(folder: Path, context: int = 2048) -> None:
    """A two-layer Llama. vLLM's CPU attention refuses a head size of 16, so this one has 32."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    # Every byte is a token, so any prompt can be encoded.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=context
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        max_position_embeddings=context,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_adapter(folder: Path, rank: int = 8) -> None:
    """A LoRA adapter of the Llama with random weights that are large enough to change what it says."""
    folder.mkdir()
    torch.manual_seed(1)
    weights = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, HIDDEN)
        weights[f"{name}.lora_B.weight"] = torch.randn(HEADS * HEAD_SIZE, rank)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "bias": "none"}
    config |= {"r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def make_bert(folder: Path, context: int = 512, labels: tuple[str, ...] = ()) -> None:
    """A two-layer BERT with vectors of 64 numbers; with `labels` one that classifies, with a single one one that scores
    pairs of texts."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=True))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=context,
        **{f"{key}_token": value for key, value in names.items()},
    )
    fast.save_pretrained(folder)

    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=len(fast),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=context,
        pad_token_id=fast.pad_token_id,
    )
    if labels:
        config.id2label, config.label2id = dict(enumerate(labels)), {name: i for i, name in enumerate(labels)}
    (BertForSequenceClassification if labels else BertModel)(config).save_pretrained(folder)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    make_llama(out / "llama")
    make_adapter(out / "adapter")
    make_bert(out / "bert")
    make_bert(out / "classifier", labels=("calm", "glad", "sad"))
    make_bert(out / "scorer", labels=("fits",))
