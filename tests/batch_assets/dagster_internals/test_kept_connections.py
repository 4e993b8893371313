"""Dagster's SQLite storage opens its databases once, and says and does what it says and does without that.

What `kept_connections.py` leans on is private to Dagster: when it changes, these tests fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    InstigatorType,
    SensorInstigatorData,
    TickData,
    TickStatus,
)
from support.sensor_states import state_of

from batch_assets.dagster_internals.kept_connections import PURGE_SECONDS, keep_connections

DAY = 24 * 3600.0
KEY = dg.AssetKey("a")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "dagster.yaml").write_text("")
    return tmp_path


@pytest.fixture
def stock(home: Path) -> Iterator[dg.DagsterInstance]:
    """Another process of the same home, as far as the database can tell."""
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield instance


@pytest.fixture
def kept(home: Path, stock: dg.DagsterInstance) -> Iterator[dg.DagsterInstance]:
    stock.add_instigator_state(state_of("s", min_interval=5))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        keep_connections(instance)
        yield instance


def only(instance: dg.DagsterInstance) -> InstigatorState:
    (state,) = instance.all_instigator_state()
    return state


def tick(instance: dg.DagsterInstance, at: float, status: TickStatus = TickStatus.SKIPPED) -> None:
    """What the sensor daemon writes for one tick (dagster/_daemon/sensor.py)."""
    state = only(instance)
    origin, selector = state.instigator_origin_id, state.selector_id
    found = instance.create_tick(
        TickData(origin, "s", InstigatorType.SENSOR, TickStatus.STARTED, at, selector_id=selector)
    )
    instance.update_tick(found.with_status(status, run_ids=[]))
    instance.update_instigator_state(state.with_data(SensorInstigatorData(last_tick_timestamp=at, cursor=f"at {at}")))


def ticks(instance: dg.DagsterInstance) -> list[float]:
    state = only(instance)
    return sorted(one.timestamp for one in instance.get_ticks(state.instigator_origin_id, state.selector_id))


def purge(instance: dg.DagsterInstance, before: float, *statuses: TickStatus) -> None:
    state = only(instance)
    instance.purge_ticks(state.instigator_origin_id, state.selector_id, before, list(statuses))


def _refuse(*args: object, **kwargs: object) -> sa.Engine:
    raise AssertionError("the database was opened or looked through anew")


def forbid_stock_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, to connect as Dagster does is an error."""
    for module in (
        "schedules.sqlite.sqlite_schedule_storage",
        "runs.sqlite.sqlite_run_storage",
        "event_log.sqlite.sqlite_event_log",
    ):
        monkeypatch.setattr(f"dagster._core.storage.{module}.create_engine", _refuse)


def test_what_is_written_over_kept_connections_is_there_for_others_and_the_other_way_round(
    kept: dg.DagsterInstance, stock: dg.DagsterInstance
):
    now = time.time()
    tick(kept, now)
    assert ticks(stock) == [now]
    tick(stock, now + 1)
    assert ticks(kept) == [now, now + 1]
    assert only(kept).status == InstigatorStatus.RUNNING
    stock.report_runless_asset_event(dg.AssetMaterialization(KEY))
    assert kept.get_latest_materialization_event(KEY) is not None
    assert kept.event_log_storage.get_maximum_record_id() == stock.event_log_storage.get_maximum_record_id()


def test_an_idle_daemon_opens_no_database_anew(kept: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch):
    look_around(kept)
    forbid_stock_engines(monkeypatch)
    look_around(kept)
    with pytest.raises(AssertionError, match="anew"):
        dg.DagsterInstance.from_config(kept.root_directory)


def look_around(instance: dg.DagsterInstance) -> None:
    """What the daemons do while nothing happens."""
    tick(instance, time.time())
    purge(instance, time.time() - DAY, TickStatus.SKIPPED)
    assert instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED])) == []
    assert instance.get_backfills() == []
    instance.get_daemon_heartbeats()
    instance.daemon_cursor_storage.set_cursor_values({"cursor": "1"})
    instance.event_log_storage.get_logs_for_all_runs_by_log_id(
        after_cursor=0, dagster_event_type={dg.DagsterEventType.RUN_FAILURE}
    )
    instance.get_asset_records([KEY])


def test_whether_a_table_is_there_is_asked_once(
    kept: dg.DagsterInstance, stock: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
):
    tick(kept, time.time())
    monkeypatch.setattr(sa.Inspector, "get_table_names", _refuse)
    tick(kept, time.time())
    assert len(ticks(kept)) == 2
    with pytest.raises(AssertionError, match="anew"):
        tick(stock, time.time())  # as it is without what is tested here


def test_an_event_asks_for_no_columns_of_tables_that_were_seen(kept: dg.DagsterInstance):
    """On Postgres Dagster asks the schema with three queries at each event."""
    kept.report_runless_asset_event(dg.AssetMaterialization(KEY))
    said: list[str] = []

    def executed(*given: object) -> None:
        said.append(str(given[2]))

    sa.event.listen(sa.Engine, "before_cursor_execute", executed)
    try:
        kept.report_runless_asset_event(dg.AssetMaterialization(KEY))
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", executed)
    assert any("asset_keys" in text for text in said)
    assert [text for text in said if "table_x" in text or "table_info" in text] == []


def test_what_fails_halfway_is_not_written(kept: dg.DagsterInstance, stock: dg.DagsterInstance):
    with pytest.raises(RuntimeError, match="halfway"), kept.schedule_storage.connect() as connection:
        connection.execute(sa.text("DELETE FROM instigators"))
        raise RuntimeError("halfway")
    assert [one.instigator_name for one in stock.all_instigator_state()] == ["s"]
    tick(kept, time.time())


@pytest.mark.slow
def test_many_threads_write_at_once(kept: dg.DagsterInstance):
    now = time.time()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: tick(kept, now + number), range(48)))
    assert len(ticks(kept)) == 48


def test_old_ticks_are_deleted_now_and_then(home: Path, stock: dg.DagsterInstance):
    stock.add_instigator_state(state_of("s", min_interval=5))
    now, moment = time.time(), [0.0]
    clock: Callable[[], float] = lambda: moment[0]  # noqa: E731
    with dg.DagsterInstance.from_config(str(home)) as instance:
        keep_connections(instance, clock)
        tick(instance, now - 2 * DAY)
        purge(instance, now - DAY, TickStatus.SKIPPED)
        assert ticks(instance) == []
        tick(instance, now - 2 * DAY)
        tick(instance, now - 9 * DAY, TickStatus.SUCCESS)
        purge(instance, now - DAY, TickStatus.SKIPPED)
        purge(instance, now - 7 * DAY, TickStatus.FAILURE, TickStatus.SUCCESS)  # by its own clock
        assert ticks(instance) == [now - 2 * DAY]
        moment[0] = PURGE_SECONDS
        purge(instance, now - DAY, TickStatus.SKIPPED)
        assert ticks(instance) == []


def test_another_storage_is_left_as_it_is():
    with dg.DagsterInstance.ephemeral() as instance:
        keep_connections(instance)
        assert "connect" not in vars(instance.run_storage)
        assert "index_connection" not in vars(instance.event_log_storage)


def test_the_second_time_it_changes_nothing(kept: dg.DagsterInstance):
    storages = (kept.schedule_storage, kept.run_storage, kept.event_log_storage)
    before = [dict(vars(storage)) for storage in storages]
    keep_connections(kept)
    assert [dict(vars(storage)) for storage in storages] == before
