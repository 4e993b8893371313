"""The catalog as ledger, against a real Dagster instance: these fail when Dagster changes what we lean on."""

import dagster as dg
from dagster._core.definitions import data_version as dagster_data_version
from dagster._core.storage import tags as dagster_tags
from support.engine_supply import OFFER

from batch_assets.catalog import ledger
from batch_assets.gates.quality_gates import GateTrip, Stretch
from batch_assets.orchestration.capacity_report import done_event
from batch_assets.tags import (
    CODE_VERSION_TAG,
    DATA_VERSION_TAG,
    INPUT_DATA_VERSION_TAG,
    INPUT_EVENT_POINTER_TAG,
    PARTITION_TAG,
    RANGE_END_TAG,
    RANGE_START_TAG,
    RETRY_RUN_TAG,
    USER_PROVIDED_TAG,
    WILL_RETRY_TAG,
)
from gpu_runner.fleet_database.capacity_plan import CapacityMemory, RequestSummary
from gpu_runner.fleet_database.database import Lease
from gpu_runner.fleet_database.targets import DatasetTarget
from resources.fleet.leased_engine import LeasedEngine
from resources.objects.opening import open_objects
from resources.store.dataset_store import BatchFooter, DatasetStore

FOOTER = BatchFooter(
    dataset="d",
    key="00001",
    snapshot="s1",
    data_version="0123456789abcdef",
    generation=2,
    epoch=1,
    run_id="run",
    root_run_id="run",
    rows=250,
    ok=249,
    dead=1,
    prompt_tokens=1000,
    completion_tokens=2000,
    seconds=4.0,
    model="m (simulated)",
    engine="e",
)


def test_our_names_of_dagsters_tags_are_dagsters():
    assert DATA_VERSION_TAG == dagster_data_version.DATA_VERSION_TAG
    assert CODE_VERSION_TAG == dagster_data_version.CODE_VERSION_TAG
    assert INPUT_DATA_VERSION_TAG == dagster_data_version.INPUT_DATA_VERSION_TAG_PREFIX
    assert INPUT_EVENT_POINTER_TAG == dagster_data_version.INPUT_EVENT_POINTER_TAG_PREFIX
    assert USER_PROVIDED_TAG == dagster_data_version.DATA_VERSION_IS_USER_PROVIDED_TAG
    assert PARTITION_TAG == dagster_tags.PARTITION_NAME_TAG
    assert RANGE_START_TAG == dagster_tags.ASSET_PARTITION_RANGE_START_TAG
    assert RANGE_END_TAG == dagster_tags.ASSET_PARTITION_RANGE_END_TAG
    assert WILL_RETRY_TAG == dagster_tags.WILL_RETRY_TAG
    assert RETRY_RUN_TAG == dagster_tags.AUTO_RETRY_RUN_ID_TAG


def test_the_newest_entry_of_a_batch_counts(tmp_path):
    store = DatasetStore(open_objects(str(tmp_path)), "d")
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("d", ["00000", "00001"])
        older = FOOTER.model_copy(update={"generation": 0, "data_version": "f" * 16})
        for footer in (older, FOOTER):
            instance.report_runless_asset_event(ledger.batch_event(store, footer, "s1"))
        assert ledger.ledger_versions(instance, "d") == {"00001": ledger.LedgerVersion("0123456789abcdef", 2)}


def test_an_entry_says_rows_tokens_speed_and_object_as_numbers(tmp_path):
    event = ledger.batch_event(DatasetStore(open_objects(str(tmp_path)), "d"), FOOTER, "s1")
    values = {key: value.value for key, value in event.metadata.items()}
    assert values["rows"] == values["dagster/partition_row_count"] == 250
    assert (values["ok"], values["dead"], values["rows_per_second"]) == (249, 1, 62.5)
    assert values["object"].endswith("d/batches/00001/0123456789abcdef-g2.parquet")


def test_a_plot_of_batches_has_no_points_of_runs_leases_and_requests(tmp_path):
    """Dagster draws all numbers of one name in one plot, over time, whatever event has them."""
    footer = FOOTER.model_copy(update={"mean_score": 3.0, "usd": 0.1, "bytes": 9})
    batch = ledger.batch_event(DatasetStore(open_objects(str(tmp_path)), "d"), footer, "s1")
    leased = LeasedEngine("http://127.0.0.1:1", None, 8, "sim", "h100", lease=Lease("i1", 1, "run", "d"), offer=OFFER)
    trip = GateTrip("empty", "are empty", Stretch(100, 60), 0.5, ("a",))
    target = DatasetTarget(
        "d", 1, "q", 0.0, 9.0, None, None, None, "", None, (), None, CapacityMemory(), None, None, 1.0
    )
    others = [
        ledger.progress_event("d", 10, 500, 2.5, "10 of 500 rows", 3.0, 0.1),
        ledger.lease_event("d", leased),
        ledger.bill_event("d", leased, "nothing is left"),
        ledger.gate_event("d", trip),
        done_event(target, RequestSummary(), 9.0),
    ]
    numbers = (dg.IntMetadataValue, dg.FloatMetadataValue)
    plotted = {name for name, value in batch.metadata.items() if isinstance(value, numbers)}
    assert plotted >= {"rows", "seconds", "usd", "mean_score", "dead_rate"}
    for other in others:
        assert not plotted & {name for name, value in other.metadata.items() if isinstance(value, numbers)}


def test_what_an_event_says_stands_above_its_numbers():
    """The page of a partition shows no description, that of a run cuts long events off."""
    version = ledger.LedgerVersion("0123456789abcdef", 2)
    void = ledger.void_event("d", "00001", version, "s1", "its object is gone", None)
    told = ledger.progress_event("d", 10, 500, 2.5, "10 of 500 rows")
    assert [next(iter(one.metadata)) for one in (void, told)] == ["reason", "reason"]
    assert str(void.metadata["reason"].value).startswith("Void: its object is gone. Dagster shows the batch as ")
