"""Objects in a bucket, through obstore: what S3 and Google Cloud Storage have in common.

A create is one PUT with a condition (never multipart: Ceph RGW does not enforce it on CompleteMultipartUpload).
"""

from __future__ import annotations

import contextlib
import datetime
import io
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from resources.objects.object_interface import LARGEST_OBJECT, ObjectInfo, StoreError, refuse_large
from resources.objects.ranged_file import RangedFile


class BucketObjects:
    """Objects below a prefix of a bucket. `scheme`: of its addresses."""

    scheme = ""

    def __init__(self, bucket: str, prefix: str, retry_seconds: float = 180.0, request_seconds: float = 60.0) -> None:
        self.bucket, self.prefix = bucket, prefix
        self._timeout = datetime.timedelta(seconds=request_seconds)
        self._retry: Any = {"max_retries": 8, "retry_timeout": datetime.timedelta(seconds=retry_seconds)}
        self.root = f"{self.scheme}://{bucket}/{prefix}".rstrip("/")
        self._store_handle: Any = None

    def _opened(self) -> Any:
        """The bucket's store of obstore."""
        raise NotImplementedError

    @property
    def _store(self) -> Any:
        if self._store_handle is None:
            self._store_handle = self._opened()
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
        return bytes(found.bytes()) if size <= most else refuse_large(path, size, most)

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
                modified = meta["last_modified"].timestamp()
                yield ObjectInfo(meta["path"], meta["size"], meta["e_tag"] or "", modified)

    def abandoned(self, before: float) -> Iterator[ObjectInfo]:
        return iter(())  # of multipart uploads the bucket's rule AbortIncompleteMultipartUpload takes care

    def delete(self, paths: Iterable[str]) -> None:
        import obstore

        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, path)

    def delete_many(self, paths: Sequence[str]) -> None:
        import obstore

        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, list(paths))

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_Object(self, path), buffer_size=1 << 16))

    def uri(self, path: str) -> str:
        return f"{self.root}/{path}"

    def storage_options(self) -> dict[str, str]:
        raise NotImplementedError


class _Object(RangedFile):
    """An object as a seekable file: every read is one ranged GET."""

    def __init__(self, objects: BucketObjects, path: str) -> None:
        import obstore

        super().__init__(obstore.head(objects._store, path)["size"])
        self._objects, self._path = objects, path

    def read_range(self, start: int, length: int) -> memoryview:
        import obstore

        return memoryview(obstore.get_range(self._objects._store, self._path, start=start, length=length))
