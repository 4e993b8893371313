"""What the file of a dataset and its source ask for by now, held against the snapshot: before a run is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batch_assets.orchestration.source_place import at_its_place, older_part
from batch_assets.request_status.dataset_status import Observer
from batch_assets.snapshot.builder import changed_rows, removed_rows
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.models import GeneratedDatasetSpec
from resources.objects.opening import CorruptObject, temporary_folder


@dataclass(frozen=True, slots=True)
class DeclaredChanges:
    """`rows` that are new, or whose request is not that of the snapshot; `removed`: rows of it that the source does not
    have any more. `problem`: why that cannot be told; `stops`: whether a run would end with it. `older`: that what it
    reads of another dataset is of an older table there."""

    rows: int = 0
    removed: int = 0
    problem: str = ""
    stops: bool = False
    older: str = ""

    @classmethod
    def look(cls, spec: GeneratedDatasetSpec, folder: Path, seen: Observer) -> DeclaredChanges:
        """Reads the whole source, and writes nothing. `folder`: where its relative paths start."""
        try:
            older = older_part(spec.source, seen.store.objects)
            spec = at_its_place(spec, seen.instance, seen.store.objects)
            with temporary_folder() as workdir:
                counts = changed_rows(spec, seen.store, workdir=workdir, base=folder)
            if counts is None:
                return cls(older=older)
            return cls(counts.to_ask, removed_rows(spec, counts), older=older)
        except (SourceError, CorruptObject) as error:
            return cls(problem=str(error), stops=isinstance(error, SourceError))

    def lines(self, dataset: str) -> list[str]:
        """For people; none where nothing has changed."""
        if self.problem:
            return [f"{dataset}: its source cannot be compared with the snapshot: {self.problem}"]
        lines, run = [f"{dataset}: {self.older}"] if self.older else [], f"`batch-assets run {dataset}` would"
        if self.rows:
            rows = "1 row is" if self.rows == 1 else f"{self.rows:,} rows are"
            since = "new, or changed in the file or its source since the snapshot"
            lines.append(f"{dataset}: {rows} {since}: {run} ask for them")
        if self.removed:
            rows = "1 row is" if self.removed == 1 else f"{self.removed:,} rows are"
            lines.append(f"{dataset}: {rows} in the table and no longer in its source: {run} remove them")
        return lines
