"""Databases are brought to their newest version by several threads of one process at once."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import sqlalchemy as sa
from support.fleet_databases import postgres_url

from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.tables import METADATA


def test_databases_that_threads_open_at_once_have_their_own_tables(server: str, tmp_path: Path) -> None:
    """Alembic keeps in its module what it is doing: tables of one database were made in another one."""
    with contextlib.ExitStack() as stack:
        urls = [f"sqlite:///{tmp_path}/{number}.db" for number in range(3)]
        urls += [stack.enter_context(postgres_url(server)) for _ in range(2)]
        start = Barrier(len(urls))

        def opened(url: str) -> set[str]:
            start.wait()
            with contextlib.closing(FleetDatabase(url)) as fleet_db:
                assert fleet_db.fleet() == [] and fleet_db.tag()
                return {*sa.inspect(fleet_db.engine).get_table_names()}

        with ThreadPoolExecutor(len(urls)) as pool:
            for found in pool.map(opened, urls):
                assert found >= set(METADATA.tables)
