"""Objects on a local folder or in S3, behind one small interface.

The one promise everything rests on is `create`: the first writer wins and every later one is refused, at the level
of the store itself. On S3 that is one PUT with `If-None-Match: *` (never multipart: Ceph RGW does not enforce the
condition on CompleteMultipartUpload); on disk it is a hard link to a file that was synced before.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from obstore.store import S3Store

_TEMPORARY = ".writing-"
# What is read whole: batch objects, journal segments, lists of batches. Larger things are read in ranges.
LARGEST_OBJECT = 2 << 30
# Of a sensor, whose tick must end within 60 s whatever the store does.
SENSOR_RETRY_SECONDS, SENSOR_REQUEST_SECONDS = 5.0, 10.0


class StoreError(Exception):
    """The store cannot be used as it is: says what was expected, what was found, and what to do."""


class CorruptObject(StoreError):
    """An object in the store does not say what its name promises."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing: its path below the root and its size in bytes.

    `etag` changes whenever the object is written again; a change of bytes that goes past the store may leave it.
    """

    path: str
    size: int
    etag: str = ""


class Objects(Protocol):
    """What the platform needs of a store. Paths use `/` and are relative to the root."""

    root: str

    def create(self, path: str, data: bytes) -> bool:
        """Write an object that must not exist; False when another writer's is there.

        Bytes that are there already and equal to `data` may count as ours (on S3 they do: the reply to our own PUT can
        be lost), so what two writers must not both win has to differ between them.
        """

    def put(self, path: str, data: bytes) -> None:
        """Write or replace a small object."""

    def upload(self, path: str, file: Path) -> None:
        """Write or replace an object from a local file of any size."""

    def get(self, path: str, most: int = LARGEST_OBJECT) -> bytes:
        """The whole object. Raises FileNotFoundError, and CorruptObject for one of more than `most` bytes."""

    def exists(self, path: str) -> bool:
        """True when the object is there."""

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects below `prefix` (a folder, ending in `/`) whose path sorts after `start_after`, in order."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects; one that is not there is no error."""

    def open(self, path: str) -> BinaryIO:
        """The object as a seekable binary file, read in ranges. Raises FileNotFoundError."""

    def uri(self, path: str) -> str:
        """A path or `s3://` URL that Polars, DuckDB and pyarrow can read."""

    def storage_options(self) -> dict[str, str]:
        """Options for `polars.scan_parquet(uri, storage_options=…)`; empty for a local folder."""


def open_objects(root: str, *, retry_seconds: float = 180.0, request_seconds: float = 60.0) -> Objects:
    """Objects below `root`: `s3://bucket/prefix`, `file:///folder` or a folder.

    `retry_seconds`: how long a request to S3 is tried again; `request_seconds`: how long one try may take. Short where
    somebody waits for an answer: a call ends after about the sum of both.

    S3 credentials and endpoint come from boto3's usual chain and AWS_ENDPOINT_URL; they are never part of the root.
    """
    try:
        parts = urlsplit(root)
    except ValueError:
        raise StoreError("store root: expected a folder or s3://bucket/prefix, found what cannot be read") from None
    if parts.scheme == "s3":
        if not parts.netloc or {"@", ":"} & set(parts.netloc) or "?" in root or "#" in root:
            raise StoreError(
                f"store root: expected s3://bucket/prefix, found {parts.scheme}://…; keys belong in the environment"
            )
        return S3Objects(parts.netloc, parts.path.strip("/"), retry_seconds, request_seconds)
    if parts.scheme == "file":
        return LocalObjects(Path(parts.path))
    if parts.scheme and len(parts.scheme) > 1:
        raise StoreError(f"store root: expected a folder or s3://bucket/prefix, found scheme {parts.scheme!r}")
    return LocalObjects(Path(root))


def open_for_sensor(root: str) -> Objects:
    """The same for a sensor: a bucket that answers with errors, or not at all, costs it some 20 s at most."""
    return open_objects(root, retry_seconds=SENSOR_RETRY_SECONDS, request_seconds=SENSOR_REQUEST_SECONDS)


def checked_root(root: str) -> str:
    """The same root. Raises StoreError when nothing can be opened there: it may hold a secret that nobody is to see."""
    open_objects(root)
    return root


