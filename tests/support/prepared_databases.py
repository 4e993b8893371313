"""What hundreds of new databases have in common is worked out once: SQL that is compiled, tables that are made.

Each test has databases of its own, and each of these an engine of SQLAlchemy that compiles the same statements again:
without this a third of the CPU of a test of sensors. The databases are the same as without it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.util import LRUCache

from batch_assets.api.database import service_database as api_records
from gpu_runner import sqlite_files
from gpu_runner.fleet_database import connection as fleet_connection

Statements = list[tuple[str, Any]]


class CompiledStatements(LRUCache[Any, Any]):
    """Compiled SQL of all engines whose dialects write it alike. SQLAlchemy's keys begin with the dialect."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_alike(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_alike(key), value)


def _alike(key: Any) -> Any:
    dialect, *rest = key
    serializers = (getattr(dialect, "_json_serializer", None), getattr(dialect, "_json_deserializer", None))
    return (type(dialect), dialect.server_version_info, serializers, *rest)


@contextlib.contextmanager
def prepared_databases() -> Iterator[None]:
    """Until it ends, new engines share what they compile, and empty databases get their tables as the first one did."""
    with pytest.MonkeyPatch.context() as patch:
        _share_compiled(patch)
        _keep_create_all(patch)
        for module in (fleet_connection, api_records):
            _keep_upgrade(patch, module)
        yield


@contextlib.contextmanager
def unsynced_databases() -> Iterator[None]:
    """SQLite writes its files without waiting for the disk, until it ends: Dagster's, the fleet's and the API's."""

    def unsynced(connection: Any, _: Any = None) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_files, "SYNCHRONOUS", "OFF")
        sa.event.listen(sa.Engine, "connect", unsynced)
        try:
            yield
        finally:
            sa.event.remove(sa.Engine, "connect", unsynced)


def _share_compiled(patch: pytest.MonkeyPatch) -> None:
    made, compiled = sa.Engine.__init__, CompiledStatements(5000)

    def share(engine: sa.Engine, *args: Any, **options: Any) -> None:
        made(engine, *args, **options)
        engine._compiled_cache = compiled

    patch.setattr(sa.Engine, "__init__", share)


def _keep_create_all(patch: pytest.MonkeyPatch) -> None:
    made, kept = sa.MetaData.create_all, dict[sa.MetaData, Statements]()

    def create_all(metadata: sa.MetaData, bind: Any, *args: Any, **options: Any) -> None:
        engine = isinstance(bind, sa.Engine)
        if bind.dialect.name != "sqlite" or args or options:
            return made(metadata, bind, *args, **options)
        with bind.begin() if engine else contextlib.nullcontext(bind) as connection:
            if not _empty(connection):
                made(metadata, connection)
            elif metadata in kept:
                _repeat(connection, kept[metadata])
            else:
                with _written(connection) as statements:
                    made(metadata, connection)
                kept[metadata] = statements

    patch.setattr(sa.MetaData, "create_all", create_all)


def _keep_upgrade(patch: pytest.MonkeyPatch, module: Any) -> None:
    kept: list[Statements] = []
    upgrade = module.upgrade

    def quick(connection: sa.Connection) -> None:
        # Of SQLite only, where the transaction that we are in is the only writer.
        if connection.dialect.name != "sqlite" or not _empty(connection):
            upgrade(connection)
        elif kept:
            _repeat(connection, kept[0])
        else:
            with _written(connection) as statements:
                upgrade(connection)
            kept.append(statements)

    patch.setattr(module, "upgrade", quick)


def _empty(connection: sa.Connection) -> bool:
    return not connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar()


@contextlib.contextmanager
def _written(connection: sa.Connection) -> Iterator[Statements]:
    """What is executed on the connection meanwhile and changes it."""
    statements: Statements = []

    def look(_: Any, __: Any, statement: str, parameters: Any, ___: Any, many: bool) -> None:
        if statement.split(maxsplit=1)[0].upper() not in ("SELECT", "PRAGMA"):
            assert not many
            statements.append((statement, parameters))

    sa.event.listen(connection, "before_cursor_execute", look)
    try:
        yield statements
    finally:
        sa.event.remove(connection, "before_cursor_execute", look)


def _repeat(connection: sa.Connection, statements: Statements) -> None:
    for statement, parameters in statements:
        connection.exec_driver_sql(statement, parameters or None)
