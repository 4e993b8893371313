"""Folders of datasets for tests: good files, and every kind of file that cannot be used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

COMPONENT = "batch_assets.GeneratedDataset"


def attributes(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "source": {"grid": {"x": ["a", "b"]}},
        "prompt": {"user": "{{ x }}"},
        "model": "m",
        **more,
    }


def write(folder: Path, name: str, kind: str = COMPONENT, **more: Any) -> Path:
    """A dataset in a folder of its name; returns its file."""
    return write_text(folder / name, yaml.safe_dump({"type": kind, "attributes": attributes(name, **more)}))


def write_text(folder: Path, text: str | bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "defs.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def without(defs: Path, key: str) -> None:
    found = attributes("bad")
    del found[key]
    write_text(defs / "bad", yaml.safe_dump({"type": COMPONENT, "attributes": found}))


def link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


# What is wrong with `bad`, how it comes about, and a word of what is said.
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no source": (lambda defs: without(defs, "source"), "source: expected a value"),
    "a misspelt type": (lambda defs: write(defs, "bad", "batch_assets.GenratedDataset"), "Did you mean"),
    "a misspelt package": (lambda defs: write(defs, "bad", "batchassets.GeneratedDataset"), "Did you mean"),
    "a source that is not declared": (
        lambda defs: write(defs, "bad", source={"dataset": "goodd"}),
        "source.dataset: expected the name of a declared dataset",
    ),
    "no type": (lambda defs: write_text(defs / "bad", "attributes: {name: bad}\n"), "type: expected"),
    "a misspelt key beside the type": (
        lambda defs: write_text(defs / "bad", f"type: {COMPONENT}\natributes: {{name: bad}}\n"),
        "Did you mean 'attributes'",
    ),
    "no YAML": (lambda defs: write_text(defs / "bad", "type: [\n"), "expected YAML"),
    "a list": (lambda defs: write_text(defs / "bad", "- a\n"), "a mapping with type and attributes"),
    "nothing": (lambda defs: write_text(defs / "bad", "# later\n"), "a mapping with type and attributes"),
    "no UTF-8": (lambda defs: write_text(defs / "bad", b"type: \xff\xfe\n"), "UTF-8"),
    "a folder in place of the file": (lambda defs: (defs / "bad" / "defs.yaml").mkdir(parents=True), "a folder"),
    "a link to itself": (lambda defs: link(defs / "bad" / "defs.yaml", "defs.yaml"), "symbolic links"),
    "a link to nothing": (lambda defs: link(defs / "bad" / "defs.yaml", "/nowhere/defs.yaml"), "No such file"),
    "a folder that is a link to itself": (lambda defs: link(defs / "bad", "bad"), "symbolic links"),
    "a folder that is a link to the folder around it": (lambda defs: link(defs / "bad", "."), "this link: expected"),
    "a name used twice": (
        lambda defs: write_text(defs / "bad", (defs / "good" / "defs.yaml").read_text()),
        "name: expected a name of its own, found 'good'",
    ),
}


def own_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `batch_assets/defs` of another project in place of ours: Dagster's own loader reads it."""
    from batch_assets import dataset_loading, settings

    defs = project / "batch_assets" / "defs"
    defs.mkdir(parents=True)
    module = f"defs_of_{abs(hash(str(project)))}"
    link(project / "batch_assets" / module, "defs")
    config = f'[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "{module}"\n'
    (project / "pyproject.toml").write_text(f'{config}defs_module = "{module}"\n')
    monkeypatch.syspath_prepend(str(project / "batch_assets"))
    monkeypatch.delenv("BATCH_ASSETS_DEFS", raising=False)
    monkeypatch.setattr(settings, "PROJECT", project)
    monkeypatch.setattr(dataset_loading, "PACKAGE", project / "batch_assets")
    importlib.invalidate_caches()
    assert module not in sys.modules
    return defs
