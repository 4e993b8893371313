"""The files that a source names: found on disk, in a bucket or on the Hugging Face hub, opened, unpacked."""

from __future__ import annotations

import codecs
import contextlib
import glob
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast
from urllib.parse import unquote

from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.hub_files import HubCommit, HubFile
from batch_assets.snapshot.source.signatures import LOOKED_AT, refuse_other_kind, text_or_other_kind
from resources.objects.hub_client import HubAddress, hub_address
from resources.objects.object_interface import ObjectInfo
from resources.objects.opening import bucket_address, open_objects

READ_BYTES = 1 << 20
_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def first_read(stream: BinaryIO, size: int) -> bytes:
    """The beginning of a text in UTF-8, without its byte order mark, which may come in several reads."""
    data = b""
    while len(data) <= len(codecs.BOM_UTF8) and (more := stream.read(size)):
        data += more
    return data.removeprefix(codecs.BOM_UTF8)


class _Utf8(io.RawIOBase):
    """The bytes of a text in UTF-8. The first ones decide whether the text can be in the encoding that was named."""

    def __init__(self, raw: BinaryIO, encoding: str, name: str) -> None:
        self._raw, self._encoding, self._name = raw, encoding, name
        self._taken, self._begun = 0, False
        self._decoder: codecs.IncrementalDecoder | None = None

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """At least one byte until the end; more than `size` where characters take more bytes in UTF-8."""
        while True:
            data = self._raw.read(READ_BYTES if size < 0 else size)
            if not self._begun:
                data = self._first(data)
            text = self._decoded(data) if self._decoder else data
            if text or not data:
                return text

    def _first(self, data: bytes) -> bytes:
        """The beginning of the file, at least two bytes of it where there are as many; sets the decoder."""
        while len(data) < 2 and (more := self._raw.read(2)):
            data += more
        self._begun = True
        refuse_other_kind(self._name, data)
        encoding = self._checked(data)
        if encoding != "utf-8":
            self._decoder = codecs.getincrementaldecoder(encoding)()
        return data

    def _checked(self, data: bytes) -> str:
        """The encoding to read with. Raises SourceError where the first bytes are of another one."""
        marked = _MARKS.get(data[:2])
        if self._encoding == "utf-16":
            if data and marked is None:
                raise SourceError(
                    f"{self._name}: expected UTF-16 with a byte order mark at its beginning, as source.encoding says, "
                    "found none; write utf-16-le or utf-16-be, or leave the encoding out if the file is UTF-8"
                )
            return marked or "utf-8"
        if self._encoding != "utf-8":
            return self._encoding
        found = "utf-16" if marked else _without_mark(data)
        if found:
            raise SourceError(
                f"{self._name}: expected text in UTF-8, found UTF-16 (its first bytes are {data[:2].hex(' ')}); "
                f"write source.encoding: {found}"
            )
        return "utf-8"

    def _decoded(self, data: bytes) -> bytes:
        assert self._decoder is not None
        waiting = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(data, final=not data)
            self._taken += len(data)
            return text.encode()
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{self._name}: expected text in {self._encoding}, as source.encoding says, found bytes that are none "
                f"at byte {self._taken - waiting + error.start + 1}; correct the file, or name its encoding"
            ) from error


def _without_mark(data: bytes) -> str | None:
    """The UTF-16 that these first bytes are in: a file of text begins with a character of ASCII, and holds no NUL."""
    if len(data) < 2 or (data[0] == 0) == (data[1] == 0):
        return None
    return "utf-16-be" if data[0] == 0 else "utf-16-le"


def in_utf8(raw: BinaryIO, encoding: str | None, name: str) -> BinaryIO:
    """The stream of a text file as UTF-8. Its `read` raises SourceError for bytes that are not of the encoding."""
    return cast(BinaryIO, _Utf8(raw, encoding or "utf-8", name))