class LocalObjects:
    """Objects as files below a folder. It is made once: one that is gone later is not mounted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().resolve()
        self.root = str(self.folder)
        self._was_there = self.folder.is_dir()

    def _file(self, path: str) -> Path:
        file = self.folder / path
        if ".." in Path(path).parts or Path(path).is_absolute():
            raise StoreError(f"object path: expected a path below the root, found {path!r}")
        return file

    @contextlib.contextmanager
    def _written(self, path: str) -> Iterator[tuple[Path, BinaryIO]]:
        """A synced temporary file beside its destination, removed at the end whatever happened."""
        target = self._file(path)
        temporary = target.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        with contextlib.ExitStack() as stack:
            stack.callback(temporary.unlink, missing_ok=True)
            file = stack.enter_context(self._opened(temporary))
            yield temporary, file

    def _opened(self, temporary: Path) -> BinaryIO:
        for _ in range(100):
            with contextlib.suppress(FileNotFoundError):  # somebody's delete took the folder away when it was empty
                self._make_folder(temporary.parent)
                return temporary.open("xb")
        raise StoreError(f"{temporary.parent}: expected a folder, found that it vanishes as often as it is made")

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents, each synced into the one above: an object is no safer than its folder."""
        if not folder.is_dir():
            # Asked again after the flag: another thread may just have made it.
            if folder == self.folder and self._was_there and not folder.is_dir():
                raise StoreError(f"{folder}: the store's folder is gone; mount it again, or make an empty one")
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
            self._was_there = True
            self._sync_folder(folder.parent)

    @staticmethod
    def _sync(file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def create(self, path: str, data: bytes) -> bool:
        target = self._file(path)
        if target.exists():
            return False
        with self._written(path) as (temporary, file):
            file.write(data)
            self._sync(file)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
        self._sync_folder(target.parent)
        return True

    def put(self, path: str, data: bytes) -> None:
        with self._written(path) as (temporary, file):
            file.write(data)
            self._sync(file)
            temporary.replace(self._file(path))
        self._sync_folder(self._file(path).parent)

    def upload(self, path: str, file: Path) -> None:
        with self._written(path) as (temporary, copy):
            with file.open("rb") as source:
                while block := source.read(1 << 22):
                    copy.write(block)
            self._sync(copy)
            temporary.replace(self._file(path))
        self._sync_folder(self._file(path).parent)

    def get(self, path: str, most: int = LARGEST_OBJECT) -> bytes:
        with self._file(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return file.read() if size <= most else _refuse(path, size, most)

    def exists(self, path: str) -> bool:
        return self._file(path).is_file()

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        folder = self._file(prefix)
        if folder.is_dir():
            yield from self._walk(folder, prefix.rstrip("/") + "/" if prefix else "", start_after)

    def _walk(self, folder: Path, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name + "/" if entry.is_dir() else entry.name)
        except FileNotFoundError:  # emptied and removed while we listed
            return
        for entry in entries:
            path = prefix + entry.name
            if entry.is_dir():
                if path + "/" > start_after or start_after.startswith(path + "/"):
                    yield from self._walk(Path(entry.path), path + "/", start_after)
            elif path > start_after and not entry.name.startswith(_TEMPORARY):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat()
                    yield ObjectInfo(path, found.st_size, f"{found.st_ino:x}-{found.st_mtime_ns:x}")

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            file = self._file(path)
            file.unlink(missing_ok=True)
            if file.parent != self.folder:
                with contextlib.suppress(OSError):
                    file.parent.rmdir()

    def open(self, path: str) -> BinaryIO:
        import pyarrow as pa

        # Not Python's own file: a thread of Arrow that lets go of one while the interpreter ends aborts the process.
        return cast(BinaryIO, pa.OSFile(str(self._file(path)), "rb"))

    def uri(self, path: str) -> str:
        return str(self._file(path))

    def storage_options(self) -> dict[str, str]:
        return {}


class S3Objects:
    """Objects below a prefix of an S3 bucket, through obstore (path-style on a custom endpoint)."""

    def __init__(self, bucket: str, prefix: str, retry_seconds: float = 180.0, request_seconds: float = 60.0) -> None:
        self.bucket, self.prefix = bucket, prefix
        self._timeout = datetime.timedelta(seconds=request_seconds)
        self._retry = datetime.timedelta(seconds=retry_seconds)
        self.root = f"s3://{bucket}/{prefix}".rstrip("/")
        self._store_handle: S3Store | None = None

    @property
    def _store(self) -> S3Store:
        if self._store_handle is None:
            from obstore.auth.boto3 import Boto3CredentialProvider
            from obstore.store import S3Store

            endpoint = _s3_endpoint()
            config: dict[str, Any] = {"region": _s3_region()}
            if endpoint:
                config |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
            allow_http = bool(endpoint and endpoint.startswith("http://"))
            self._store_handle = S3Store(
                self.bucket,
                prefix=self.prefix or None,
                credential_provider=Boto3CredentialProvider(),
                client_options={"allow_http": allow_http, "timeout": self._timeout},
                retry_config={"max_retries": 8, "retry_timeout": self._retry},
                **config,
            )
        return self._store_handle

    def create(self, path: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        for attempt in range(5):
            try:
                obstore.put(self._store, path, data, mode="create", use_multipart=False)
                return True
            except AlreadyExistsError:
                # Ours when the reply to our own PUT was lost; a conflict (409) when nothing is there: PUT again.
                with contextlib.suppress(FileNotFoundError):
                    return self.get(path) == data
                time.sleep(0.05 * 2**attempt)
        raise StoreError(
            f"{self.root}/{path}: the store answers that the object exists, and that it does not; nothing was written"
        )

    def put(self, path: str, data: bytes) -> None:
        import obstore

        obstore.put(self._store, path, data)

    def upload(self, path: str, file: Path) -> None:
        import obstore

        obstore.put(self._store, path, file)

    def get(self, path: str, most: int = LARGEST_OBJECT) -> bytes:
        import obstore

        found = obstore.get(self._store, path)  # its body comes with bytes()
        size = found.meta["size"]
        return bytes(found.bytes()) if size <= most else _refuse(path, size, most)

    def exists(self, path: str) -> bool:
        import obstore

        try:
            obstore.head(self._store, path)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        import obstore

        for page in obstore.list(self._store, prefix.rstrip("/") or None, offset=start_after or None, chunk_size=1000):
            for meta in page:
                yield ObjectInfo(meta["path"], meta["size"], meta["e_tag"] or "")

    def delete(self, paths: Iterable[str]) -> None:
        import obstore

        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, path)

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_Ranges(self, path), buffer_size=1 << 16))

    def uri(self, path: str) -> str:
        return f"{self.root}/{path}"

    def storage_options(self) -> dict[str, str]:
        import boto3

        options = {"aws_region": _s3_region()}
        if endpoint := _s3_endpoint():
            options |= {"aws_endpoint_url": endpoint, "aws_virtual_hosted_style_request": "false"}
            if endpoint.startswith("http://"):
                options["aws_allow_http"] = "true"
        credentials = boto3.Session().get_credentials()
        if credentials is not None:
            frozen = credentials.get_frozen_credentials()
            options |= {"aws_access_key_id": frozen.access_key, "aws_secret_access_key": frozen.secret_key}
            if frozen.token:
                options["aws_session_token"] = frozen.token
        return options


