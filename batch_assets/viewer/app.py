"""Answers the page of `batch-assets view`: one POST of JSON for each thing that it shows.

A table is named in each request by dataset, version and, of the rows that pass a filter or were judged, `part`. Nothing
is changed. At most two queries run at a time; one that takes too long, or whose page has asked for something else
meanwhile, is stopped.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from batch_assets.exports.file_writers import JsonLines, ParquetLines
from batch_assets.table_access.opened_table import TableError
from batch_assets.viewer.row_query import MOST_COLUMNS, MOST_PAGE_ROWS, RowQuery
from batch_assets.viewer.table_reader import Session, Stop, TableReader, TooSlow
from batch_assets.viewer.tables import TableKey, Tables
from batch_assets.viewer.unfinished_table import UNFINISHED
from gpu_runner.errors import UserFacingError

QUERIES_AT_ONCE, QUERIES_WAITING = 2, 64
QUERY_SECONDS, LONG_SECONDS = 60.0, 300.0  # `LONG_SECONDS`: an export, a comparison
MOST_EXPORT_ROWS, MOST_EXPORT_BYTES, EXPORT_BATCH = 100_000, 256 << 20, 1000
CELL_BYTES, ROW_BYTES = 256 << 10, 2 << 20  # of the values of a single row
SAMPLE_LETTERS = 4000
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_EXACT = 1 << 53  # integers up to here are exact in the page
_FILES = {"/": "viewer.html", "/viewer.js": "viewer.js", "/viewer.css": "viewer.css"}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
LOG = logging.getLogger("batch_assets.viewer")


class ExportForm(StrEnum):
    """What a selection is saved as."""

    JSONL = "jsonl"
    PARQUET = "parquet"


class _Asked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Place(_Asked):
    """A version of a table; the newest without `version`. `part`: one that is made of the dataset's own, or what there
    is of the next one."""

    dataset: str = Field(pattern=r"^[a-z0-9][a-z0-9_]{0,62}$")
    version: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    part: Literal["passed", "judged", "unfinished"] | None = None

    @property
    def key(self) -> TableKey:
        """What it is kept by."""
        return TableKey(self.dataset, self.version, self.part)


class OfTable(_Asked):
    """Something of a table."""

    table: Place


class OfRows(OfTable):
    """A page of rows."""

    query: RowQuery = RowQuery()
    columns: tuple[str, ...] = Field(default=(), max_length=MOST_COLUMNS)
    first: int = Field(default=0, ge=0, lt=1 << 40)
    rows: int = Field(default=50, ge=1, le=MOST_PAGE_ROWS)


class OfHistogram(OfTable):
    """The histogram of a column."""

    query: RowQuery = RowQuery()
    column: str = Field(max_length=500)


class OfLine(OfTable):
    """A line with all that there is of it."""

    line: int = Field(ge=0, lt=1 << 40)


class OfDifferences(OfTable):
    """What `newer` has otherwise than `table`. `change`: only what was added, removed or changed."""

    newer: Place
    change: str = Field(default="", max_length=10)
    first: int = Field(default=0, ge=0, lt=1 << 40)
    rows: int = Field(default=50, ge=1, le=MOST_PAGE_ROWS)


class OfExport(OfTable):
    """A selection as a file."""

    query: RowQuery = RowQuery()
    form: ExportForm


class Refused(Exception):
    """The request cannot be answered. `status`: of HTTP."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class Viewer:
    """The page's answers over the tables of one store."""

    def __init__(self, tables: Tables, folder: Path) -> None:
        """`folder` takes files while they are sent."""
        self._tables, self._folder = tables, folder
        self._running = asyncio.Semaphore(QUERIES_AT_ONCE)
        self._waiting = 0

    def app(self) -> Starlette:
        """The ASGI application, without its guard."""
        asked: Mapping[str, tuple[type[_Asked], Callable[[Any, Stop], Any], float]] = {
            "/api/tables": (_Asked, self._list, QUERY_SECONDS),
            "/api/table": (OfTable, self._describe, QUERY_SECONDS),
            "/api/rows": (OfRows, self._rows, QUERY_SECONDS),
            "/api/histogram": (OfHistogram, self._histogram, QUERY_SECONDS),
            "/api/row": (OfLine, self._row, QUERY_SECONDS),
            "/api/samples": (OfLine, self._samples, QUERY_SECONDS),
            "/api/differences": (OfDifferences, self._differences, LONG_SECONDS),
            "/api/export": (OfExport, self._export, LONG_SECONDS),
        }
        routes = [Route(path, functools.partial(self._answer, *one), methods=["POST"]) for path, one in asked.items()]
        return Starlette(routes=[*routes, *(Route(path, _file, methods=["GET"]) for path in _FILES)])

    async def _answer(
        self, kind: type[_Asked], work: Callable[[Any, Stop], Any], seconds: float, request: Request
    ) -> Response:
        """What `work` returns, as JSON or as it is; what is wrong with the request as an error in words."""
        try:
            asked = kind.model_validate_json(await request.body() or b"{}")
            found = await self._run(request, functools.partial(work, asked), seconds)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return _failed(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        except Refused as error:
            return _failed(error.status, str(error))
        except TooSlow as error:
            return _failed(503, str(error))
        except UserFacingError as error:
            return _failed(404 if isinstance(error, TableError) else 400, str(error))
        except Exception as error:
            # The message may hold what is in the table.
            LOG.warning("a query failed: %s", type(error).__name__)
            return _failed(
                500, f"the query failed ({type(error).__name__}); `batch-assets verify` reads the whole table"
            )
        return found if isinstance(found, Response) else _json(found)

    async def _run(self, request: Request, work: Callable[[Stop], Any], seconds: float) -> Any:
        """Do the work in a thread; stopped after so many seconds, or when whoever asked has gone."""
        if self._waiting >= QUERIES_WAITING:
            raise Refused(503, "too many queries wait: try again in a moment")
        stop = Stop()
        self._waiting += 1
        try:
            await self._running.acquire()
        finally:
            self._waiting -= 1
        working = asyncio.ensure_future(asyncio.to_thread(work, stop))
        working.add_done_callback(lambda _: self._running.release())
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((working, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                stop()
            return await working
        finally:
            stop()
            gone.cancel()

    def _list(self, asked: _Asked, stop: Stop) -> Any:
        return {"datasets": self._tables.datasets()}

    def _describe(self, asked: OfTable, stop: Stop) -> Any:
        key, being_made = asked.table.key, None
        if key.part == UNFINISHED:
            key, being_made = self._tables.being_made(key, lambda: stop.asked)
        with self._tables.reader(key) as reader, reader.session(stop) as session:
            pictured = reader.pictured(session)
            columns = [{"name": name, "kind": kind} for name, kind in reader.columns.items()]
            said: dict[str, Any] = {"dataset": key.dataset, "part": key.part, "version": reader.table.version}
            said |= {"rows": reader.table.rows, "columns": columns, "pictured": pictured}
            if being_made is not None:
                return said | {"versions": [], "being_made": asdict(being_made)}
            return said | {"versions": self._tables.versions(asked.table.dataset, asked.table.part)}

    def _rows(self, asked: OfRows, stop: Stop) -> Any:
        with self._tables.reader(asked.table.key) as reader, reader.session(stop) as session:
            page = reader.page(session, asked.query, asked.columns, asked.first, asked.rows)
            return {"found": page.found, "rows": page.rows}

    def _histogram(self, asked: OfHistogram, stop: Stop) -> Any:
        with self._tables.reader(asked.table.key) as reader, reader.session(stop) as session:
            found = reader.histogram(session, asked.column, asked.query)
            return {"histogram": None if found is None else asdict(found)}

    def _row(self, asked: OfLine, stop: Stop) -> Any:
        with self._tables.reader(asked.table.key) as reader, reader.session(stop) as session:
            row = reader.row(session, asked.line)
            return {"row": bounded_row(row)}

    def _samples(self, asked: OfLine, stop: Stop) -> Any:
        with self._tables.reader(asked.table.key) as reader, reader.session(stop) as session:
            lines = reader.samples(session, asked.line)
            names = [name for name in ("sample_index", "output", "error") if name in reader.columns]
            cells = reader.cells_of(session, lines, names, SAMPLE_LETTERS)
            return {"samples": [{"line": at} | dict(zip(names, values, strict=True)) for at, values in cells.items()]}

    def _differences(self, asked: OfDifferences, stop: Stop) -> Any:
        with (
            self._tables.reader(asked.table.key) as older,
            self._tables.reader(asked.newer.key) as newer,
            older.session(stop) as session,
        ):
            counts, listed = older.differences(session, newer, asked.change, asked.first, asked.rows)
            cells = [name for name in ("row_id", "output", "error") if name in older.columns and name in newer.columns]
            before = older.cells_of(session, [line for _, line, _ in listed if line is not None], cells)
            after = newer.cells_of(session, [line for _, _, line in listed if line is not None], cells)
            rows = [
                {
                    "change": change,
                    "before": None if old is None else before.get(old),
                    "after": None if new is None else after.get(new),
                    "lines": [old, new],
                }
                for change, old, new in listed
            ]
            return {"counts": counts, "columns": cells, "rows": rows}

    def _export(self, asked: OfExport, stop: Stop) -> Response:
        with self._tables.reader(asked.table.key) as reader, reader.session(stop) as session:
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=f".{asked.form}")
            os.close(handle)
            try:
                rows, whole = _write(reader, session, asked, Path(name))
            except BaseException:
                Path(name).unlink()
                raise
        called = f"{asked.table.dataset}-{reader.table.version}.{asked.form}"
        headers = {"X-Rows": str(rows), "X-Whole": str(whole).lower(), "Cache-Control": "no-store"}
        removed = BackgroundTask(lambda: Path(name).unlink(missing_ok=True))
        return FileResponse(
            name, media_type="application/octet-stream", filename=called, headers=headers, background=removed
        )


def _write(reader: TableReader, session: Session, asked: OfExport, path: Path) -> tuple[int, bool]:
    """Write a selection; returns its rows, and whether it is all of it: rows and bytes have an end."""
    writer: JsonLines | ParquetLines | None = JsonLines(path) if asked.form is ExportForm.JSONL else None
    read = 0
    try:
        for batch in reader.selection(session, asked.query, MOST_EXPORT_ROWS + 1, EXPORT_BATCH):
            lines = pa.Table.from_batches([batch])[: MOST_EXPORT_ROWS - read]
            read += batch.num_rows
            if isinstance(writer, JsonLines):
                writer.write(lines.to_pylist())
            else:
                writer = writer or ParquetLines(path, lines.schema)
                writer.write(lines)
            if read > MOST_EXPORT_ROWS or writer.bytes > MOST_EXPORT_BYTES:
                return writer.rows, False
        if writer is None:
            writer = ParquetLines(path, reader.schema(session))
    finally:
        if writer is not None:
            writer.close()
    return read, True


def bounded_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row, each with at most CELL_BYTES of text, all together ROW_BYTES; what is cut says so."""
    left = ROW_BYTES
    found: dict[str, Any] = {}
    for name, value in row.items():
        text = value if isinstance(value, str) else orjson.dumps(value, default=_plain, option=_OPTIONS).decode()
        most = max(0, min(CELL_BYTES, left))
        if len(text) > most:
            found[name] = f"{text[:most]}… ({len(text) - most:,} more characters)"
        else:
            found[name] = value
        left -= min(len(text), most)
    return found


async def _gone(request: Request) -> None:
    """Returns when the connection is closed by whoever asked."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _file(request: Request) -> Response:
    name = _FILES[request.url.path]
    return Response(_page(name), media_type=f"{_TYPES[Path(name).suffix]}; charset=utf-8", headers=_HEADERS)


@functools.cache
def _page(name: str) -> bytes:
    return (Path(__file__).parent / "page" / name).read_bytes()


def _failed(status: int, said: str) -> Response:
    return _json({"error": said}, status)


def _json(value: Any, status: int = 200) -> Response:
    data = orjson.dumps(_exact(value), default=_plain, option=_OPTIONS)
    return Response(data, status, media_type="application/json", headers={"Cache-Control": "no-store"})


def _exact(value: Any) -> Any:
    """The same with integers that a browser would round as text."""
    if isinstance(value, bool) or value is None or isinstance(value, str | float):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _EXACT else str(value)
    if isinstance(value, Mapping):
        return {str(key): _exact(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(one) for one in value]
    return value


def _plain(value: Any) -> Any:
    return f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)
