"""Exports: what `datasets` reads of them, splits, kills at every write, hostile cells, on a folder and on S3."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.snapshots import SourceRow, commit, questions, write_snapshot
from typer.testing import CliRunner, Result

from batch_assets.cli.dataset_commands import export_command
from batch_assets.cli.interrupts import Interrupted
from batch_assets.cli.main import app
from batch_assets.exports.export import export
from batch_assets.exports.file_writers import JsonLines
from batch_assets.exports.record import ExportRecord
from batch_assets.publishing import table_files
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import PublishedTable
from batch_assets.spec.export_options import ExportError, ExportOptions, checked_options
from gpu_runner.rows import Row
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import DatasetStore


@dataclass
class Published:
    """A table, and a place to export it to."""

    objects: Objects
    table: PublishedTable
    to: Path

    def options(self, form: str, **options: Any) -> ExportOptions:
        return checked_options([column.name for column in self.table.columns], form, **options)

    def export(self, form: str, target: Objects | None = None, **options: Any) -> ExportRecord:
        return export(self.objects, self.table, target or open_objects(str(self.to)), self.options(form, **options))

    def records(self, split: str = "train") -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for file in sorted(self.to.glob(f"{split}-*.jsonl"))
            for line in file.read_text().splitlines()
        ]


def published(
    objects: Objects,
    tmp_path: Path,
    rows: Sequence[SourceRow],
    answer: Callable[[Row, int], Any] | None = None,
    dead: Sequence[str] = ("id-000003",),
    part_rows: int = 20,
) -> Published:
    store = DatasetStore(objects, "sums")
    manifest = write_snapshot(store, rows)
    commit(store, manifest, dead=dead, answer=answer)
    table = publish(store, manifest, card=Card(), now=float(len(rows)), workdir=tmp_path, part_rows=part_rows)
    return Published(objects, table, tmp_path / "export")


@pytest.fixture
def sums(local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """50 lines in row groups of ten, one of them dead."""
    monkeypatch.setattr(table_files, "_GROUP_ROWS", 10)
    return published(local_objects, tmp_path, questions(50))


@pytest.mark.slow
def test_an_export_is_the_same_on_a_folder_and_on_s3(any_objects: Objects, tmp_path: Path) -> None:
    found = published(any_objects, tmp_path, questions(50))
    target = open_objects(f"{any_objects.root}/exported")
    record = found.export("messages", target, validation=0.3, kept=["topic"])
    assert record.complete and record.left_out == {"error": 1} and record.lines == 50
    lines = [json.loads(line) for file in record.files for line in target.get(file.name).decode().splitlines()]
    assert len(lines) == sum(record.rows.values()) == 49 and set(record.rows) == {"train", "validation"}
    first = next(line for line in lines if line["messages"][0]["content"] == "What is 0 plus 0?")
    assert first["messages"][1] == {"role": "assistant", "content": "answer 0 to id-000000"}
    assert first["topic"] == "topic 0"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["messages", "sharegpt", "alpaca", "prompt-completion", "preference", "parquet"])
def test_datasets_reads_both_splits(form: str, sums: Published, tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    mapping = ["chosen=output", "rejected=topic"] if form == "preference" else []
    sums.export(form, mapping=mapping, validation=0.3, part_rows=10)
    found = datasets.load_dataset(str(sums.to), cache_dir=str(tmp_path / "cache"))
    assert set(found) == {"train", "validation"} and found["train"].num_rows + found["validation"].num_rows == 49
    line = found["train"][0]
    if form == "messages":
        assert [one["role"] for one in line["messages"]] == ["user", "assistant"]
    elif form == "sharegpt":
        assert [one["from"] for one in line["conversations"]] == ["human", "gpt"]
    elif form == "alpaca":
        assert list(line) == ["instruction", "input", "output", "system", "history"]
    elif form != "parquet":
        assert line["prompt"][0]["role"] == "user"
        answers = ["chosen", "rejected"] if form == "preference" else ["completion"]
        assert [line[name][0]["role"] for name in answers] == ["assistant"] * len(answers)


@pytest.mark.slow
def test_a_chat_template_takes_the_messages(sums: Published) -> None:
    """As `apply_chat_template` of transformers renders them: Jinja with the template that the weights bring along."""
    from gguf import GGUFReader
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from support.real_models import smollm2

    source = GGUFReader(smollm2()).fields["tokenizer.chat_template"].contents()
    sums.export("messages")
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    said = template.render(messages=sums.records()[0]["messages"], add_generation_prompt=False)
    assert "<|im_start|>user\nWhat is 0 plus 0?<|im_end|>" in said
    assert "<|im_start|>assistant\nanswer 0 to id-000000<|im_end|>" in said


def test_no_value_of_the_split_column_is_on_both_sides(sums: Published) -> None:
    sums.export("jsonl", validation=0.4, split_by="topic", kept=["topic", "row_id"])
    sides = [{line["topic"] for line in sums.records(split)} for split in ("train", "validation")]
    assert sides[0] and sides[1] and not sides[0] & sides[1]
    assert list(sums.records()[0]) == ["topic", "row_id"]


def test_lines_are_chosen_by_a_condition_and_counted(sums: Published) -> None:
    record = sums.export("prompt-completion", where="level = 1 AND finish_reason = 'stop'")
    assert (record.rows, record.left_out) == ({"train": 10}, {"error": 1, "where": 39})
    record = sums.export("jsonl", open_objects(str(sums.to.parent / "none")), where="1 = 2")
    assert (record.rows, record.complete, record.left_out["where"]) == ({}, True, 49)


def test_a_condition_that_is_none_ends_it(sums: Published) -> None:
    for where, said in (("level + 1", "expected a condition"), ("CAST(output AS DOUBLE) > 1", "does not fit")):
        with pytest.raises(ExportError, match=said) as error:
            sums.export("jsonl", where=where)
        assert "answer" not in str(error.value)


class Killed(BaseException):
    """The process ends."""


class Dying:
    """Objects whose process is killed at one of its writes, before or after it."""

    def __init__(self, objects: Objects, at: int, *, after: bool) -> None:
        self._objects, self._left, self._after = objects, at, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def _die(self, write: Callable[[], None]) -> None:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise Killed
        write()
        if self._left == 0:
            raise Killed

    def put(self, path: str, data: bytes) -> None:
        self._die(lambda: self._objects.put(path, data))

    def upload(self, path: str, file: Path) -> None:
        self._die(lambda: self._objects.upload(path, file))


def files_of(folder: Path) -> Mapping[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["messages", "parquet"])
def test_after_a_kill_at_any_write_the_same_command_makes_the_same_files(form: str, sums: Published) -> None:
    options = {"part_rows": 20, "validation": 0.3}
    sums.export(form, open_objects(str(sums.to.parent / "whole")), **options)
    whole, kills = files_of(sums.to.parent / "whole"), 0
    assert len(whole) == 7
    for at in range(1, 12):
        for after in (False, True):
            folder = sums.to.parent / f"killed-{at}-{after}"
            target = open_objects(str(folder))
            try:
                export(sums.objects, sums.table, Dying(target, at, after=after), sums.options(form, **options))  # type: ignore[arg-type]
            except Killed:
                kills += 1
            sums.export(form, target, **options)
            assert files_of(folder) == whole, (at, after)
    assert kills == 22


def test_a_whole_export_is_not_written_again(sums: Published) -> None:
    first = sums.export("messages")
    assert sums.export("messages", Dying(open_objects(str(sums.to)), 1, after=False)) == first  # type: ignore[arg-type]


def test_a_folder_with_something_else_is_left_as_it_is(sums: Published) -> None:
    sums.to.mkdir()
    (sums.to / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"expected an empty folder or one of this export, found thesis.txt"):
        sums.export("messages")
    other = open_objects(str(sums.to.parent / "other"))
    sums.export("messages", other)
    before = files_of(sums.to.parent / "other")
    with pytest.raises(ExportError, match=r"expected an export with format 'sharegpt' \(found 'messages'\)"):
        sums.export("sharegpt", other)
    assert files_of(sums.to.parent / "other") == before and files_of(sums.to) == {"thesis.txt": b"mine"}


@pytest.mark.parametrize("other", ["messages", "sharegpt"])
def test_of_two_exports_into_one_folder_one_ends_and_nothing_is_mixed(other: str, sums: Published) -> None:
    class Overtaken(Dying):
        """A store whose table is opened when the other export begins, and ends."""

        def open(self, path: str) -> Any:
            if not (sums.to / "train-00000.jsonl").exists():
                sums.export(other, part_rows=20)
            return sums.objects.open(path)

    options, source = sums.options("messages", part_rows=20), Overtaken(sums.objects, 99, after=False)
    with pytest.raises(ExportError, match="expected one export at a time"):
        export(source, sums.table, open_objects(str(sums.to)), options)  # type: ignore[arg-type]
    assert sums.export(other, part_rows=20).rows == {"train": 49}
    assert {"messages": "messages", "sharegpt": "conversations"}[other] in sums.records()[0]


def test_a_whole_export_whose_files_are_gone_or_changed_says_so(sums: Published) -> None:
    sums.export("messages", part_rows=20)
    (sums.to / "train-00001.jsonl").unlink()
    with pytest.raises(ExportError, match=r"found train-00001.jsonl gone or of another size"):
        sums.export("messages", part_rows=20)


def test_a_disk_that_is_full_ends_it_and_the_same_command_goes_on(
    sums: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums.export("messages", open_objects(str(sums.to.parent / "whole")), part_rows=20)
    writes = iter([True] * 25)
    write = JsonLines.write

    def full(self: JsonLines, records: Any) -> None:
        if not next(writes, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, records)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(JsonLines, "write", full)
        sums.export("messages", part_rows=20)
    assert sums.export("messages", part_rows=20).complete
    assert files_of(sums.to) == files_of(sums.to.parent / "whole")


def test_hostile_texts_and_megabytes_arrive_as_they_are(local_objects: Objects, tmp_path: Path) -> None:
    texts = ["\x1b[2J\x9b31m", "<script>alert(1)</script>", "\u2028\u0000\ud7ff", "a\nb\r\n", "x" * (10 << 20)]
    found = published(local_objects, tmp_path, questions(5), lambda row, number: texts[number], dead=())
    found.export("prompt-completion")
    lines = (found.to / "train-00000.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line)["completion"][0]["content"] for line in lines[:-1]] == texts


def test_values_that_json_does_not_have(local_objects: Objects, tmp_path: Path) -> None:
    from datetime import UTC, datetime
    from decimal import Decimal

    keep = {"at": datetime(2026, 1, 1, tzinfo=UTC), "price": Decimal("1.50"), "raw": b"\x00\xff"}
    found = published(local_objects, tmp_path, [SourceRow("a", "Why?", keep)])
    found.export("messages", kept=["at", "price", "raw"])
    (line,) = found.records()
    assert (line["at"][:10], line["price"], line["raw"]) == ("2026-01-01", "1.50", "AP8=")


@pytest.fixture
def command(sums: Published, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """`batch-assets export sums --to …`."""
    import yaml

    for name, value in {"DAGSTER_HOME": tmp_path / "home", "BATCH_ASSETS_STORE": sums.objects.root}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("BATCH_ASSETS_DEFS", str(tmp_path / "defs"))
    file = tmp_path / "defs" / "sums" / "defs.yaml"
    file.parent.mkdir(parents=True)
    attributes = {"name": "sums", "source": {"path": "s.jsonl"}, "prompt": {"user": "{{ q }}"}, "model": "tiny"}
    file.write_text(yaml.safe_dump({"type": "batch_assets.GeneratedDataset", "attributes": attributes}))
    return lambda *words: CliRunner().invoke(app, ["export", "sums", "--to", str(sums.to), *words])


def test_the_command_says_what_was_exported_and_left_out(sums: Published, command: Callable[..., Result]) -> None:
    found = command("--format", "messages", "--where", "level < 3", "--validation", "0.2", "--split-by", "row_id")
    assert found.exit_code == 0, found.output
    assert f"sums: 30 of 50 rows exported, 6 of them for validation (version {sums.table.version})" in found.stdout
    assert "  1 left out: they have no completion\n  19 left out: they do not meet --where\n" in found.stdout
    again = command(
        "--format", "messages", "--where", "level < 3", "--validation", "0.2", "--split-by", "row_id", "--json"
    )
    assert json.loads(again.stdout)["rows"] == {"train": 24, "validation": 6}


def test_parquet_has_the_lines_of_the_table(sums: Published, command: Callable[..., Result]) -> None:
    assert command("--format", "parquet", "--columns", "row_id,output").exit_code == 0
    frame = pl.read_parquet(sums.to / "train-*.parquet")
    assert frame.columns == ["row_id", "output"] and len(frame) == 49


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_whole_lines_have_the_columns_in_the_order_of_the_table(form: str, sums: Published) -> None:
    sums.export(form)
    found = pl.read_parquet(sums.to / "train-*.parquet").columns if form == "parquet" else [*sums.records()[0]]
    assert found == [column.name for column in sums.table.columns]


@pytest.mark.slow
def test_parquet_has_row_groups_as_large_as_those_of_the_table(local_objects: Objects, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    found = published(local_objects, tmp_path, questions(2500), part_rows=5000)
    found.export("parquet")
    with pq.ParquetFile(found.to / "train-00000.parquet") as file:
        assert (file.metadata.num_rows, file.metadata.num_row_groups) == (2499, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--format", "preference"), "expected a column for chosen"),
        (("--format", "messages", "--version", "../../x"), "expected a version of 16 hex digits"),
        (("--format", "messages", "--version", "0" * 16), "expected version 0000000000000000, found"),
        (("--format", "messages", "--to", __file__), "expected a folder, found a file"),
        (("--format", "messages", "--to", "https://example.org/x"), "expected a folder or s3://bucket/prefix"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(
    words: Sequence[str], said: str, command: Callable[..., Result]
) -> None:
    found = command(*words)
    assert found.exit_code == 2 and said in found.stderr and "Traceback" not in found.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_export_that_is_ended_leaves_no_work_files_and_goes_on(
    number: signal.Signals, command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("BATCH_ASSETS_WORKDIR", str(tmp_path / "work"))

    def ended(*given: Any, told: Any) -> ExportRecord:
        return export(*given, told=lambda record: os.kill(os.getpid(), number))

    words = ("--format", "messages", "--part-rows", "20")
    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(export_command, "export", ended)
        command(*words)
    assert not list((tmp_path / "work").iterdir())
    found = command(*words)
    assert found.exit_code == 0 and "49 of 50 rows exported" in found.stdout


def test_a_share_for_validation_into_which_no_value_falls_is_said(sums: Published) -> None:
    some = sums.export("messages", validation=0.3)
    none = sums.export("messages", open_objects(f"{sums.to}-none"), validation=0.001)
    assert not any("no row is for validation" in line for line in export_command._lines(some, "there"))
    assert export_command._lines(none, "there")[-2] == (
        "  no row is for validation: no value of 'prompt' falls into a share of 0.001; take a larger one, or a column "
        "of more values"
    )


def test_an_export_that_was_cut_off_goes_on_with_its_version(
    sums: Published, command: Callable[..., Result], tmp_path: Path
) -> None:
    options = sums.options("messages", part_rows=20)
    with pytest.raises(Killed):
        export(sums.objects, sums.table, Dying(open_objects(str(sums.to)), 4, after=False), options)  # type: ignore[arg-type]
    newer = published(sums.objects, tmp_path, questions(60))
    found = command("--format", "messages", "--part-rows", "20")
    assert found.exit_code == 0, found.output
    assert f"49 of 50 rows exported (version {sums.table.version})" in found.stdout
    found = command("--format", "messages", "--part-rows", "20")
    assert found.exit_code == 2 and f"expected an export with version '{newer.table.version}' (found" in found.stderr
