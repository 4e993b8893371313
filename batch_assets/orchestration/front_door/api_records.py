"""Opens the records of `batch-assets serve` for assets and sensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from batch_assets.api.database.service_database import Records
from batch_assets.api.settings import records_database


@contextlib.contextmanager
def opened_records() -> Iterator[Records | None]:
    """The front door's records of this DAGSTER_HOME; None where none was ever started."""
    database = records_database()
    url = sa.make_url(database)
    if url.get_backend_name() == "sqlite" and not (url.database and Path(url.database).exists()):
        yield None
        return
    with contextlib.closing(Records(database)) as records:
        yield records
