"""Objects in an S3 bucket, through obstore.

A create is one PUT with `If-None-Match: *` (never multipart: Ceph RGW does not enforce the condition on
CompleteMultipartUpload).
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from resources.objects.object_interface import LARGEST_OBJECT, ObjectInfo, StoreError, refuse_large

if TYPE_CHECKING:
    from obstore.store import S3Store


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


def _s3_endpoint() -> str | None:
    """Address of an S3 server that is not Amazon's. Raises StoreError for one with a secret in it: errors show it."""
    name = "AWS_ENDPOINT_URL_S3" if os.environ.get("AWS_ENDPOINT_URL_S3") else "AWS_ENDPOINT_URL"
    found = os.environ.get(name)
    if found and {"@", "?", "#"} & set(found):
        raise StoreError(f"{name}: expected an address without user, password, query or fragment")
    return found


def _s3_region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
