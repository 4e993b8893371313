"""Engines of SGLang: how each provider starts one, and what is asked of it. SGLang itself is not here: what stands for
it takes the arguments that its documentation names, and no others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_kubernetes import OFFER
from support.machines import ended_machines, first_offer, local_provider

from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import load_spec
from gpu_runner.client.engine_client import EngineClient
from gpu_runner.models.facts import Placement
from gpu_runner.providers.base import EngineOrder, ProviderError
from gpu_runner.providers.cloud.engine_container import container_image, container_words
from gpu_runner.providers.ec2.ssh_keys import ssh_keys
from gpu_runner.providers.ec2.user_data import Boot, user_data
from gpu_runner.providers.engine_process import free_port
from gpu_runner.providers.kubernetes.config import KubernetesProviderConfig
from gpu_runner.providers.kubernetes.manifests import pod_manifest
from gpu_runner.providers.runpod.config import RunPodConfig
from gpu_runner.providers.runpod.pod_watch import activity
from gpu_runner.providers.runpod.pods import pod_order
from gpu_runner.providers.sglang_server import SGLANG_ENTRY, SGLANG_WORDS
from gpu_runner.providers.ssh.config import SshProviderConfig
from gpu_runner.rows import Generation, row_key
from resources.engine_options import EngineOptions
from resources.fleet.fleet_config import EngineConfig

FOLDER = Path(__file__).parents[2] / "fixtures" / "sglang"
SEEN = {"PYTHONPATH": str(FOLDER)}
BASE = {"name": "d", "source": {"grid": {"t": ["a"]}}, "prompt": {"user": "{{ t }}"}, "model": "m"}
ALL: dict[str, Any] = {
    "server": "sglang",
    "reasoning_parser": "qwen3",
    "tool_call_parser": "qwen25",
    "quantization": "fp8",
    "kv_cache_dtype": "fp8_e5m2",
    "dtype": "bfloat16",
    "tokenizer": "acme/tokenizer",
    "chat_template": "/templates/own.jinja",
    "max_num_seqs": 64,
    "pipeline_parallel_size": 2,
    "enable_prefix_caching": False,
    "limit_mm_per_prompt": {"image": 2},
}
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJn0nNbIkjkNUAMoVOZ8I1Hn4IGtKFv7zT0y0mKm0sGT"


def options(**written: Any) -> EngineOptions:
    return load_spec({**BASE, "engine": written}, "defs.yaml").engine


def page(url: str, key: str | None = None) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return json.loads(answer.read() or b"null")


@pytest.mark.slow
def test_every_argument_has_sglangs_name_and_is_taken(tmp_path: Path) -> None:
    words = (*Placement(2, 3, 48, 4096).arguments("sglang"), *options(**ALL).arguments())
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_machines(tmp_path))
        provider = local_provider(tmp_path, environment=SEEN)
        provider.create(first_offer(provider), "ba-1", EngineOrder("m", "chat", 144, words, "sglang"))
        machine = provider.wait_ready("ba-1", 60, lambda seconds: None)
        assert machine.endpoint is not None
        given = page(f"{machine.endpoint}/get_server_info")
        assert page(f"{machine.endpoint}/get_model_info") == {"model_path": "m", "is_generation": True}
        asyncio.run(_asked(machine.endpoint))
    expected = {"tensor_parallel_size": 2, "data_parallel_size": 3, "pipeline_parallel_size": 2, "context_length": 4096}
    expected |= {"max_running_requests": 48, "kv_cache_dtype": "fp8_e5m2", "quantization": "fp8", "dtype": "bfloat16"}
    expected |= {"reasoning_parser": "qwen3", "tool_call_parser": "qwen25", "tokenizer_path": "acme/tokenizer"}
    expected |= {"chat_template": "/templates/own.jinja", "disable_radix_cache": True, "enable_metrics": True}
    expected |= {"limit_mm_data_per_request": {"image": 2}}
    assert {name: given[name] for name in expected} == expected


async def _asked(endpoint: str) -> None:
    """The hand shake, a request with each form, and the load."""
    texts = []
    for structured in ({"choice": ["a.b", "c|d"]}, {"regex": "[0-9]{4}"}, {"grammar": 'root ::= "a"'}, None):
        generation = Generation("chat", "m", {"max_tokens": 5}, structured_outputs=structured)
        async with EngineClient(endpoint, generation) as client:
            info = await client.info()
            texts.append((await client.generate(b'[{"role":"user","content":"q"}]')).output)
            load = await client.load()
    assert texts == [r"(a\.b)|(c\|d)", "[0-9]{4}", "None", "None"]
    assert (info.max_model_len, info.simulated) == (4096, False)
    assert load is not None
    assert (load.running, load.waiting, load.kv_usage, load.progress) == (62, 26, 0.28, 700)


@contextlib.contextmanager
def started(command: tuple[str, ...], port: int, key: str) -> Iterator[subprocess.Popen[bytes]]:
    words = [word.replace("{port}", str(port)).replace("{model}", "m") for word in command]
    process = subprocess.Popen(words, env={**os.environ, **SEEN, "VLLM_API_KEY": key}, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_key_is_asked_for_and_stands_on_no_command_line(tmp_path: Path) -> None:
    command, end = ssh().commands("sglang")
    assert end == ()
    key, port = "sk-of-the-engine", free_port()
    url = f"http://127.0.0.1:{port}"
    with started(command, port, key) as process:
        for _ in range(200):
            with contextlib.suppress(OSError):
                page(f"{url}/health")
                break
            time.sleep(0.05)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            page(f"{url}/v1/models")
        assert page(f"{url}/v1/models", key)["data"][0]["owned_by"] == "sglang"
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"sglang.launch_server" in shown and key.encode() not in shown


def ssh(**settings: Any) -> SshProviderConfig:
    host = {"name": "a", "address": "10.0.0.5", "gpu": "A100", "gpu_memory_gib": 80, "host_keys": [KEY]}
    return SshProviderConfig.model_validate({"hosts": [host], "key_env": "KEY", **settings})


def test_hosts_start_it_in_a_container_where_there_is_an_image() -> None:
    both = ssh(docker_image="acme/vllm", sglang_image="acme/sglang")
    command, end = both.commands("sglang")
    assert command[:2] == ("docker", "run") and end[0] == "sh"
    at = command.index("acme/sglang")
    assert command[at - 2 : at] == ("--entrypoint", "sh") and command[at + 1 : at + 4] == SGLANG_ENTRY[1:]
    assert command[-4:] == ("--host", "0.0.0.0", "--port", "8000")
    assert both.commands("vllm") == (both.engine_command, both.engine_end_command)
    assert ssh(docker_image="acme/vllm").commands("sglang")[0] == ()
    own = ("/opt/run", "{port}")
    assert ssh(docker_image="acme/vllm", sglang_command=own).commands("sglang") == (own, ())
    with pytest.raises(ValueError, match="sglang_command: expected"):
        ssh(sglang_command=("x",))
    with pytest.raises(ValueError, match="not both"):
        ssh(sglang_command=own, sglang_image="acme/sglang")


def test_pods_and_vms_start_it_from_its_image() -> None:
    order = EngineOrder("org/model", "chat", 16, ("--tp-size", "2"), "sglang")
    kubernetes = KubernetesProviderConfig.model_validate({"name": "pods", "offers": [OFFER]})
    (container,) = pod_manifest(kubernetes, kubernetes.offers[0], "ba-1", order)["spec"]["containers"]
    assert container["image"] == "lmsysorg/sglang:latest"
    assert container["command"][-4:] == ["--max-running-requests", "16", "--tp-size", "2"]
    assert container["command"][2] == SGLANG_ENTRY[2].replace("$", "$$")  # the kubelet makes one of two
    words = container_words(("--vllm",), order)
    assert words == ("--model-path", "org/model", *SGLANG_WORDS[2:-1], "8000", *order.words)
    with pytest.raises(ProviderError, match="sglang_image: expected an image of SGLang"):
        container_image("acme/vllm", None, order)
    assert container_image("acme/vllm", "acme/sglang", order) == "acme/sglang"
    boot = Boot("acme/sglang", words, {}, ssh_keys("s" * 64, "ba-1"), 60.0, SGLANG_ENTRY)
    document = json.loads(user_data(boot).split("\n", 1)[1])
    unit = next(one["content"] for one in document["write_files"] if "ExecStart=" in one["content"])
    (line,) = [one for one in unit.splitlines() if one.startswith("ExecStart=")]
    wanted = ["--entrypoint", "sh", "acme/sglang", *SGLANG_ENTRY[1:], *words]
    assert shlex.split(line.replace("$$", "$").replace("%%", "%"))[-len(wanted) :] == wanted
    gpu = {"gpu_type": "NVIDIA H100 PCIe", "gpu": "H100", "gpu_memory_gib": 80}
    runpod = RunPodConfig.model_validate({"engine_image": "acme/vllm", "gpus": [gpu]})
    body = pod_order(runpod, runpod.gpus[0], "ba-1", "acme/sglang", (*SGLANG_ENTRY, *words), {}, 16)
    assert body["imageName"] == "acme/sglang" and body["dockerStartCmd"][2:] == [*SGLANG_ENTRY, *words]
    assert activity('sglang:prompt_tokens_total{a="b"} 3\nsglang:num_queue_reqs{a="b"} 1\n') == (3.0, True)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "no such key beside server: sglang"),
        ({"lora": {"name": "a", "path": "/a"}}, "engine.lora: expected no such key beside server: sglang"),
        ({"lora_modules": [{"name": "a", "path": "/a"}]}, "engine.lora_modules: expected no such key"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: expected for server: sglang one of auto, bfloat16, fp8_e4m3"),
        ({"tool_call_parser": "hermes"}, "tool_call_parser: expected for server: sglang one of deepseekv3"),
        ({"reasoning_parser": "deepseek_r1"}, "reasoning_parser: expected for server: sglang one of deepseek-r1"),
        ({"quantization": "fp_quant"}, "quantization: expected for server: sglang one of"),
        ({"chat_template": "{{ messages }}"}, "chat_template: expected an absolute path beside server: sglang"),
        ({"trust_remote_code": True}, "an argument that loads no code"),
        ({"nnodes": 2}, "engine.nnodes"),
    ],
)
def test_what_sglang_has_not_is_refused_when_the_file_is_read(written: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        options(server="sglang", **written)
    assert said in str(caught.value)


def test_other_servers_and_tasks_are_refused() -> None:
    with pytest.raises(SpecError, match=r"engine.server"):
        options(server="tgi")
    score = {**BASE, "task": "score", "prompt": {"query": "{{ t }}", "document": "b"}, "engine": {"server": "sglang"}}
    with pytest.raises(SpecError, match=r"engine.server: expected vLLM for this task"):
        load_spec(score, "defs.yaml")


def test_the_server_is_a_part_of_what_a_row_is_and_vllm_is_as_before() -> None:
    plain = load_spec(BASE, "defs.yaml").generation()
    said = load_spec({**BASE, "engine": {"server": "vllm"}}, "defs.yaml").generation()
    other = load_spec({**BASE, "engine": {"server": "sglang"}}, "defs.yaml").generation()
    assert row_key(plain, "p") == row_key(said, "p") != row_key(other, "p")
    assert options(server="sglang").missing(options()) == ["server"]
    assert options(server="sglang").missing(options(server="sglang")) == []
    assert options(**ALL).for_simulator.arguments()[0] == "--reasoning-parser=qwen3"


def test_a_process_of_fleet_yaml_takes_the_arguments_of_its_own_server() -> None:
    vllm = EngineConfig(name="a", kind="process")
    sglang = EngineConfig(name="b", kind="process", command=["python3", "-m", "sglang.launch_server", "{port}"])
    assert vllm.lacks(options(server="sglang")) == ["server"] and sglang.lacks(options(dtype="half")) == ["server"]
    assert vllm.lacks(options(dtype="half")) == sglang.lacks(options()) == sglang.lacks(options(server="sglang")) == []
