"""One pass over a source: every row becomes a rendered prompt with its key on disk, or a reject."""

from __future__ import annotations

import hashlib
import re
import sys
import zoneinfo
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from batch_assets.snapshot.condition_check import check_conditions
from batch_assets.snapshot.evaluation_files import check_evaluation_files
from batch_assets.snapshot.files import Stage
from batch_assets.snapshot.grouping import rows_of, where_of_rows
from batch_assets.snapshot.json_types import ColumnKinds, arrow_type, to_arrow
from batch_assets.snapshot.prompts.rendering import Prompts
from batch_assets.snapshot.prompts.row_keys import RowKeys
from batch_assets.snapshot.row_index import ColumnFile, halves, id_digest, index_file
from batch_assets.snapshot.source.block import BLOCK_ROWS, Block
from batch_assets.snapshot.source.errors import LISTED, Reject, SourceError, Unseen
from batch_assets.snapshot.source.parquet import plain
from batch_assets.snapshot.source.parquet_types import plain_type
from batch_assets.snapshot.source.reader import refuse_deleted_version
from batch_assets.spec.models import GeneratedDatasetSpec
from gpu_runner.rows import sample_digest, sample_id
from resources.store.snapshot_manifest import (
    REQUEST_FIELDS,
    SAMPLE_INDEX,
    USER_SYSTEM,
    USER_TURNS,
    WantedRows,
    stratum_of,
)

MAX_KEPT = 1 << 20
MAX_ID = 1024
MOST_STRATA = 1000
# Rows rendered at once take about this much memory, however long their prompts are.
_PART_BYTES = 8 << 20
_KEEP = "keep"
_SAMPLED_ID = re.compile(r"~[0-9]{1,2}\Z")
_SAMPLE = pa.field(SAMPLE_INDEX, pa.int32())
_REJECTS = pa.schema([("file", pa.string()), ("line", pa.int64()), ("reason", pa.string())])


@dataclass(slots=True)
class Rejects:
    """Rows that cannot be used: all of them on disk, the first in memory. `versioned`: their files lie in the folder of
    a version of a table, which is not in the sum: another version of the same rows makes the same snapshot.
    """

    path: Path
    skip: bool
    versioned: bool = False
    count: int = 0
    first: list[Reject] = field(default_factory=list)
    sum: int = 0
    _file: ColumnFile | None = None

    def add(self, rejects: Sequence[Reject]) -> None:
        """Note bad rows."""
        self.count += len(rejects)
        self.first += rejects[: max(0, LISTED - len(self.first))]
        if not rejects or not self.skip:
            return
        for reject in rejects:
            file = reject.file.rpartition("/")[2] if self.versioned else reject.file
            text = orjson.dumps([file, reject.line, reject.reason])
            self.sum += int.from_bytes(hashlib.blake2b(text, digest_size=16).digest())
        if self._file is None:
            self._file = ColumnFile(self.path, _REJECTS)
        columns = zip(*((reject.file, reject.line, reject.reason) for reject in rejects), strict=True)
        self._file.add(**dict(zip(_REJECTS.names, map(list, columns), strict=True)))

    def refuse(self) -> None:
        """Raise SourceError where there are bad rows, unless they are to be skipped; more may be added after it."""
        if self.count and not self.skip:
            raise SourceError.of_rows(self.first, self.count)

    def close(self) -> None:
        """Finish the file after the last bad row; raises as `refuse` does."""
        if self._file is not None:
            self._file.close()
        self.refuse()