class _Ranges(io.RawIOBase):
    """An S3 object as a seekable file: every read is one ranged GET."""

    def __init__(self, objects: S3Objects, path: str) -> None:
        import obstore

        self._objects, self._path = objects, path
        self._size = obstore.head(objects._store, path)["size"]
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        import obstore

        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        data = obstore.get_range(self._objects._store, self._path, start=self._at, length=length)
        buffer[:length] = memoryview(data)
        self._at += length
        return length


def _refuse(path: str, size: int, most: int) -> bytes:
    raise CorruptObject(f"{path}: expected an object of at most {most:,} bytes, found {size:,}: it is none of ours")


def _s3_endpoint() -> str | None:
    """Address of an S3 server that is not Amazon's. Raises StoreError for one with a secret in it: errors show it."""
    name = "AWS_ENDPOINT_URL_S3" if os.environ.get("AWS_ENDPOINT_URL_S3") else "AWS_ENDPOINT_URL"
    found = os.environ.get(name)
    if found and {"@", "?", "#"} & set(found):
        raise StoreError(f"{name}: expected an address without user, password, query or fragment")
    return found


def _s3_region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def self_test(objects: Objects) -> None:
    """Prove that the store refuses a second create. Raises StoreError: no GPU is rented with nowhere safe to write."""
    path = f"_self_test/{uuid.uuid4().hex}"
    try:
        first, second = objects.create(path, b"first"), objects.create(path, b"second")
        kept = objects.get(path)
    except StoreError:
        raise
    except Exception as error:  # OSError on disk, obstore's own on S3, boto3's without credentials
        said = str(error).partition("\n")[0]
        raise StoreError(f"{objects.root}: cannot write here ({type(error).__name__}: {said})") from error
    finally:
        with contextlib.suppress(Exception):
            objects.delete([path])
    if not first or second or kept != b"first":
        raise StoreError(
            f"{objects.root}: expected the store to refuse a second create of one object, found that it overwrote it; "
            "use a store that enforces If-None-Match on PUT"
        )


@contextlib.contextmanager
def temporary_folder(parent: str | None = None) -> Iterator[Path]:
    """A folder for work files that is gone afterwards. BATCH_ASSETS_WORKDIR chooses the disk."""
    with tempfile.TemporaryDirectory(
        prefix="batch-assets-", dir=parent or os.environ.get("BATCH_ASSETS_WORKDIR")
    ) as folder:
        yield Path(folder)
