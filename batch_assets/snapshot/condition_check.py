"""Conditions on rows that are made, held against the types that kept columns have in the source: before a row is asked.

A spec is held against all other types when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from batch_assets.snapshot.source.errors import ConditionError
from batch_assets.spec.errors import Unusable
from batch_assets.spec.models import GeneratedDatasetSpec, check_condition_types


def check_conditions(spec: GeneratedDatasetSpec, kept: Iterable[pa.Field]) -> None:
    """`kept`: the kept columns whose types are known. Raises ConditionError with the key of it."""
    try:
        check_condition_types(spec, {item.name: item.type for item in kept})
    except Unusable as error:
        raise ConditionError(f"{error.key}: {error}. {error.hint}") from error
