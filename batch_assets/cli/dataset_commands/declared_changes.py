"""What the file of a dataset and its source ask for by now, held against the snapshot: before a run is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batch_assets.orchestration.source_place import at_its_place
from batch_assets.request_status.dataset_status import Observer
from batch_assets.snapshot.builder import rows_to_ask
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.models import GeneratedDatasetSpec
from resources.objects.opening import temporary_folder


@dataclass(frozen=True, slots=True)
class DeclaredChanges:
    """`rows` that are new, or whose request is not that of the snapshot. `problem`: why that cannot be told."""

    rows: int = 0
    problem: str = ""

    @classmethod
    def look(cls, spec: GeneratedDatasetSpec, folder: Path, seen: Observer) -> DeclaredChanges:
        """Reads the whole source, and writes nothing. `folder`: where its relative paths start."""
        try:
            spec = at_its_place(spec, seen.instance, seen.store.objects)
            with temporary_folder() as workdir:
                return cls(rows_to_ask(spec, seen.store, workdir=workdir, base=folder) or 0)
        except SourceError as error:
            return cls(problem=str(error))

    def lines(self, dataset: str) -> list[str]:
        """For people; none where nothing has changed."""
        if self.problem:
            return [f"{dataset}: its source cannot be compared with the snapshot: {self.problem}"]
        if not self.rows:
            return []
        rows = "1 row is" if self.rows == 1 else f"{self.rows:,} rows are"
        todo = f"`batch-assets run {dataset}` would ask for them"
        return [f"{dataset}: {rows} new, or changed in the file or its source since the snapshot: {todo}"]
