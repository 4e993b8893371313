"""A dataset that is declared in Python: the keys of a defs.yaml as arguments, held to the same checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batch_assets.spec.models import GeneratedDatasetSpec, load_spec

if TYPE_CHECKING:
    import polars as pl

Source = "pl.LazyFrame | pl.DataFrame | str | Path | Mapping[str, Any]"


def dataset_spec(
    name: str,
    source: pl.LazyFrame | pl.DataFrame | str | Path | Mapping[str, Any],
    prompt: str | Mapping[str, Any],
    model: str,
    **keys: Any,
) -> GeneratedDatasetSpec:
    """A checked spec. `keys`: any other key of a defs.yaml, as `sampling={"temperature": 0}`.

    `source`: a frame, which is written to a file in DAGSTER_HOME; a path or address; or the mapping of a defs.yaml, as
    {"grid": {"city": ["Rome", "Oslo"]}}. Relative paths start at the current folder. `prompt`: a Jinja template over
    the columns, which is the user's message (or the text, where the task is not chat), or the mapping of a defs.yaml.
    Raises SpecError that names every wrong place.
    """
    import polars as pl

    asked = ({"user": prompt} if keys.get("task", "chat") == "chat" else {"text": prompt}) if _text(prompt) else prompt
    attributes = {"name": name, "prompt": asked, "model": model, **keys}
    framed = isinstance(source, pl.DataFrame | pl.LazyFrame)
    # Everything else is checked before a frame is written.
    given = {"path": "frame.parquet"} if framed else _mapping(source)
    spec = load_spec(attributes | {"source": given}, f"dataset {name!r:.80}")
    if not framed:
        return spec
    from batch_assets.from_python.frame_files import write_frame

    assert isinstance(source, pl.DataFrame | pl.LazyFrame)
    file = write_frame(spec.name, source)
    return spec.model_copy(update={"source": spec.source.model_copy(update={"path": str(file)})})


def _text(prompt: object) -> bool:
    return isinstance(prompt, str)


def _mapping(source: Any) -> Any:
    """What stands below `source:` of a defs.yaml, with whole paths."""
    if isinstance(source, str | Path):
        source = {"path": str(source)}
    if not isinstance(source, Mapping):
        return source  # the check says what is wrong
    found = dict(source)
    path = found.get("path")
    if isinstance(path, str | Path) and path and "://" not in str(path):
        found["path"] = str(Path(path).expanduser().absolute())
    return found
