"""What a dataset needs of its engine: words of a command line, a part of the row key, which engine is the right one."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.dataset_project import dataset_project
from support.machines import ended_machines, first_offer, get, local_provider, part, simulated_cloud

from batch_assets.snapshot.ingest import RowKeys
from batch_assets.spec.models import SpecError, load_spec
from gpu_runner.models.facts import Placement, ServedAs, of_config, place, served_as
from gpu_runner.models.known import built_in
from gpu_runner.models.sizing import GIB
from gpu_runner.models.weights import weight_bytes
from gpu_runner.offers.speed import LengthMix
from gpu_runner.providers.base import EngineOrder
from gpu_runner.providers.cloud.engine_container import container_words
from gpu_runner.rows import Generation, row_key
from gpu_runner.simulator.__main__ import arguments
from resources.engine_options import IDENTITY, PLAIN, EngineOptions
from resources.fleet.fleet_config import FleetConfig, FleetConfigError
from resources.fleet.leased_engine import Requirement

MODEL = "Qwen/Qwen3-8B"
BASE = {"name": "d", "source": {"grid": {"t": ["a"]}}, "prompt": {"user": "{{ t }}"}, "model": MODEL}
TEMPLATE = "{% for one in messages %}{{ one.content }} $(id) 'x' %h{% endfor %}"
ALL: dict[str, Any] = {
    "reasoning_parser": "qwen3",
    "tool_call_parser": "hermes",
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "dtype": "bfloat16",
    "tokenizer": "Qwen/Qwen3-8B",
    "chat_template": TEMPLATE,
    "max_num_seqs": 64,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    "enable_prefix_caching": False,
    "limit_mm_per_prompt": {"image": 2},
    "lora": {"name": "sql", "path": "acme/sql"},
    "lora_modules": [{"name": "chat", "path": "/adapters/chat"}],
    "max_lora_rank": 32,
}
MIX = LengthMix(300, 500)


def options(**written: Any) -> EngineOptions:
    return load_spec({**BASE, "engine": written}, "defs.yaml").engine


def generation(**written: Any) -> Generation:
    return load_spec({**BASE, "engine": written}, "defs.yaml").generation()


def needs(**written: Any) -> Requirement:
    return Requirement("d", MODEL, "chat", engine=options(**written))


# words


def test_each_argument_is_one_word_that_begins_with_its_flag() -> None:
    assert options(**ALL).arguments() == (
        "--reasoning-parser=qwen3",
        "--tool-call-parser=hermes",
        "--enable-auto-tool-choice",
        "--quantization=fp8",
        "--kv-cache-dtype=fp8",
        "--dtype=bfloat16",
        "--tokenizer=Qwen/Qwen3-8B",
        f"--chat-template={TEMPLATE}",
        '--speculative-config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}',
        "--no-enable-prefix-caching",
        '--limit-mm-per-prompt={"image":2}',
        "--max-lora-rank=32",
        "--enable-lora",
        "--max-loras=2",
        "--lora-modules",
        '{"name":"chat","path":"/adapters/chat"}',
        '{"name":"sql","path":"acme/sql"}',
    )


def test_the_simulator_takes_the_command_line_of_vllm() -> None:
    taken = arguments(["--model", "m", "--max-num-seqs", "64", *options(**ALL).arguments()])
    assert taken.lora_modules == [("chat", "/adapters/chat"), ("sql", "acme/sql")]
    assert (taken.max_num_seqs, taken.chat_template, taken.enable_prefix_caching) == (64, TEMPLATE, False)


def test_a_container_gets_them_as_they_are() -> None:
    order = EngineOrder("m", "chat", 64, options(**ALL).arguments())
    assert container_words(["--model", "{model}"], order)[4:] == order.arguments


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "simulated"])
def test_a_rented_engine_is_started_with_them(tmp_path: Path, kind: str) -> None:
    words = options(**ALL).arguments()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_machines(tmp_path))
        provider = local_provider(tmp_path) if kind == "local" else simulated_cloud(tmp_path).providers["sim-a"]
        order = EngineOrder("tiny" if kind == "local" else "simulated/tiny", "chat", 8, words)
        provider.create(first_offer(provider), "ba-1", order)
        machine = provider.wait_ready("ba-1", 60, lambda seconds: None)
        line = part(machine.id, "gpu_runner.simulator").cmdline()
        assert tuple(line[-len(words) :]) == words, shlex.join(line)
        assert get(provider, "ba-1").max_num_seqs == 8


# row keys


def test_rows_without_arguments_keep_the_key_that_they_had() -> None:
    plain = generation()
    assert plain.stated().keys() == {"task", "model", "sampling", "json_schema", "repair_tries"}
    assert row_key(plain, [{"role": "user", "content": "a"}]) == (
        "1640472760a4693ea70bc198f19e826b13fda83355adb2dc730a035c3a7d474e"
    )
    unheard = {name: value for name, value in ALL.items() if name not in IDENTITY}
    assert generation(**unheard) == plain, "what changes no answer is no part of a row"


@pytest.mark.slow
@given(st.sets(st.sampled_from(sorted(IDENTITY - {"server"})), min_size=1))
def test_what_changes_answers_is_part_of_the_row_key(names: set[str]) -> None:
    written = generation(**{name: ALL[name] for name in names})
    text = '[{"content":"a","role":"user"}]'
    key = row_key(written, [{"role": "user", "content": "a"}])
    assert key != row_key(generation(), [{"role": "user", "content": "a"}])
    assert RowKeys(written).digests([text.encode()]) == [bytes.fromhex(key)]
    assert Generation(**written.stated()) == written


def test_a_run_asks_for_the_arguments_of_its_snapshot_where_they_change_answers() -> None:
    now = options(reasoning_parser="qwen3", max_num_seqs=8)
    assert now.with_identity({"dtype": "half"}) == options(dtype="half", max_num_seqs=8)
    assert now.with_identity({}) == options(max_num_seqs=8)


# which engine is the right one


def test_instances_serve_the_same_where_all_arguments_are_equal() -> None:
    before = hashlib.sha256(f"{MODEL}\0generate\0None".encode()).hexdigest()[:16]
    assert needs().engine_key == before, "an instance of the version before is handed on"
    alone = {name: value for name, value in ALL.items() if name != "max_lora_rank"}
    keys = {needs(**{name: value}).engine_key for name, value in alone.items()} | {before}
    assert len(keys) == len(alone) + 1
    assert needs(dtype="half", max_num_seqs=8).engine_key == needs(max_num_seqs=8, dtype="half").engine_key


def fleet(*engines: dict[str, Any]) -> FleetConfig:
    return FleetConfig.model_validate({"engines": list(engines)})


def endpoint(name: str, **written: Any) -> dict[str, Any]:
    return {"name": name, "kind": "endpoint", "url": f"http://127.0.0.1/{name}", "engine": written}


def test_an_engine_of_the_file_is_taken_where_it_was_started_so() -> None:
    wanted = options(reasoning_parser="qwen3", max_num_seqs=8)
    found = fleet(
        endpoint("plain"),
        endpoint("other", reasoning_parser="deepseek_r1"),
        endpoint("right", reasoning_parser="qwen3", kv_cache_dtype="fp8"),
    )
    assert [one.name for one in found.engines_for("m", None, wanted)] == ["right"]
    assert len(found.engines_for("m", None)) == 3, "who asks for nothing takes any"


def test_where_no_engine_was_started_so_the_error_says_what_to_write() -> None:
    with pytest.raises(
        FleetConfigError, match=r"started with \{'reasoning_parser': 'qwen3'\}, found plain without.*`engine:`"
    ):
        fleet(endpoint("plain")).engines_for("m", None, options(reasoning_parser="qwen3"))
    with pytest.raises(FleetConfigError, match="expected one started with"):
        fleet(endpoint("a", dtype="half")).engines_for("m", "http://127.0.0.1/a", options(dtype="bfloat16"))


def test_an_engine_that_is_started_for_a_run_has_what_it_needs_but_for_llama_cpp() -> None:
    found = fleet(
        {"name": "p", "kind": "process"},
        {"name": "l", "kind": "llama_cpp", "models": ["m"], "gguf": "m.gguf"},
    )
    assert [one.name for one in found.engines_for("m", None, options(dtype="half"))] == ["p"]
    with pytest.raises(ValueError, match="engine: expected for kind endpoint or batch_api"):
        fleet({"name": "p", "kind": "process", "engine": {"dtype": "half"}})


# sizing


def served(**how: Any) -> Any:
    config = built_in(MODEL)
    assert config is not None
    return served_as(of_config(MODEL, config, "built in", ""), ServedAs(**how))


def slots(gpu: str = "L4", gib: float = 24, **how: Any) -> int:
    found = place(served(**how), gpu, gib, 1, MIX, 1000)
    assert isinstance(found, Placement), found
    return found.max_num_seqs


def test_an_fp8_cache_holds_twice_the_tokens() -> None:
    assert served(kv_cache_dtype="fp8").facts(800).kv_bytes_per_token == served().facts(800).kv_bytes_per_token / 2
    assert 1.8 <= slots(kv_cache_dtype="fp8") / slots() <= 2.2
    assert slots(kv_cache_dtype="bfloat16") == slots()


@pytest.mark.parametrize(
    ("method", "share"), [("fp8", 0.5), ("bitsandbytes", 0.28), ("awq", 1.0), ("gptq_marlin", 1.0), (None, 1.0)]
)
def test_quantization_shrinks_weights_that_are_not_quantized(method: str | None, share: float) -> None:
    config, plain = served(quantization=method).config, served().config
    unquantized = 2 * 2 * plain.hidden * plain.vocabulary  # embeddings and output head stay
    linear = weight_bytes(plain) - unquantized
    assert (weight_bytes(config) - unquantized) / linear == pytest.approx(share, abs=0.02)


def test_the_dtype_counts() -> None:
    assert isinstance(place(served(dtype="half"), "T4", 24, 1, MIX, 1000), Placement), "T4 has no bfloat16"
    assert not isinstance(place(served(), "T4", 24, 1, MIX, 1000), Placement)
    assert weight_bytes(served(dtype="float32").config) == pytest.approx(2 * weight_bytes(served().config), rel=0.01)


def test_no_more_rows_at_once_than_are_written() -> None:
    assert slots("H100", 80, max_num_seqs=8) == 8
    assert slots("H100", 80, max_num_seqs=4096) < 4096, "as many as fit"
    assert place(served(max_num_seqs=8), "H100", 80, 2, MIX, 1000).slots in (8, 16)


def test_weights_that_are_quantized_already_stay_as_they_are() -> None:
    quantized = served(quantization="fp8")
    assert served_as(quantized, ServedAs(quantization="bitsandbytes")).config == quantized.config


def test_a_dataset_says_it_of_its_model() -> None:
    spec = load_spec({**BASE, "engine": {"kv_cache_dtype": "fp8"}}, "defs.yaml")
    stated = spec.declared(MODEL)
    assert stated is not None and stated.facts is None and stated.served == ServedAs(kv_cache_dtype="fp8")
    assert load_spec(BASE, "defs.yaml").declared(MODEL) is None
    assert PLAIN.served == ServedAs() and GIB


@pytest.mark.parametrize("value", ["{port}", "{model}", "{name}", "{home}", "{gpus}"])
def test_a_word_that_a_provider_would_fill_in_is_refused(value: str) -> None:
    with pytest.raises(Exception, match="expected no word in braces"):
        options(chat_template=f"{{{value}}}")


# adapters

A, B = {"name": "a", "path": "acme/a"}, {"name": "b", "path": "/b"}


def test_datasets_with_adapters_of_one_engine_share_it_and_have_rows_of_their_own() -> None:
    one, other = {"lora": A, "lora_modules": [B]}, {"lora": B, "lora_modules": [A, B]}
    assert needs(**one).engine_key == needs(**other).engine_key != needs(lora=A).engine_key
    assert options(**one).arguments() == options(**other).arguments()
    assert (generation(**one).asked_model, generation(**other).asked_model, generation().asked_model) == (
        "a",
        "b",
        MODEL,
    )
    assert generation(**one) == generation(lora=A), "what else the engine loads changes no row"
    keys = {row_key(generation(**found), []) for found in (one, other, {}, {"lora": {"name": "a", "path": "/b"}})}
    assert len(keys) == 4


def test_an_endpoint_that_has_the_adapter_is_taken() -> None:
    found = fleet(endpoint("plain"), endpoint("both", lora_modules=[A, B]), endpoint("one", lora=A))
    assert [one.name for one in found.engines_for("m", None, options(lora=A))] == ["both", "one"]
    assert [one.name for one in found.engines_for("m", None, options(lora=B))] == ["both"]


def test_adapters_take_memory() -> None:
    plain, adapted = served(), served(loras=4, lora_rank=256)
    assert slots("L4", 24, loras=4, lora_rank=16) < slots("L4", 24)
    assert not isinstance(place(adapted, "L4", 24, 1, MIX, 1000), Placement), "4 adapters of rank 256: 5 GiB"
    assert plain.facts(800) == adapted.facts(800)
    spec = load_spec({**BASE, "engine": {"lora": A, "lora_modules": [A, B]}}, "defs.yaml")
    stated = spec.declared(MODEL)
    assert stated is not None and stated.served == ServedAs(loras=2, lora_rank=16)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"lora": {"name": MODEL.lower(), "path": "/a"}}, "a name of letters"),
        ({"lora": A, "lora_modules": [{"name": "a", "path": "/other"}]}, "one path for each adapter, found two for a"),
        ({"max_lora_rank": 16}, "expected an adapter"),
        ({"lora": A, "max_lora_rank": 17}, "max_lora_rank"),
        ({"lora": {"name": "a"}}, "path"),
    ],
)
def test_adapters_that_cannot_be_are_refused(written: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        options(**written)


def test_an_adapter_has_another_name_than_its_model() -> None:
    with pytest.raises(SpecError, match="another name than the model's"):
        load_spec({**BASE, "model": "a", "engine": {"lora": A}}, "defs.yaml")


@pytest.mark.slow
def test_a_simulated_engine_serves_an_adapter_under_its_name(tmp_path: Path) -> None:
    with dataset_project(tmp_path, engine={"lora": A, "lora_modules": [B]}) as site:
        (tmp_path / "fleet.yaml").write_text("engines: [{name: sim, kind: simulated, speed: 1000}]\n")
        site.source(["What is it?", "And that?"])
        assert site.materialize("prompts").success and site.run_rows("00000", "00000", None).success
        ((found,),) = site.store.objects_by_batch().values()
        outcomes = site.store.outcomes(found)
        assert len(outcomes) == 2 and {one.origin.model for one in outcomes} == {"a (simulated)"}
        assert all(one.ok for one in outcomes)
