"""Events that are written together are the events that are written one by one.

What `event_batches.py` leans on is private to Dagster: when it changes, these tests fail.
"""

import time
from collections.abc import Iterator

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage

from batch_assets.catalog.ledger import DATA_VERSION_TAG
from batch_assets.dagster_internals import event_batches
from batch_assets.dagster_internals.event_batches import log_together, only_of, report_together, write_together
from batch_assets.dagster_internals.kept_connections import keep_connections

KEYS = [f"{number:05}" for number in range(1201)]
ROWS = dg.AssetKey(["d", "rows"])
PARTITIONS = dg.StaticPartitionsDefinition(KEYS)


@pytest.fixture
def instance(stored_instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    monkeypatch.delenv(event_batches.SIZE_VARIABLE, raising=False)
    yield stored_instance
    monkeypatch.delenv(event_batches.SIZE_VARIABLE, raising=False)


def made(key: str) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(ROWS, partition=key, metadata={"rows": 250}, tags={DATA_VERSION_TAG: f"v{key}"})


def written(instance: dg.DagsterInstance, kind: dg.DagsterEventType) -> list[str | None]:
    """Partitions of all events of a kind, in order."""
    found = instance.event_log_storage.get_event_records(dg.EventRecordsFilter(kind, ROWS), ascending=True)
    return [record.partition_key for record in found]


def statements(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is inserted from now on, whichever engine does it."""
    seen: list[str] = []
    execute = sa.Connection.execute

    def counted(self: sa.Connection, statement: object, *args: object, **options: object) -> object:
        if isinstance(statement, sa.Insert):
            seen.append(statement.table.name)
        return execute(self, statement, *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(sa.Connection, "execute", counted)
    return seen


@pytest.mark.slow
def test_what_is_reported_together_is_what_is_reported_one_by_one(instance: dg.DagsterInstance):
    assert report_together(instance, (made(key) for key in KEYS[:1100])) == 1100
    for key in KEYS[1100:1110]:
        instance.report_runless_asset_event(made(key))
    storage = instance.event_log_storage
    assert written(instance, dg.DagsterEventType.ASSET_MATERIALIZATION) == KEYS[:1110]
    tags = storage.get_latest_tags_by_partition(ROWS, dg.DagsterEventType.ASSET_MATERIALIZATION, [DATA_VERSION_TAG])
    assert {key: found[DATA_VERSION_TAG] for key, found in tags.items()} == {key: f"v{key}" for key in KEYS[:1110]}
    assert storage.get_materialized_partitions(ROWS) == set(KEYS[:1110])
    newest = instance.get_latest_materialization_event(ROWS)
    assert newest is not None and newest.asset_materialization is not None
    assert newest.asset_materialization.partition == KEYS[1109]


def test_each_event_has_a_millisecond_of_its_own_as_the_ui_lists_one_for_each(instance: dg.DagsterInstance):
    """Of a run that committed seven batches at once, the page of `rows` (Events) listed one."""
    before = time.time()
    report_together(instance, (made(key) for key in KEYS[:200]))
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION
    found = instance.event_log_storage.get_event_records(dg.EventRecordsFilter(kind, ROWS), ascending=True)
    times = [int(record.timestamp * 1000) for record in found]
    assert times == sorted(set(times)) and len(times) == 200
    assert [record.event_log_entry.timestamp for record in found] == [record.timestamp for record in found]
    assert before - 1 < found[0].timestamp and found[-1].timestamp <= time.time()


def test_nothing_is_reported_of_nothing(instance: dg.DagsterInstance):
    assert report_together(instance, []) == 0
    assert written(instance, dg.DagsterEventType.ASSET_MATERIALIZATION) == []


@pytest.mark.slow
def test_events_are_read_in_groups_and_those_before_an_error_are_written(instance: dg.DagsterInstance):
    def events() -> Iterator[dg.AssetMaterialization]:
        yield from (made(key) for key in KEYS[:700])
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        report_together(instance, events())
    assert written(instance, dg.DagsterEventType.ASSET_MATERIALIZATION) == KEYS[:500]


def test_a_group_that_cannot_be_written_is_written_one_by_one(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args: object) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(event_batches, "_index", refuse)
    report_together(instance, (made(key) for key in KEYS[:20]))
    found = written(instance, dg.DagsterEventType.ASSET_MATERIALIZATION)
    assert sorted(set(found), key=str) == KEYS[:20] and len(found) == 20


@pytest.mark.slow
def test_a_run_plans_and_makes_its_partitions_with_few_statements(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
):
    """One insert of all planned events, and one of all materializations; the run's own log has both too."""

    @dg.asset(
        key=ROWS, partitions_def=PARTITIONS, backfill_policy=dg.BackfillPolicy.single_run(), output_required=False
    )
    def rows(context: dg.AssetExecutionContext) -> Iterator[None]:
        log_together(context, (made(key) for key in context.partition_keys))
        yield from ()

    write_together(instance)
    seen = statements(instance, monkeypatch)
    tags = {"dagster/asset_partition_range_start": KEYS[0], "dagster/asset_partition_range_end": KEYS[399]}
    result = dg.materialize([rows], instance=instance, tags=tags)
    assert result.success
    planned = written(instance, dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    assert sorted(planned, key=str) == KEYS[:400]
    assert written(instance, dg.DagsterEventType.ASSET_MATERIALIZATION) == KEYS[:400]
    log = [one.dagster_event for one in instance.all_logs(result.run_id) if one.dagster_event is not None]
    for kind in (dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED, dg.DagsterEventType.ASSET_MATERIALIZATION):
        assert {one.partition for one in log if one.event_type is kind} == set(KEYS[:400])
    assert len(result.asset_materializations_for_node("d__rows")) == 400
    if isinstance(instance.event_log_storage, SqliteEventLogStorage):  # one by one into the index, in one transaction
        assert seen.count("event_logs") < 2 * 400 + 100
    else:
        assert seen.count("event_logs") < 60
    assert seen.count("asset_event_tags") == 1


def test_of_a_run_for_some_partitions_of_its_range_only_those_are_planned(instance: dg.DagsterInstance):
    class Config(dg.Config):
        only: str = ""

    @dg.asset(
        key=ROWS, partitions_def=PARTITIONS, backfill_policy=dg.BackfillPolicy.single_run(), output_required=False
    )
    def rows(config: Config) -> Iterator[None]:
        yield from ()

    write_together(instance)
    tags = {"dagster/asset_partition_range_start": KEYS[0], "dagster/asset_partition_range_end": KEYS[1200]}
    some = {"ops": {"d__rows": {"config": {"only": f"{KEYS[0]} {KEYS[700]} {KEYS[1200]}"}}}}
    assert dg.materialize([rows], instance=instance, tags=tags, run_config=some).success
    planned = written(instance, dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    assert sorted(planned, key=str) == [KEYS[0], KEYS[700], KEYS[1200]]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"ops": {"d__rows": {"config": {"only": "a  b"}}, "other": {"config": "text"}}}, {"a", "b"}),
        ({"ops": {"d__rows": {"config": {"only": " "}}}}, None),
        ({"ops": {"d__rows": {"config": {"only": ["a"]}}}}, None),
        ({"ops": {"d__rows": "text", "other": {"config": {"only": "a"}}}}, None),
        ({"ops": ["d__rows"]}, None),
        (None, None),
    ],
)
def test_only_the_op_of_the_rows_says_for_which_partitions_a_run_is(config: object, expected: set[str] | None):
    """Ops of a user's assets may have any config, and one called `only`."""
    assert only_of(config) == only_of(config, "d__rows") == expected
    assert only_of(config, "other") is only_of(config, "e__rows") is None