# A text file that unpacks to more than this many times its size is no text (deflate reaches 1032 on a constant).
MAX_RATIO, RATIO_FROM = 300, 1 << 26
# Of a repository on the hub: files looked at for those that could be meant, and how many of them an error names.
SEARCHED_FILES, SHOWN_FILES = 10_000, 10
SEARCHED_TABLES = 100  # folders of files that are looked at for the log of a table
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source: its name for people, its size, how to open it, and what changes when it is replaced.

    `version`: of its content, told without reading it: another one after every write. "" where nobody can tell.
    `changed_at`: when that last became another one, in Unix seconds by the clock of a disk; 0.0 in a bucket.
    """

    name: str
    bytes: int
    open: Callable[[], BinaryIO]
    stamp: Callable[[], object]
    version: str = ""
    changed_at: float = 0.0


def format_of(name: str, given: str | None) -> tuple[str, str]:
    """(format, compression) of a file, from its ending."""
    ending, packed = _ending(name)
    kind = given or _FORMATS.get(ending)
    if kind is None:
        raise SourceError(
            f"{name}: expected a file ending in {', '.join(_FORMATS)} (.gz or .zst may follow); name its format "
            "under source.format"
        )
    if kind == "parquet" and packed:
        raise SourceError(f"{name}: Parquet compresses itself; a packed Parquet file cannot be read in blocks")
    return kind, packed


def _ending(name: str) -> tuple[str, str]:
    """The ending that says the format, and that of what packed it, or ""."""
    path = PurePosixPath(name.lower())
    packed = path.suffix if path.suffix in (".gz", ".zst") else ""
    return (path.with_suffix("") if packed else path).suffix, packed


def folder_columns(name: str) -> dict[str, str | None]:
    """Columns that the folders of a file say, `lang=de/part-0.parquet`: text, as it is unquoted; null for the folder
    of rows without a value.

    Hive writes them so, and Spark, pyarrow, Polars and DuckDB as well (Spark: Partition Discovery).
    """
    found: dict[str, str | None] = {}
    for folder in name.split("/")[:-1]:
        key, sign, value = folder.partition("=")
        if sign and key:
            found[unquote(key)] = None if value in ("", _NO_VALUE) else unquote(value)
    return found


def find_files(path: str, base: Path) -> list[SourceFile]:
    """The files a source path names, sorted by name. Raises SourceError when there are none."""
    try:
        on_hub = hub_address(path)
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None
    if on_hub is not None:
        return _hub_files(on_hub)
    remote = bucket_address(path) is not None
    files = _bucket_files(path) if remote else _local_files(path, base)
    if not files:
        raise SourceError(
            f"{path}: no such file" + (f" below {base}" if not remote and not Path(path).is_absolute() else "")
        )
    return files


def is_folder(path: str) -> bool:
    """Whether a whole path, or an address in a bucket, is a folder. Raises SourceError where that cannot be read."""
    if (address := bucket_address(path)) is None:
        try:
            return Path(path).is_dir()
        except OSError:  # too long, or not to be looked into: who reads it says so
            return False
    scheme, bucket, key = address
    with _readable_store(path):
        return next(iter(open_objects(f"{scheme}://{bucket}").list(f"{key}/")), None) is not None


def _local_files(path: str, base: Path) -> list[SourceFile]:
    try:
        whole = base / Path(path).expanduser()
        if whole.is_dir():
            raise SourceError(f"{path}: expected a file or a glob, found a folder; write for example {path}/*.parquet")
        # A name that exists is meant as it is, also with brackets in it. Path.glob would also find hidden files.
        found = [whole] if whole.is_file() else _matching(whole)
        files = [file for file in found if file.is_file()]
        for file in files:
            refuse_system_file(path, file)
        _refuse_table_format(path, map(str, files), _names_of_folder)
        return [_local_file(file, base) for file in files]
    except RuntimeError as error:  # of expanduser
        raise SourceError(f"{path}: expected a home folder that exists at its beginning, found none") from error
    except (OSError, ValueError) as error:  # too long, a loop of links, a NUL byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise SourceError(
            f"{path}: expected the path of a file, found one that cannot be looked up ({reason})"
        ) from error


def _refuse_table_format(path: str, files: Iterable[str], names: Callable[[str], Iterator[str]]) -> None:
    """Raise SourceError for data files of a Delta or an Iceberg table: only its log says which of their rows are left.

    `names`: of what lies in a folder, none where there is none.
    """
    folders = {PurePosixPath(file).parent for file in files if _ending(file)[0] in (".parquet", ".pq")}
    roots = {next((one for one in (folder, *folder.parents) if "=" not in one.name), folder) for folder in folders}
    for root in sorted(roots)[:SEARCHED_TABLES]:
        kind = "a Delta" if next(names(f"{root}/_delta_log"), None) else ""
        if root.name == "data":
            found = itertools.islice(names(f"{root.parent}/metadata"), SEARCHED_FILES)
            kind = kind or ("an Iceberg" if any(name.endswith(".metadata.json") for name in found) else "")
        if kind:
            raise SourceError(
                f"{path}: expected plain files, found those of {kind} table, which hold deleted rows, too; write its "
                "rows to Parquet files of their own"
            )


def _names_of_folder(folder: str) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry.name


def refuse_system_file(path: str, file: Path) -> None:
    """Raise SourceError for what the kernel makes up: /proc has the secrets of processes, /dev has no end."""
    if file.resolve().is_relative_to("/proc") or file.resolve().is_relative_to("/sys"):
        raise SourceError(f"{path}: expected a file with data, found one of the operating system's own")


def _matching(pattern: Path) -> list[Path]:
    """The files and folders that a glob names, sorted, each real one once.

    Links to folders are followed, but not to one that was seen: they may go round in circles.
    """
    parts = pattern.parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    if "**" not in parts[fixed:]:
        names = sorted(glob.glob(str(pattern)))  # noqa: PTH207 - Path.glob would find hidden files
        return _once([Path(name) for name in names])
    top = Path(*parts[:fixed])
    matches = _glob_pattern("/".join(parts[fixed:])).fullmatch
    hidden = any(part.startswith(".") for part in parts[fixed:])
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(top, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
        for name in files:
            file = Path(folder) / name
            if (hidden or not name.startswith(".")) and matches(file.relative_to(top).as_posix()):
                found.append(file)
    return _once(sorted(found))


def _once(files: Sequence[Path]) -> list[Path]:
    """The files without those that are another one under the name of a link."""
    real: dict[Path, Path] = {}
    for file in files:
        real.setdefault(Path(os.path.realpath(file)), file)
    return list(real.values())


def _local_file(file: Path, base: Path) -> SourceFile:
    def stamp() -> object:
        status = file.stat()
        return status.st_size, status.st_mtime_ns, status.st_ino

    name, now = str(file.relative_to(base)) if file.is_relative_to(base) else str(file), file.stat()
    # The kernel sets the time of the last change (ctime) at every write; no program can set it back.
    version = f"{now.st_dev}-{now.st_ino}-{now.st_size}-{now.st_mtime_ns}-{now.st_ctime_ns}"
    return SourceFile(name, now.st_size, lambda: file.open("rb"), stamp, version, now.st_ctime)


def _bucket_files(path: str) -> list[SourceFile]:
    scheme, bucket, key = bucket_address(path) or ("s3", "", "")
    if not bucket or not key:
        raise SourceError(f"{path}: expected {scheme}://bucket/key or {scheme}://bucket/folder/*.parquet")
    objects = open_objects(f"{scheme}://{bucket}")
    wild = re.search(r"[*?\[]", key)
    folder = key[: wild.start() if wild else len(key)].rpartition("/")[0]
    matches = _glob_pattern(key).fullmatch if wild else key.__eq__
    with _readable_store(path):
        found = [info for info in objects.list(folder + "/" if folder else "") if matches(info.path)]
        _refuse_table_format(
            path, (info.path for info in found), lambda place: (info.path for info in objects.list(f"{place}/"))
        )

    def file(info: ObjectInfo) -> SourceFile:
        def stamp() -> object:
            with objects.open(info.path) as stream:
                return stream.seek(0, io.SEEK_END)

        name, version = f"{scheme}://{bucket}/{info.path}", f"{info.size}-{info.etag}" if info.etag else ""
        return SourceFile(name, info.size, lambda: objects.open(info.path), stamp, version)

    return [file(info) for info in found]


def _hub_files(address: HubAddress) -> list[SourceFile]:
    commit, key = HubCommit.of(address), address.path
    wild = re.search(r"[*?\[]", key)
    folder = key[: wild.start() if wild else len(key)].rpartition("/")[0]
    matches = _glob_pattern(key).fullmatch if wild else key.__eq__
    recursive = "/" in key[len(folder) + bool(folder) :]
    found = [one for one in commit.list(folder, recursive=recursive) if matches(one.path)] if key else []
    if not found:
        raise SourceError(f"{address}: {_missing(commit)}")

    def file(one: HubFile) -> SourceFile:
        # Without the revision: a row that cannot be used stays the same where only the revision is another one.
        name = str(HubAddress(address.repo, path=one.path))
        return SourceFile(name, one.size, lambda: commit.open(one), lambda: commit.commit, commit.commit)

    return [file(one) for one in sorted(found, key=lambda one: one.path)]


def _missing(commit: HubCommit) -> str:
    """What is expected where no file was named, or none that is there; names some of those that could be."""
    listed = itertools.islice(commit.list(), SEARCHED_FILES)
    there = [one.path for one in listed if _ending(one.path)[0] in _FORMATS]
    more = f" and {len(there) - SHOWN_FILES} more" if len(there) > SHOWN_FILES else ""
    names = ", ".join(there[:SHOWN_FILES]) + more or f"none that ends in {', '.join(_FORMATS)}"
    folder = there[0].rpartition("/")[0] + "/" if there and "/" in there[0] else ""
    example = f"; write for example {HubAddress(commit.address.repo, path=f'{folder}*.parquet')}"
    wanted = "no such file" if commit.address.path else "expected a file or a glob of files, found a repository"
    return f"{wanted}; its files: {names}{'' if commit.address.path else example}"


@contextlib.contextmanager
def _readable_store(path: str) -> Iterator[None]:
    """Turns the store's own errors into a SourceError; only their first line speaks to people."""
    from obstore.exceptions import BaseError

    try:
        yield
    except BaseError as error:
        reason = _s3_error_code(error) or type(error).__name__
        raise SourceError(f"{path}: the store refuses to be read ({reason})") from error


