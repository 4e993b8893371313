"""An export with its card to the hub: what the command and the asset of an export do alike.

Figures of the checks are taken once for each version and kept beside the files (`checks.json`); `push.json` says where
the files were pushed last.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, TypeAdapter

from batch_assets.exports.hub_card import CardFacts, hub_card
from batch_assets.exports.hub_push import FOLDER, Pushed, push
from batch_assets.exports.record import ExportRecord
from batch_assets.publishing.derived_table import DerivedStore
from batch_assets.publishing.published_table import PublishedTable, published_table
from batch_assets.publishing.quality import CheckFigure, Thresholds, quality
from batch_assets.spec.exports import PushSpec
from batch_assets.spec.models import ChecksSpec, GeneratedDatasetSpec
from resources.objects.opening import CorruptObject, Objects, temporary_folder
from resources.store.dataset_store import DatasetStore
from resources.store.object_integrity import LARGEST_MANIFEST

CHECKS, PUSH = "checks.json", "push.json"
_FIGURES = TypeAdapter(list[CheckFigure])


class PushRecord(BaseModel):
    """`push.json`: the repository that holds the files, since which commit."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    repo: str
    branch: str
    commit: str


def push_export(
    store: DatasetStore,
    files: Objects,
    record: ExportRecord,
    to: PushSpec,
    spec: GeneratedDatasetSpec | None,
    *,
    pushed_by: Callable[..., Pushed] = push,
) -> Pushed:
    """Push a finished export of a table of `store`. `spec`: of the dataset, where a file declares it.

    Raises ExportError, CorruptObject.
    """
    part = record.dataset.removeprefix(store.dataset).strip("/")
    table = published_table(DerivedStore(store, part) if part else store, record.version)
    if table is None:
        raise CorruptObject(f"{record.dataset}: expected version {record.version}, found none; {store.mended_by_run}")
    manifest = store.manifest(table.snapshot)
    judge = spec if spec is not None and spec.judge is not None and part else None
    facts = CardFacts(
        table,
        manifest.settings(),
        _checked(store, table, files, spec),
        *_declared(spec),
        made_of=store.dataset if part else None,
        judged="" if judge is None else judge.source.dataset or "",
    )
    with temporary_folder() as folder:
        pushed = pushed_by(files, record, hub_card(record, facts, folder=FOLDER), to, folder=folder)
    found = PushRecord(repo=pushed.repo, branch=pushed.branch, commit=pushed.commit)
    if read_push(files) != found:
        files.put(PUSH, found.model_dump_json().encode())
    return pushed


def read_push(files: Objects) -> PushRecord | None:
    """Where the files were pushed last; None: nowhere."""
    try:
        return PushRecord.model_validate_json(files.get(PUSH, LARGEST_MANIFEST))
    except (FileNotFoundError, ValueError):
        return None


def _declared(
    spec: GeneratedDatasetSpec | None,
) -> tuple[tuple[tuple[str, str], ...], str | None, str, tuple[str, ...], tuple[str, ...]]:
    """Templates, licence, description, owners and tags of a file."""
    if spec is None:
        return (), None, "", (), ()
    templates = tuple((role, text) for _, role, text in spec.prompt.templates())
    tags = tuple(f"{key}:{value}" for key, value in spec.tags.items())
    return templates, spec.license, spec.description or "", tuple(spec.owners), tags


def _checked(
    store: DatasetStore, table: PublishedTable, files: Objects, spec: GeneratedDatasetSpec | None
) -> list[CheckFigure]:
    """Figures of the dataset's own table, of which another one was made; none where that is gone."""
    try:
        return _FIGURES.validate_json(files.get(CHECKS, LARGEST_MANIFEST))
    except (FileNotFoundError, ValueError):
        pass
    whole = table if table.dataset == store.dataset else published_table(store)
    if whole is None or whole.snapshot != table.snapshot:
        return []
    checks = ChecksSpec() if spec is None else spec.checks
    bounds = Thresholds(**{name: getattr(checks, name) for name in ChecksSpec.model_fields})
    found = quality(store, whole, store.manifest(whole.snapshot), bounds)
    files.put(CHECKS, _FIGURES.dump_json(found))
    return found
