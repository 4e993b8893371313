"""`batch-assets export NAME`: the published table as training files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from batch_assets import settings
from batch_assets.cli.interrupts import Signals
from batch_assets.cli.output import print_json
from batch_assets.cli.user_errors import CommandError, error_console
from batch_assets.exports.declared_export import export_declared
from batch_assets.exports.export import export
from batch_assets.exports.hub_push import Pushed
from batch_assets.exports.pushed_export import push_export
from batch_assets.exports.record import ExportRecord, read_record
from batch_assets.filtering.wanted_rows import rounds_follow
from batch_assets.spec.discovery import known_datasets
from batch_assets.spec.export_options import VALIDATION, ExportOptions
from batch_assets.spec.exports import PushSpec
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.table_access.opened_table import find_table
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

_WHY = {
    "error": "have no completion",
    "where": "do not meet --where",
    "tool_calls": "answer with tool calls",
    "empty": "have an empty answer",
    "no_prompt": "have no prompt",
    "equal": "have two equal answers",
    "no_element": "have a list without an element of that number",
    "unpaired": "are neither the best nor the worst answer to a prompt of a ranked group",
    "turns": "are conversations that Alpaca's form cannot hold",
}


def export_table(
    name: str,
    to: str,
    version: str | None,
    options_of: Callable[[Sequence[str]], ExportOptions],
    *,
    part: str | None = None,
    push: tuple[str, bool, str] | None = None,
    as_json: bool,
) -> None:
    """Export, or go on with it. `push`: repository, whether it is private, and branch. Raises CommandError,
    ExportError, TableError.

    `part`: which of the tables that are made of the dataset's own one; None: that one itself.

    Without a version an export that is not complete goes on with its own, and any other takes the newest.
    """
    if "://" not in to and Path(to).expanduser().is_file():
        raise CommandError(f"--to {to}: expected a folder, found a file")
    repository = _repository(*push) if push is not None else None
    target, source = open_objects(to), open_objects(settings.store_root())
    begun, of = read_record(target), name if part is None else f"{name}/{part}"
    if version is None and begun is not None and begun.dataset == of and not begun.complete:
        version = begun.version
    table = find_table(source, name, version, part)
    console = error_console()

    def told(record: ExportRecord) -> None:
        if console.is_terminal and not as_json and not record.complete:
            console.print(f"{record.lines:,} of {table.rows:,} lines", highlight=False)

    with Signals():  # also at SIGTERM the folder of work files goes
        record = export(source, table, target, options_of([column.name for column in table.columns]), told=told)
        pushed = None
        if repository is not None:
            found = known_datasets().get(name)
            spec = found[0] if found is not None else None
            pushed = push_export(DatasetStore(source, name), target, record, repository, spec)
    _print(record, target.root, pushed, as_json)


def _repository(repo: str, private: bool, branch: str) -> PushSpec:
    try:
        return PushSpec(repo=repo, private=private, branch=branch)
    except ValidationError as error:
        raise CommandError(f"--push {repo[:100]}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def export_declared_table(spec: GeneratedDatasetSpec, folder: Path, export: str, *, as_json: bool) -> None:
    """Write an export of the dataset's defs.yaml, as its asset does: while rounds of a `want` follow, nothing is pushed
    or appended. Raises CommandError, ExportError.
    """
    wanted = next((one for one in spec.exports if one.name == export), None)
    if wanted is None:
        names = ", ".join(one.name for one in spec.exports) or "none"
        raise CommandError(f"--declared {export[:80]}: expected an export of {spec.name} ({names})")
    store = DatasetStore(open_objects(settings.store_root()), spec.name)
    specs = {name: one for name, (one, _) in known_datasets().items()} | {spec.name: spec}
    with Signals():
        final = not rounds_follow(spec.name, store.objects, specs)
        written = export_declared(store, wanted, base=folder, of=spec, final=final)
    waits = not final and (wanted.appends or wanted.push is not None)
    if waits and not as_json:
        what = "appended" if wanted.appends else "pushed"
        done = f"`batch-assets run {spec.name}` does it when enough are accepted"
        print(f"{spec.name}: {export}: nothing is {what} while more rows are made (want); {done}", flush=True)
        if wanted.appends:
            return
    _print(written.record, written.files.root, written.pushed, as_json, waits=waits)


def _print(record: ExportRecord, to: str, pushed: Pushed | None, as_json: bool, *, waits: bool = False) -> None:
    """`waits`: for the last round of a `want`."""
    if as_json:
        told = {} if pushed is None else {"hub": {name: getattr(pushed, name) for name in ("repo", "branch", "commit")}}
        print_json(record.model_dump(exclude={"checksum"}) | {"to": to} | told | ({"waits": "want"} if waits else {}))
        return
    lines = _lines(record, to)
    if pushed is not None:
        done = f"{len(pushed.sent):,} files sent" if pushed.changed else "nothing was to be sent"
        lines.append(f"hub: {pushed.repo}, branch {pushed.branch}, commit {pushed.commit} ({done})")
    print("\n".join(lines), flush=True)


def _lines(record: ExportRecord, to: str) -> list[str]:
    rows = sum(record.rows.values())
    split = f", {record.rows[VALIDATION]:,} of them for validation" if record.rows.get(VALIDATION) else ""
    made = f"{rows:,} pairs of" if "group_by" in record.options else f"{rows:,} of"
    lines = [f"{record.dataset}: {made} {record.lines:,} rows exported{split} (version {record.version})"]
    lines += [f"  {count:,} left out: they {_WHY.get(reason, reason)}" for reason, count in record.left_out.items()]
    if rows and record.options.get("validation") and not record.rows.get(VALIDATION):
        lines.append(
            f"  no row is for validation: no value of {record.options['split_by']!r} falls into a share of "
            f"{record.options['validation']:g}; take a larger one, or a column of more values"
        )
    return [*lines, f"files: {to}"]
