"""What becomes of a hostile input: the words of its one typed error, or what it gives when it is accepted."""

from __future__ import annotations

import copy
import datetime
import functools
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hostile.case import Case
from hostile.conversations import ROW_REQUESTS
from hostile.files import BASE, FILES
from hostile.outputs import OUTPUTS, SCHEMA
from hostile.schemas import SCHEMAS
from hostile.templates import TEMPLATES

CASES = [*TEMPLATES, *SCHEMAS, *FILES, *ROW_REQUESTS, *OUTPUTS]
ROW: dict[str, Any] = {
    "text": "a short text",
    "number": 7,
    "none_": None,
    "empty": "",
    "binary": b"\x00\xff",
    "order": {"total": 3, "a": 1},
    "shop": {"items": [1, 2]},
    "tags": ["a", "b"],
    "day": datetime.date(2024, 1, 31),
    "nested": {"blob": b"\x00", "a": 1},
    "environment": b"x",
    "context": b"x",
}


def judge(case: Case) -> tuple[str, str]:
    """(error or accepted, words). Anything but the error that belongs to the kind is raised."""
    return _JUDGES[case.kind](case.given)


def _template(text: str) -> tuple[str, str]:
    from batch_assets.templates.prompt_template import Refused, Template, TemplateProblem

    try:
        template = Template(text)
    except TemplateProblem as error:
        return "error", str(error)
    row = {name: [ROW.get(name, "x")] for name in template.columns}
    (found,) = template.render_column(row, 1)
    return ("error", found.reason) if isinstance(found, Refused) else ("accepted", found[:1000])


def _column(given: tuple[str, Any]) -> tuple[str, str]:
    """The template has one column, and prints it."""
    from batch_assets.templates.prompt_template import Refused, Template

    text, value = given
    template = Template(text)
    (name,) = template.columns
    expected = "own" if isinstance(value, dict) else "its value"
    (found,) = template.render_column({name: [value if isinstance(value, dict) else expected]}, 1)
    (again,) = Template(f"{text}{{% if {name} %}}{{% endif %}}").render_column(
        {name: [value if isinstance(value, dict) else expected]}, 1
    )
    assert not isinstance(found, Refused), found
    assert found.lower() == expected == str(again).lower()
    return "accepted", found


def _spec(given: dict[str, Any]) -> tuple[str, str]:
    from batch_assets.spec.errors import SpecError
    from batch_assets.spec.models import load_spec

    try:
        load_spec({**copy.deepcopy(BASE), **given}, "defs.yaml")
    except SpecError as error:
        assert len(str(error)) < 3000 * len(error.problems)
        return "error", str(error)
    return "accepted", ""


def _answer(given: tuple[Any, str]) -> tuple[str, str]:
    from gpu_runner.client.json_schemas.output_schema import compile_check

    schema, text = given
    found = compile_check(schema)(text)
    assert found is None or len(found) <= 300
    return ("accepted", "") if found is None else ("error", found)


def _conversation(given: Any) -> tuple[str, str]:
    from batch_assets.snapshot.prompts.messages import check_whole, read_conversation

    return _fits(lambda: check_whole(read_conversation(given)))


def _row_field(given: tuple[str, str]) -> tuple[str, str]:
    from batch_assets.spec.sampling_values import read_field

    return _fits(lambda: read_field(*given))


def _row_tools(given: Any) -> tuple[str, str]:
    from batch_assets.spec.sampling_values import read_json

    return _fits(lambda: read_json(given))


def _fits(read: Callable[[], object]) -> tuple[str, str]:
    from batch_assets.spec.sampling_values import Unfit

    try:
        read()
    except Unfit as error:
        assert len(str(error)) < 400
        return "error", str(error)
    return "accepted", ""


def _typed(given: str) -> tuple[str, str]:
    """An output in typed columns, as a table of Arrow."""
    from batch_assets.publishing.output_columns import OutputColumns
    from gpu_runner.client.json_schemas.column_types import column_types

    columns = OutputColumns(column_types(SCHEMA), {})
    table = columns.add(pa.table({"output": [given]}), count=True)
    table.validate(full=True)
    assert table.column_names == ["output", *SCHEMA["properties"]]
    if columns.mismatches:
        assert all(column.null_count == 1 for column in table.columns[1:])
        return "error", "does not match"
    return "accepted", ""


def _export(given: dict[str, Any]) -> tuple[str, str]:
    from batch_assets.spec.export_options import ExportError, checked_options

    known = ["row_id", "prompt", "output", "reasoning", "topic", "error"]
    try:
        checked_options(known, **{"form": "messages", **given})
    except ExportError as error:
        assert len(str(error)) < 1000
        return "error", str(error)
    return "accepted", ""


def _examples(given: bytes) -> tuple[str, str]:
    from batch_assets.snapshot.prompts.files import read_examples
    from batch_assets.snapshot.source.errors import SourceError

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "shots.jsonl").write_bytes(given)
        try:
            read_examples("shots.jsonl", Path(folder))
        except SourceError as error:
            assert str(error).startswith("shots.jsonl") and len(str(error)) < 500
            return "error", str(error)
    return "accepted", ""


