"""Reads a model's config.json and safetensors index: from a folder, the hub's local cache or, over HTTPS, the hub.

Only these two small files are read, never weights, and with the standard library alone.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from gpu_runner.bounded_http.bounded_read import check_values
from gpu_runner.bounded_http.small_pages import read_file, read_page
from gpu_runner.models.model_config import CONFIG, INDEX, ModelConfig, parse
from gpu_runner.models.quantization import ModelConfigError

HUB = "https://huggingface.co"
# The largest index on the hub, of DeepSeek-V3, has 9 MB.
LARGEST_FILE = 32 << 20


class ModelFilesUnreadable(ModelConfigError):
    """The files cannot be read: no such folder, no access, no network, not JSON."""


def read_folder(folder: Path | str) -> ModelConfig:
    """Model in a local folder with config.json and, when sharded, its safetensors index."""
    config = _parse(_file(Path(folder) / CONFIG), str(Path(folder) / CONFIG))
    index_file = Path(folder) / INDEX
    index = _parse(_file(index_file), str(index_file)) if index_file.exists() else None
    return parse(config, index, where=str(Path(folder) / CONFIG))


def cached_folder(model: str) -> Path | None:
    """Folder of a hub model ("owner/name") in the Hugging Face cache of this machine; None when it is not there.

    Layout and variables as in huggingface_hub's documentation: `models--owner--name/snapshots/<commit>`, the newest
    commit named in `refs/main`.
    """
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub"
    folder = Path(hub).expanduser() / f"models--{model.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / read_file(folder / "refs" / "main", 1024).decode().strip()
        return snapshot if (snapshot / CONFIG).is_file() else None
    except (OSError, ValueError):
        return None


def read_hub(
    model: str, *, revision: str = "main", token: str | None = None, hub: str = HUB, seconds: float = 20.0
) -> ModelConfig:
    """Model on the hub ("owner/name"). `token` defaults to HF_TOKEN; `seconds` bounds each of the two requests."""
    token = token or os.environ.get("HF_TOKEN")
    base = f"{hub.rstrip('/')}/{model}/resolve/{revision}/"
    found = _download(base + CONFIG, token, seconds)
    if found is None:
        advice = "Check the model's name and revision; a model of GGUF files alone has none."
        raise ModelFilesUnreadable("config.json", "no such file (404)", base + CONFIG, advice)
    index = _download(base + INDEX, token, seconds)
    return parse(
        _parse(found, base + CONFIG),
        _parse(index, base + INDEX) if index is not None else None,
        where=base + CONFIG,
    )


def _file(path: Path) -> bytes:
    try:
        return read_file(path, LARGEST_FILE)
    except OSError as error:
        advice = "Name the folder that holds the model's config.json."
        raise ModelFilesUnreadable("a readable file", error.strerror or "none", str(path), advice) from error


def _parse(text: bytes, where: str) -> dict[str, Any]:
    try:
        check_values(text, 0)
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFilesUnreadable("JSON", str(error), where, "Download the file again.") from error
    if isinstance(parsed, dict):
        return parsed
    raise ModelFilesUnreadable("a JSON object", type(parsed).__name__, where, "Download the file again.")


def _download(url: str, token: str | None, seconds: float) -> bytes | None:
    """Body of a GET, None for 404. The token goes to the first host only, never along a redirect."""
    request = urllib.request.Request(url, headers={"User-Agent": "batch-assets"})
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return read_page(answer, LARGEST_FILE, seconds)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            gated = "Accept the model's licence on the hub and set HF_TOKEN." if error.code in (401, 403) else ""
            advice = gated or "Try again later, or name a local folder."
            raise ModelFilesUnreadable("status 200", f"status {error.code}", url, advice) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        advice = "Without access to the hub, name a local folder that holds the model's config.json."
        raise ModelFilesUnreadable("an answer from the hub", str(error)[:200], url, advice) from error
