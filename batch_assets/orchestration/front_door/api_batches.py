"""The asset `api/batches`: batches of the Batch API, 250 lines to a partition.

`batch-assets serve` generates them and reports each without a run. To materialize a partition in Dagster is to re-drive
it: its lines without an answer are asked for once more, as a new batch of the same tenant. The run makes that batch and
ends; the service's workers generate it.

No postponed annotations here: Dagster reads the classes of resources.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import sqlalchemy as sa

from batch_assets.api.batches.redrive import BatchRedrive, Redrive, RedriveRefused
from batch_assets.api.database.batch_records import BatchRecords
from batch_assets.api.database.file_records import FileRecords
from batch_assets.api.database.service_database import Records
from batch_assets.api.execution.catalog import KEY, PARTITIONS, part_metadata, part_of, partition_of
from batch_assets.api.settings import records_database
from resources.objects.opening import CorruptObject, open_objects
from resources.store.dataset_store import BatchStore


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


MOST_SHOWN = 5


@dg.asset(
    key=KEY,
    partitions_def=dg.DynamicPartitionsDefinition(name=PARTITIONS),
    backfill_policy=dg.BackfillPolicy.single_run(),
    group_name="api",
    kinds={"parquet"},
    output_required=False,
    description="Batches of the Batch API, 250 lines to a partition. `batch-assets serve` generates them. To "
    "materialize partitions asks for their lines without an answer once more, as a new batch of the same tenant.",
)
def api_batches(context: dg.AssetExecutionContext, store: BatchStore) -> Iterator[Any]:
    """Re-drive the partitions of the run. Batches that cannot be are named at the end, after the others."""
    wanted, refused = parts_by_batch(context.partition_keys), []
    with opened_records() as records:
        if records is None:
            raise dg.Failure("expected the records of `batch-assets serve`, found none here", allow_retries=False)
        redrive = BatchRedrive(BatchRecords(records), FileRecords(records), open_objects(store.root))
        for batch_id, keys in wanted.items():
            try:
                found = redrive.redrive(batch_id, keys, context.run.root_run_id or context.run.run_id, int(time.time()))
            except (RedriveRefused, CorruptObject) as error:
                context.log.error(str(error))
                refused.append(str(error))
                continue
            context.log.info(f"batch {batch_id}: {summary(found)}")
            for materialized in materializations(batch_id, found):
                context.log_event(materialized)
    if refused:
        more = f"; and {len(refused) - MOST_SHOWN} more" if len(refused) > MOST_SHOWN else ""
        raise dg.Failure("; ".join(refused[:MOST_SHOWN]) + more, allow_retries=False)
    yield from ()  # Dagster knows what was written from the events


def summary(found: Redrive) -> str:
    """What a re-drive did, without a word of a line."""
    if found.batch_id is None:
        return "every line has its answer"
    return f"lines asked for once more: {sum(part.lines for part in found.parts):,}; as batch {found.batch_id}"


def parts_by_batch(partitions: Iterable[str]) -> Mapping[str, set[str]]:
    """The keys of each batch's parts."""
    found: dict[str, set[str]] = defaultdict(set)
    for partition in partitions:
        batch_id, key = part_of(partition)
        found[batch_id].add(key)
    return found


def materializations(batch_id: str, found: Redrive) -> Iterator[dg.AssetMaterialization]:
    """What the service has said of each part, and where its lines without an answer went."""
    for part in found.parts:
        metadata = part_metadata(batch_id, part.footer) | {"redriven_lines": dg.MetadataValue.int(part.lines)}
        if part.lines and found.batch_id is not None:
            metadata["redriven_as"] = dg.MetadataValue.text(found.batch_id)
        yield dg.AssetMaterialization(KEY, partition=partition_of(batch_id, part.footer.key), metadata=metadata)