def _chain_rows(given: tuple[Any, ...]) -> tuple[str, str]:
    """A snapshot of these rows."""
    from batch_assets.snapshot.builder import build_snapshot
    from batch_assets.snapshot.source.errors import SourceError
    from batch_assets.spec.models import load_spec
    from resources.objects.opening import open_objects
    from resources.store.dataset_store import DatasetStore

    rows, source, *kept = given
    listed = isinstance(rows, list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / ("rows.jsonl" if listed else "rows.parquet")
        if listed:
            path.write_text("\n".join(json.dumps(row) for row in rows))
        else:
            pq.write_table(rows, path)
        keys = {"id": "i"} if listed and any("i" in row for row in rows) else {}
        keys |= {"name": "d", "model": "m", "prompt": {"user": "{{ q }}"}, "source": {"path": str(path), **source}}
        keys |= {"keep_columns": kept[0]} if kept else {}
        store = DatasetStore(open_objects(name), "d")
        try:
            build_snapshot(load_spec(keys, "defs.yaml"), store, now=1.0, workdir=folder / "work", base=folder)
        except SourceError as error:
            assert len(str(error)) < 3000 and store.current_snapshot() is None
            return "error", str(error)
    return "accepted", ""


def _output_row(given: tuple[Any, str]) -> tuple[str, str]:
    """The columns of an output. A row that does not match has none."""
    from batch_assets.publishing.output_columns import OutputColumns
    from gpu_runner.client.json_schemas.column_types import column_types

    schema, text = given
    columns = OutputColumns(column_types(schema), {})
    made = columns.add(pa.table({"output": [text]}), count=True)
    assert made.num_rows == 1
    return ("error", "no match") if columns.mismatches else ("accepted", "")


def _place(given: Any) -> tuple[str, str]:
    """Where an asset says that its table lies."""
    import dagster as dg

    from batch_assets.catalog.asset_places import of_asset
    from batch_assets.snapshot.source.errors import SourceError
    from batch_assets.spec.models import load_spec

    spec, instance = load_spec({**copy.deepcopy(BASE), "source": {"asset": "a/b"}}, "defs.yaml"), _dagster()
    instance.report_runless_asset_event(dg.AssetMaterialization(["a", "b"], metadata=given))
    try:
        of_asset(spec, instance)
    except SourceError as error:
        assert "secret" not in str(error) and len(str(error)) < 3000
        return "error", str(error)
    return "accepted", ""


@functools.cache
def _dagster() -> Any:
    import dagster as dg

    return dg.DagsterInstance.ephemeral()


def _python(given: dict[str, Any]) -> tuple[str, str]:
    """A dataset that is declared in Python."""
    from batch_assets.from_python.python_spec import dataset_spec
    from batch_assets.spec.errors import SpecError

    with tempfile.TemporaryDirectory() as folder:
        os.environ["DAGSTER_HOME"] = folder
        try:
            dataset_spec(**{"name": "d", "source": "q.jsonl", "prompt": "{{ q }}", "model": "m"} | given)
        except SpecError as error:
            assert len(str(error)) < 3000 * len(error.problems)
            return "error", str(error)
    return "accepted", ""


def _opened(given: tuple[str, str | None]) -> tuple[str, str]:
    """A published table by name and version."""
    from batch_assets.table_access.opened_table import TableError, table

    with tempfile.TemporaryDirectory() as folder:
        try:
            table(*given, store=folder)
        except TableError as error:
            assert len(str(error)) < 1000
            return "error", str(error)
    return "accepted", ""


def _defs(given: str | bytes) -> tuple[str, str]:
    from batch_assets.spec.discovery import declarations

    with tempfile.TemporaryDirectory() as folder:
        os.environ["BATCH_ASSETS_DEFS"] = folder
        _write(Path(folder) / "defs.yaml", given)
        for broken in declarations().broken:
            assert str(broken.error).startswith(f"{Path(folder).resolve()}/defs.yaml")
            return "error", str(broken.error)
    return "accepted", ""


def _fleet(given: str | bytes) -> tuple[str, str]:
    from resources.fleet.fleet_config import FleetConfig, FleetConfigError

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fleet.yaml"
        _write(path, given)
        try:
            FleetConfig.load(path)
        except FleetConfigError as error:
            assert "secret" not in str(error) and str(error).startswith(str(path))
            return "error", str(error)
    return "accepted", ""


def _prices(given: str | bytes) -> tuple[str, str]:
    from resources.pricing.price_files import PricingError
    from resources.pricing.sources import PriceList

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prices.yaml"
        _write(path, given)
        try:
            PriceList(path).offers(0)
        except PricingError as error:
            assert str(error).startswith(str(path))
            return "error", str(error)
    return "accepted", ""


def _write(path: Path, given: str | bytes) -> None:
    if given == "pipe":
        os.mkfifo(path)
    elif given == "folder":
        path.mkdir()
    else:
        path.write_bytes(given if isinstance(given, bytes) else given.encode())


_JUDGES: dict[str, Callable[[Any], tuple[str, str]]] = {
    "template": _template,
    "column": _column,
    "schema": lambda given: _spec({"output": {"json_schema": given}}),
    "answer": _answer,
    "where": lambda given: _spec({"source": {"path": "q.jsonl", "where": given}}),
    "spec": _spec,
    "conversation": _conversation,
    "row_field": _row_field,
    "row_tools": _row_tools,
    "typed": _typed,
    "export": _export,
    "examples": _examples,
    "defs": _defs,
    "fleet": _fleet,
    "prices": _prices,
    "chain_rows": _chain_rows,
    "output_row": _output_row,
    "asset_place": _place,
    "python": _python,
    "opened": _opened,
}


def main(first: int, megabytes: int) -> None:
    """Judge all cases from the `first` on, one line of JSON each; the process may use so much more memory."""
    for one in ("a = 1",):
        _JUDGES["where"](one)
    _JUDGES["answer"](({}, "{}"))
    _JUDGES["typed"]("{}")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (megabytes << 20),) * 2)
    for number, case in enumerate(CASES[first:], first):
        try:
            said, words = judge(case)
        except BaseException as error:
            said, words = "raised", f"{type(error).__name__}: {str(error)[:500]}"
        sys.stdout.write(json.dumps([number, said, words[:20_000]]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
