"""An image of the simulated engine, made of this machine's own Python: no registry, no Docker, some seconds.

It holds the interpreter, its library, the shared libraries that they load, what the simulator imports, and gpu_runner,
all at the paths that they have here. The format is that of `docker save` (Docker Image Specification v1.2).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

from support.documents import REPOSITORY

IMAGE = "batch-assets-test-engine:1"
PACKAGES = ("aiohttp", "orjson")
_LEFT_OUT = {"test", "tests", "idlelib", "tkinter", "ensurepip", "site-packages", "lib2to3", "turtledemo"}


def engine_command(more: str = "--speed 60") -> list[str]:
    """The command line of the simulator in the image; further words of the order are taken and left aside.

    `more`: its further options, as a shell reads them.
    """
    words = f"{Path(sys.executable).resolve()} -m gpu_runner.simulator --host 0.0.0.0 --api-key-env VLLM_API_KEY"
    return ["/bin/sh", "-c", f'exec {words} {more} --model "$0" --port "$1"', "{model}", "{port}"]


def write_engine_image(file: Path) -> None:
    """Write the image as a tar file for `docker load` or `ctr image import`."""
    layer = _layer()
    digest = hashlib.sha256(layer).hexdigest()
    site, library = sysconfig.get_path("purelib"), Path(sysconfig.get_config_var("LIBDIR"))
    environment = [f"PYTHONPATH={REPOSITORY}:{site}", f"LD_LIBRARY_PATH={library}", "PYTHONDONTWRITEBYTECODE=1"]
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": [*environment, "PATH=/bin:/usr/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    with tarfile.open(file, "w") as image:
        for name, content in (
            ("config.json", config),
            ("layer.tar", layer),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            image.addfile(entry, io.BytesIO(content))


def _layer() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as layer:
        known: set[str] = set()
        for path in _files():
            _add(layer, path, known)
        for folder in ("tmp", "cache"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            layer.addfile(entry)
    return made.getvalue()


def _add(layer: tarfile.TarFile, path: Path, known: set[str]) -> None:
    """The file at its own path, for everybody to read, as what it is after links were followed; and its folders."""
    for folder in reversed(path.parents[:-1]):
        if str(folder) not in known:
            known.add(str(folder))
            entry = tarfile.TarInfo(str(folder)[1:])
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            layer.addfile(entry)
    if str(path) in known:
        return
    known.add(str(path))
    content = path.read_bytes()
    entry = tarfile.TarInfo(str(path)[1:])
    entry.size, entry.mode = len(content), 0o755
    layer.addfile(entry, io.BytesIO(content))


def _files() -> Iterator[Path]:
    python, shell = Path(sys.executable).resolve(), Path("/bin/sh")
    code = [*_library(), *_distributions(), *sorted((REPOSITORY / "gpu_runner").rglob("*.py"))]
    binaries = [python, shell, *(path for path in code if ".so" in path.suffixes)]
    yield from (python, shell, *code, *sorted(_shared_libraries(binaries)))


def _library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = sorted(root.rglob("*.py")) + sorted((root / "lib-dynload").glob("*.so"))
    return [path for path in found if not _LEFT_OUT & set(path.relative_to(root).parts)]


def _distributions() -> list[Path]:
    """Files of the packages and of what they require."""
    names, done = list(PACKAGES), set()
    found = []
    while names:
        name = names.pop()
        if name in done:
            continue
        done.add(name)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # wanted by other versions of Python only
        found += [Path(str(one.locate())) for one in package.files or () if one.suffix in (".py", ".so")]
        plain = [one for one in package.requires or () if "extra ==" not in one]
        names += [match[0] for one in plain if (match := re.match(r"[\w.-]+", one))]
    return [path for path in found if path.is_file()]


def _shared_libraries(binaries: list[Path]) -> set[Path]:
    said = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    return {Path(path) for path in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", said, re.MULTILINE)}