def _s3_error_code(error: Exception) -> str | None:
    """The code in S3's answer (AccessDenied), which obstore only has in its text; None without one."""
    code = re.search(r"<Code>(\w+)</Code>", str(error))
    return code[1] if code else None


def _glob_pattern(pattern: str) -> re.Pattern[str]:
    """`*` and `?` stay within a folder, `**/` crosses folders, `[…]` is a set: as in Python's glob."""
    out, at = "", 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
        elif pattern[at] in "*?":
            out, at = out + ("[^/]*" if pattern[at] == "*" else "[^/]"), at + 1
        elif pattern[at] == "[" and (end := pattern.find("]", at + 2)) > 0:
            inside = re.sub(r"[\\\[]", r"\\\g<0>", pattern[at + 1 : end])
            out, at = out + f"[{'^' + inside[1:] if inside.startswith('!') else inside}]", end + 1
        else:
            out, at = out + re.escape(pattern[at]), at + 1
    return re.compile(out)


class _Unpacked(io.RawIOBase):
    """A decompressed stream that stops at absurd ratios, so that a small file cannot occupy the reader for ever."""

    def __init__(self, raw: BinaryIO, packed: str, name: str) -> None:
        import pyarrow as pa

        self._raw, self._name, self._given = raw, name, 0
        codec = "gzip" if packed == ".gz" else "zstd"
        self._codec, self._stream = codec, pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)

    def _instead(self) -> str:
        """What the file is, where nothing of it could be unpacked; "" where that cannot be told."""
        if self._given or not self._raw.seekable():
            return ""
        self._raw.seek(0)
        found = text_or_other_kind(self._name, self._raw.read(LOOKED_AT))
        if found == "text":
            found = f"text that is not packed; call it {PurePosixPath(self._name).stem}"
        elif found is not None and found.startswith(f"a file packed with {self._codec}"):
            return ""
        return f": expected {self._codec}, found {found}" if found else ""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            data = cast(bytes, self._stream.read(size))
        except OSError as error:
            raise SourceError(f"{self._name}: cannot be unpacked{self._instead() or f' ({error})'}") from error
        self._given += len(data)
        if self._given > RATIO_FROM and self._given > MAX_RATIO * self._raw.tell():
            raise SourceError(
                f"{self._name}: unpacks to more than {MAX_RATIO} times its size; unpack it yourself first"
            )
        return data


def unpacked(raw: BinaryIO, packed: str, name: str) -> BinaryIO:
    """The stream without its compression (".gz", ".zst", or "" for none)."""
    return cast(BinaryIO, _Unpacked(raw, packed, name)) if packed else raw