@dataclass(slots=True)
class Ingested:
    """A source as read: staged rows (row_id with an id column, row_key, prompt, kept columns), and their index."""

    stage: Stage
    index: ColumnFile
    files: list[str]
    rejects: Rejects
    source_rows: int
    content: tuple[int, int]
    keep_fields: list[pa.Field]
    kinds: ColumnKinds | None
    wanted: WantedRows | None = None

    def kept(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The kept columns of staged rows in their final types; the number of the sample is the last one."""
        sampled = [batch.column(SAMPLE_INDEX)] if SAMPLE_INDEX in batch.schema.names else []
        fields = self.keep_fields[: len(self.keep_fields) - len(sampled)]
        if self.kinds is None:
            return [batch.column(f"{_KEEP}:{item.name}") for item in fields] + sampled
        if not fields:
            return sampled
        rows = [orjson.loads(text) for text in batch.column(_KEEP).to_pylist()]
        columns = zip(*rows, strict=True)
        typed = zip(fields, columns, strict=True)
        return [to_arrow(values, self.kinds.kinds.get(item.name)) for item, values in typed] + sampled


def ingest(
    spec: GeneratedDatasetSpec,
    base: Path,
    workdir: Path,
    *,
    published: bool = True,
    wanted: WantedRows | None = None,
) -> Ingested:
    """Read the whole source. Raises SourceError, with the first bad rows unless they are to be skipped.

    `published`: what is read of another dataset is a version of its table. `wanted`: no more rows than these.
    """
    reading = _Reading(spec, base, workdir, wanted)
    try:
        for block in rows_of(spec, reading.check.columns, base, reading.check.unseen):
            if not reading.take(block):
                break
        if published:
            refuse_deleted_version(spec.source, base)
    except LookupError as error:
        if not _is_unknown_zone(error):
            raise
        expected = "expected time zones that this machine knows (Europe/Paris, UTC)"
        raise SourceError(f"{source_name(spec)}: {expected}, found {str(error)[:100]} in a column") from error
    return reading.finish(published=published)


def _is_unknown_zone(error: LookupError) -> bool:
    """Arrow looks time zones up with pytz where that is installed, else with zoneinfo."""
    pytz = sys.modules.get("pytz")
    return isinstance(error, zoneinfo.ZoneInfoNotFoundError) or (
        pytz is not None and isinstance(error, pytz.UnknownTimeZoneError)
    )


@dataclass(slots=True)
class CheckedRows:
    """Rows as the snapshot holds them. `refused`: why rows cannot be used, by their place. `fields`, `keyed`,
    `turns` and `user_systems`: see `prompts.rendering.Rendered`.
    """

    prompts: list[bytes]
    fields: list[bytes] | None
    keyed: list[bytes] | None
    ids: list[str] | None
    kept: list[bytes] | None
    refused: dict[int, str]
    turns: list[list[str]] | None = None
    user_systems: list[str] | None = None

    def take(self, rows: Sequence[int]) -> CheckedRows:
        """Those at these places, none of which is refused."""
        return CheckedRows(
            [self.prompts[i] for i in rows],
            self.fields and [self.fields[i] for i in rows],
            self.keyed and [self.keyed[i] for i in rows],
            self.ids and [self.ids[i] for i in rows],
            self.kept and [self.kept[i] for i in rows],
            {},
            self.turns and [self.turns[i] for i in rows],
            self.user_systems and [self.user_systems[i] for i in rows],
        )


class RowCheck:
    """What makes a row of a source unusable, block after block: the same for a snapshot and for a preview."""

    def __init__(self, spec: GeneratedDatasetSpec, base: Path, wanted: WantedRows | None = None) -> None:
        """`base`: where files of the prompt and the filter lie. Raises SourceError for those that cannot be used."""
        self._spec, self._prompts = spec, Prompts(spec, base)
        check_evaluation_files(spec, base)
        self._wanted = wanted
        self.read: dict[str, int] = {}  # of `wanted`, by stratum
        self._where = where_of_rows(spec)
        columns = [*self._prompts.columns, *spec.keep_columns, *(self._where.columns if self._where else [])]
        self._id = spec.id_column if spec.source.group_by is None else None
        self.columns = list(dict.fromkeys([*columns, *([self._id] if self._id else [])]))
        self.unseen = Unseen(set(self.columns) - self._prompts.required - {self._id})
        self.has_fields, self.has_turns = self._prompts.has_fields, self._prompts.has_turns
        self.has_user_model = spec.prompt.user_model is not None
        self.kinds = ColumnKinds(spec.keep_columns)
        self._typed: list[pa.Field] = []
        self.read_rows = self.source_rows = 0  # before and after `where` and `limit`, with bad ones
        self._readable = False
        self._row_bytes = 0

    def passing(self, block: Block) -> Block:
        """The rows that `where` and `limit` let through; those that cannot be judged are among its rejects."""
        self.read_rows += len(block.lines) + len(block.rejects)
        self._readable = self._readable or bool(block.lines)
        if self._where is not None:
            passing, refused = self._where.split(block)
            rejects = [Reject(block.file, block.lines[i], reason) for i, reason in refused.items()]
            block = block.take(passing)
            block.rejects = block.rejects + rejects
        room = self._spec.source.limit and self._spec.source.limit - self.source_rows
        block = block if room is None else _first(block, room)
        block = block if self._wanted is None else self._first_wanted(block, self._wanted)
        self.source_rows += len(block.lines) + len(block.rejects)
        return block

    def _first_wanted(self, block: Block, wanted: WantedRows) -> Block:
        """The rows of a block that are wanted, by their strata. Rows that cannot be read have none."""
        if wanted.per is None:
            before = self.read.get("", 0)
            block = _first(block, wanted.limit("") - before)
            self.read[""] = before + len(block.lines) + len(block.rejects)
            return block
        chosen = []
        for row, value in enumerate(block.columns[wanted.per]):
            stratum = stratum_of(value)
            found = self.read.get(stratum, 0)
            if found < wanted.limit(stratum):
                self.read[stratum] = found + 1
                chosen.append(row)
        if len(self.read) > MOST_STRATA:
            found_values = f"more than {MOST_STRATA:,} values of {wanted.per!r}"
            raise SourceError(f"want.per: expected a column with at most {MOST_STRATA:,} values, found {found_values}")
        taken = block.take(chosen)
        taken.rejects = block.rejects
        return taken

    @property
    def full(self) -> bool:
        """Whether `limit` is reached, or all rows that are wanted are there."""
        if self._wanted is not None and self._wanted.per is None and self.read.get("", 0) >= self._wanted.limit(""):
            return True
        return self._spec.source.limit is not None and self.source_rows >= self._spec.source.limit

    def parts(self, block: Block) -> Iterator[Block]:
        """The rows of a block, as many at once as their values and the prompts made last allow."""
        texts = sum(len(v) for values in block.columns.values() for v in values if type(v) in (str, bytes))
        expected = self._prompts.constant_bytes + texts // max(1, len(block.lines))
        most = _PART_BYTES // (max(1, expected, self._row_bytes) * self._spec.samples)
        rows = max(1, min(BLOCK_ROWS, most))
        for first in range(0, len(block.lines), rows):
            yield block.part(first, rows)

    def check(self, part: Block) -> CheckedRows:
        """Render the prompts of some rows, and look at their ids and kept columns."""
        refused = self.kinds.learn(part.columns) if part.arrow is None else {}
        if part.arrow is not None and not self._typed:
            self._typed = [pa.field(name, plain_type(part.arrow[name].type)) for name in self._spec.keep_columns]
        found = part.ids if part.ids is not None else part.columns[self._id] if self._id else None
        sampled = self._spec.samples > 1
        ids = None if found is None else _row_ids(found, refused, sampled, theirs=self._spec.id is not None)
        rendered, kept = self._prompts.render(part, refused), self._kept_json(part, refused)
        if prompts := rendered.prompts:
            said = sum(len(text) for turns in rendered.turns or () for text in turns)
            said += sum(map(len, rendered.user_systems or ()))
            self._row_bytes = (sum(map(len, prompts)) + sum(map(len, rendered.fields or ())) + said) // len(prompts)
        said_and_by = (rendered.turns, rendered.user_systems)
        return CheckedRows(prompts, rendered.fields, rendered.keyed, ids, kept, refused, *said_and_by)

    def finish(self) -> None:
        """After the last block: raises SourceError for a column that was in no row, and where there was no row."""
        name = source_name(self._spec)
        if self._readable:
            self.unseen.refuse(name)
        if not self.source_rows:
            why = f"source.where lets none of {self.read_rows:,} through" if self.read_rows else "it is empty"
            raise SourceError(f"{name}: expected at least one row, found none: {why}")

    def check_conditions(self, *, whole: bool) -> None:
        """Hold the conditions on rows that are made against the types of the kept columns. `whole`: all rows were
        checked; until then a column without a type of its own may become another one, but for texts. Raises
        SourceError."""
        found = self._typed
        if not found:
            kinds = {name: self.kinds.kinds.get(name) for name in self._spec.keep_columns}
            found = [pa.field(name, arrow_type(kind)) for name, kind in kinds.items() if whole or kind == "text"]
        check_conditions(self._spec, found)

    def _kept_json(self, part: Block, refused: dict[int, str]) -> list[bytes] | None:
        """The kept columns of each row as JSON: what tells whether they changed, and how untyped ones are staged."""
        if not self._spec.keep_columns:
            return None
        rows = zip(*(_kept_values(part, name) for name in self._spec.keep_columns), strict=True)
        kept = [_row_json(row, i, refused) for i, row in enumerate(rows)]
        for i in [i for i, text in enumerate(kept) if len(text) > MAX_KEPT]:
            refused.setdefault(i, f"the kept columns have {len(kept[i])} bytes, more than {MAX_KEPT}")
        return kept


class _Reading:
    """The state of one pass over a source."""

    def __init__(self, spec: GeneratedDatasetSpec, base: Path, workdir: Path, wanted: WantedRows | None) -> None:
        self._spec, self._workdir, self._wanted = spec, workdir, wanted
        self.check, self._keys = RowCheck(spec, base, wanted), RowKeys(spec.generation())
        skip, versioned = spec.on_bad_row == "skip", spec.source.dataset is not None
        self._rejects = Rejects(workdir / "rejects.parquet", skip, versioned)
        self._index = index_file(workdir / "index.parquet", with_id=spec.has_ids)
        self._stage: Stage | None = None
        self._typed = False
        self._keep_types: list[pa.Field] = []
        self._files: dict[str, int] = {}
        self._content = (0, 0)

    def take(self, block: Block) -> bool:
        """Take in a block; False when the limit is reached."""
        block = self.check.passing(block)
        rejects = list(block.rejects)
        for part in self.check.parts(block):
            rejects += self._take_part(part)
        self._rejects.add(sorted(rejects, key=lambda reject: reject.line))
        return not self.check.full

    def _take_part(self, part: Block) -> list[Reject]:
        """Render and stage some rows; returns those that cannot be used."""
        rows = self.check.check(part)
        rejects = [Reject(part.file, part.lines[i], reason) for i, reason in rows.refused.items()]
        if rows.refused:
            good = [i for i in range(len(part.lines)) if i not in rows.refused]
            part, rows = part.take(good), rows.take(good)
        if rows.prompts:
            self._write(part, rows)
        return rejects

    def _write(self, part: Block, checked: CheckedRows) -> None:
        of_users = (checked.turns, checked.user_systems)
        digests = self._keys.digests(checked.keyed or checked.prompts, checked.fields, *of_users)
        number, (turns, user_systems) = self._spec.samples, of_users
        prompts, fields, ids, kept = checked.prompts, checked.fields, checked.ids, checked.kept
        samples = [sample for _ in prompts for sample in range(number)]
        if number > 1:  # those of one prompt stand next to each other: engines keep the prompt's prefix
            rows = [row for row in range(len(prompts)) for _ in range(number)]
            part, prompts = part.take(rows), [prompts[row] for row in rows]
            fields = fields and [fields[row] for row in rows]
            turns = turns and [turns[row] for row in rows]
            user_systems = user_systems and [user_systems[row] for row in rows]
            digests = [sample_digest(digests[row], sample) for row, sample in zip(rows, samples, strict=True)]
            ids = ids and [sample_id(ids[row], sample) for row, sample in zip(rows, samples, strict=True)]
            kept = kept and [kept[row] for row in rows]
        if self._stage is None:
            self._start(part)
        stage = self._stage
        assert stage is not None
        columns: dict[str, Any] = {"row_key": [digest.hex() for digest in digests], "prompt": prompts}
        if ids is not None:
            columns["row_id"] = ids
        if part.arrow is not None:
            columns |= {f"{_KEEP}:{name}": plain(part.arrow[name]) for name in self._spec.keep_columns}
        elif kept is not None:
            columns[_KEEP] = kept
        if SAMPLE_INDEX in stage.schema.names:
            columns[SAMPLE_INDEX] = samples
        if fields is not None:
            columns[REQUEST_FIELDS] = [own or None for own in fields]
        if turns is not None:
            columns[USER_TURNS] = [orjson.dumps(said) for said in turns]
        if user_systems is not None:
            columns[USER_SYSTEM] = user_systems
        arrays = [_array(columns[item.name], item.type) for item in stage.schema]
        file = self._files.setdefault(part.file, len(self._files))
        self._add_to_index(digests, ids, file, part.lines, stage.rows)
        self._add_to_content(digests, ids, kept)
        stage.add(pa.record_batch(arrays, schema=stage.schema))

    def _start(self, part: Block) -> None:
        fields = [pa.field("row_key", pa.string()), pa.field("prompt", pa.binary())]
        if self._spec.has_ids:
            fields.insert(0, pa.field("row_id", pa.string()))
        self._typed = part.arrow is not None
        if part.arrow is not None:
            self._keep_types = [pa.field(name, plain_type(part.arrow[name].type)) for name in self._spec.keep_columns]
            fields += [pa.field(f"{_KEEP}:{item.name}", item.type) for item in self._keep_types]
        elif self._spec.keep_columns:
            fields.append(pa.field(_KEEP, pa.binary()))
        if self._spec.samples > 1:
            fields.append(_SAMPLE)
        if self.check.has_fields:
            fields.append(pa.field(REQUEST_FIELDS, pa.binary()))
        if self.check.has_turns:
            fields.append(pa.field(USER_TURNS, pa.binary()))
        if self.check.has_user_model:
            fields.append(pa.field(USER_SYSTEM, pa.string()))
        self._stage = Stage(self._workdir / "stage.arrow", pa.schema(fields))

    def _add_to_index(self, digests: list[bytes], ids: list[str] | None, file: int, lines: list[int], seq: int) -> None:
        key_hi, key_lo = halves(b"".join(digests), 32)
        extra: dict[str, Any] = {}
        if ids is not None:
            extra["id_hi"], extra["id_lo"] = halves(b"".join(map(id_digest, ids)), 16)
            extra["row_id"] = ids
        rows = len(digests)
        place = {
            "seq": np.arange(seq, seq + rows, dtype=np.int64),
            "file": np.full(rows, file, np.int32),
            "line": lines,
        }
        self._index.add(key_hi=key_hi, key_lo=key_lo, **place, **extra)

    def _add_to_content(self, digests: list[bytes], ids: list[str] | None, kept: list[bytes] | None) -> None:
        """A sum over rows, so that it does not depend on their order: equal content gives an equal sum."""
        if ids is not None:
            digests = [
                hashlib.sha256(digest + row_id.encode()).digest() for digest, row_id in zip(digests, ids, strict=True)
            ]
        if kept is not None:
            digests = [hashlib.sha256(digest + text).digest() for digest, text in zip(digests, kept, strict=True)]
        high, low = halves(b"".join(digests), 32)
        mask = (1 << 64) - 1
        self._content = (self._content[0] + int(high.sum())) & mask, (self._content[1] + int(low.sum())) & mask

    def finish(self, *, published: bool) -> Ingested:
        """Close the files and say what was read. The rejects stay open: repeated ids are found among all rows.
        `published` as in `ingest`."""
        self._index.close()
        if self._stage is not None:
            self._stage.close()
        self.check.finish()
        self._rejects.refuse()
        if self._stage is None:
            self._rejects.close()
            raise SourceError.of_no_row(source_name(self._spec), self._rejects.first, self._rejects.count)
        self.check.check_conditions(whole=published)
        fields = self._keep_types
        if not self._typed:
            fields = [pa.field(name, arrow_type(self.check.kinds.kinds.get(name))) for name in self._spec.keep_columns]
        if self._spec.samples > 1:
            fields = [*fields, _SAMPLE]
        kinds = None if self._typed else self.check.kinds
        rows, content = self.check.source_rows, self._content
        wanted = self._wanted and self._wanted.model_copy(update={"read": dict(self.check.read)})
        files = list(self._files)
        return Ingested(self._stage, self._index, files, self._rejects, rows, content, fields, kinds, wanted)


def source_name(spec: GeneratedDatasetSpec) -> str:
    """The source as shown to people."""
    source = spec.source
    if source.dataset is not None:
        version = source.table_version
        part = ", the rows that pass" if source.passed else ", the judged rows" if source.judged else ""
        return f"dataset {source.dataset}{part}" + (f", version {version}" if version else "")
    return source.path or source.asset or f"grid of {' × '.join(spec.source.grid or {})}"


def _first(block: Block, room: int) -> Block:
    """The block cut to `room` rows, rejects counted with them, in the order of their lines."""
    if len(block.lines) + len(block.rejects) <= room:
        return block
    places = [(line, False, row) for row, line in enumerate(block.lines)]
    places += [(reject.line, True, number) for number, reject in enumerate(block.rejects)]
    first = sorted(places)[:room]  # rows that were made of one line have the same one
    cut = block.take(sorted(place for _, is_reject, place in first if not is_reject))
    cut.rejects = [block.rejects[place] for _, is_reject, place in first if is_reject]
    return cut


def _row_ids(values: list[Any], refused: dict[int, str], sampled: bool, *, theirs: bool) -> list[str]:
    """Ids as texts. `theirs`: the user named their column. Others, as of a sample of the dataset that is read, get a
    `/` where a further sample of another row might have the same id.
    """
    ids = []
    for i, value in enumerate(values):
        row_id = str(value) if type(value) is int else value
        if type(row_id) is not str:
            found = "null" if value is None else f"a value of type {type(value).__name__}"
            refused.setdefault(i, f"id: expected text or a whole number, found {found}")
            row_id = ""
        elif not row_id.strip():
            refused.setdefault(i, "id: expected text or a whole number, found nothing but blanks")
        elif len(row_id) > MAX_ID:
            refused.setdefault(i, f"id: expected at most {MAX_ID} characters, found {len(row_id)}")
        elif sampled and _SAMPLED_ID.search(row_id) and not theirs:
            row_id += "/"
        elif sampled and _SAMPLED_ID.search(row_id):
            refused.setdefault(i, "id: expected an end other than ~ and a number, which names a sample")
        ids.append(row_id)
    return ids


def _kept_values(part: Block, name: str) -> list[Any]:
    """Values of a kept column; UUIDs are kept as the bytes that they are in Parquet."""
    if part.arrow is not None and pa.types.is_fixed_size_binary(part.arrow[name].type):
        return list(part.arrow[name].to_pylist())
    return part.columns[name]


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, kind)


def _row_json(row: tuple[Any, ...], place: int, refused: dict[int, str]) -> bytes:
    try:
        return orjson.dumps(row, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError as error:  # nested deeper than 254 levels, lone surrogates
        refused.setdefault(place, f"the kept columns cannot be kept: {error}")
        return b""


def _plain(value: Any) -> str:
    """Values of Parquet columns that JSON does not know (decimals, bytes, time spans)."""
    return value.hex() if isinstance(value, bytes) else str(value)
