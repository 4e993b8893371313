"""Real vLLM (its CPU build) with a real small model in engine pods, from this machine's own environment of it.

The environment, the model and the shared libraries lie in a claim that every pod mounts, so the image stays the small
one of `engine_image`: it has the same Python.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from support.engine_image import IMAGE, engine_command
from support.kubernetes_cluster import OFFER, RealCluster
from support.real_models import smollm2, write_smollm2

CLAIM = "vllm"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FACTS = {"weights_gib": 0.5, "active_billions": 0.135, "kv_bytes_per_token": 46_080, "context": 1024}
MOUNTED = Path("/cache/huggingface")
SITE, LIBRARIES, PROGRAMS, WEIGHTS = "site-packages", "lib", "bin", "smollm2"
_LIBRARY = re.compile(r"=> (/\S+) \(0x")


def fill_claim(folder: Path, python: str) -> None:
    """Write what a pod needs into the claim's folder: vLLM's packages (links where they can be), libraries, weights.

    python: of vLLM's environment; it must be the version of Python that the engine's image has.
    """
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    if subprocess.run(["cp", "-al", packages, folder / SITE], capture_output=True).returncode:
        shutil.rmtree(folder / SITE, ignore_errors=True)
        shutil.copytree(packages, folder / SITE, symlinks=True)
    (folder / PROGRAMS).mkdir()
    (folder / LIBRARIES).mkdir()
    lscpu = shutil.which("lscpu")
    assert lscpu, "vLLM asks lscpu for the cores"
    shutil.copy(lscpu, folder / PROGRAMS)
    binaries = [lscpu, *map(str, packages.rglob("*.so*"))]
    said = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    for library in {Path(one) for one in _LIBRARY.findall(said)}:
        if not library.is_relative_to(packages):
            shutil.copy(library, folder / LIBRARIES / library.name)
    write_smollm2(smollm2(), folder / WEIGHTS)
    for file in folder.rglob("*"):
        if not file.is_symlink() and not file.is_relative_to(folder / SITE):
            file.chmod(0o755)


def vllm_provider(namespace: str) -> dict[str, Any]:
    """fleet.yaml's entry: pods of vLLM's CPU build, with what the claim holds."""
    python = engine_command()[2].split()[1]
    serve = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MOUNTED / WEIGHTS)]
    serve += ["--served-model-name", "{model}", "--host", "0.0.0.0", "--port", "{port}"]
    serve += ["--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 29)]
    return {
        "name": "cluster",
        "namespace": namespace,
        "image": IMAGE,
        "command": serve,
        "environment": {
            "PYTHONPATH": str(MOUNTED / SITE),
            "LD_LIBRARY_PATH": f"{Path(python).parents[1] / 'lib'}:{MOUNTED / LIBRARIES}",
            "PATH": f"{MOUNTED / PROGRAMS}:/bin:/usr/bin",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        "model_cache_claim": CLAIM,
        "cache_size": "200Mi",
        "shared_memory": "512Mi",
        "notice_seconds": 4,
        "offers": [{**OFFER, "cpu": "500m", "memory": "6Gi", "boot_seconds": 60}],
    }


def real_model(cluster: RealCluster, namespace: str, python: str) -> dict[str, Any]:
    """The claim in the namespace, filled; returns the provider's entry."""
    fill_claim(cluster.claim(CLAIM, namespace), python)
    return vllm_provider(namespace)