@pytest.mark.slow
def test_stock_dagster_does_what_is_leant_on(instance: dg.DagsterInstance):
    """Its buffer calls `store_event_batch` of the storage, which it looks up each time."""
    storage = instance.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    calls: list[int] = []
    write_together(instance)
    ours = storage.store_event_batch
    setattr(storage, event_batches.REPLACED, lambda events: (calls.append(len(events)), ours(events)))
    report_together(instance, (made(key) for key in KEYS[:1100]))
    assert calls == [500, 500, 100]


@pytest.mark.slow
def test_connections_to_postgres_are_kept_and_a_dead_one_is_replaced(instance: dg.DagsterInstance):
    if isinstance(instance.event_log_storage, SqliteEventLogStorage):
        pytest.skip("about Postgres")
    keep_connections(instance)
    engines = {id(one._engine) for one in (instance.run_storage, instance.event_log_storage, instance.schedule_storage)}
    assert len(engines) == 1
    engine = instance.run_storage._engine
    for _ in range(20):
        report_together(instance, [made(KEYS[0])])
        assert instance.get_runs_count() == 0
    assert engine.pool.checkedin() <= 2
    with engine.connect() as ours, engine.connect() as more:
        pids = [one.exec_driver_sql("SELECT pg_backend_pid()").scalar_one() for one in (ours, more)]
    alone = sa.create_engine(engine.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with alone.connect() as connection:  # as when the server is started again
        for pid in pids:
            connection.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")
    assert instance.get_runs_count() == 0
    assert report_together(instance, (made(key) for key in KEYS[:5])) == 5
