"""Files of evaluations that rules of `filter` compare with: they are looked at before a row is asked."""

from __future__ import annotations

from pathlib import Path

from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.reader import read_source
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.source import SourceSpec


def check_evaluation_files(spec: GeneratedDatasetSpec, base: Path) -> None:
    """Read the first rows of each file of `overlap`, which the filter reads when all rows are made. `base`: where
    relative paths begin. Raises SourceError with the key of the rule.
    """
    for name, rule in (spec.filter or {}).items():
        if rule.overlap is None:
            continue
        try:
            next(iter(read_source(SourceSpec(path=rule.overlap.files), [rule.overlap.text], base)), None)
        except SourceError as error:
            raise SourceError(f"filter.{name}.overlap: {error}") from error
