"""Objects in a folder, in S3 or in Google Cloud Storage: opened by an address, and tested before anything rests on
them.

The interface is object_interface.py; local_objects.py is a folder, bucket_objects.py a bucket.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from resources.objects.gcs_objects import GcsObjects
from resources.objects.local_objects import LocalObjects
from resources.objects.object_interface import CorruptObject, ObjectInfo, Objects, StoreError
from resources.objects.s3_objects import S3Objects

__all__ = [
    "CorruptObject",
    "GcsObjects",
    "LocalObjects",
    "ObjectInfo",
    "Objects",
    "S3Objects",
    "StoreError",
    "bucket_address",
    "checked_root",
    "open_for_sensor",
    "open_objects",
    "self_test",
    "temporary_folder",
]

_BUCKETS = {"s3": S3Objects, "gs": GcsObjects}
# Of a sensor, whose tick must end within 60 s whatever the store does.
SENSOR_RETRY_SECONDS, SENSOR_REQUEST_SECONDS = 5.0, 10.0


def open_objects(root: str, *, retry_seconds: float = 180.0, request_seconds: float = 60.0) -> Objects:
    """Objects below `root`: `s3://bucket/prefix`, `gs://bucket/prefix`, `file:///folder` or a folder.

    `retry_seconds`: how long a request to S3 is tried again; `request_seconds`: how long one try may take. Short where
    somebody waits for an answer: a call ends after about the sum of both.

    S3 credentials and endpoint come from boto3's usual chain and AWS_ENDPOINT_URL, those of Google Cloud Storage from
    GOOGLE_APPLICATION_CREDENTIALS; they are never part of the root.
    """
    try:
        parts = urlsplit(root)
    except ValueError:
        raise StoreError("store root: expected a folder or s3://bucket/prefix, found what cannot be read") from None
    if (bucket := _BUCKETS.get(parts.scheme)) is not None:
        if not parts.netloc or {"@", ":"} & set(parts.netloc) or "?" in root or "#" in root:
            raise StoreError(
                f"store root: expected {parts.scheme}://bucket/prefix, found {parts.scheme}://…; keys belong in the "
                "environment"
            )
        return bucket(parts.netloc, parts.path.strip("/"), retry_seconds, request_seconds)
    if parts.scheme == "file":
        return LocalObjects(Path(parts.path))
    if parts.scheme and len(parts.scheme) > 1:
        raise StoreError(
            f"store root: expected a folder or s3://bucket/prefix (gs:// too), found scheme {parts.scheme!r}"
        )
    return LocalObjects(Path(root))


def bucket_address(path: str) -> tuple[str, str, str] | None:
    """Scheme, bucket and key of an address in a bucket, as `s3://bucket/key`; None for any other path."""
    scheme, found, rest = path.partition("://")
    if not found or scheme.lower() not in _BUCKETS:
        return None
    bucket, _, key = rest.partition("/")
    return scheme.lower(), bucket, key


def open_for_sensor(root: str) -> Objects:
    """The same for a sensor: a bucket that answers with errors, or not at all, costs it some 20 s at most."""
    return open_objects(root, retry_seconds=SENSOR_RETRY_SECONDS, request_seconds=SENSOR_REQUEST_SECONDS)


def checked_root(root: str) -> str:
    """The same root. Raises StoreError when nothing can be opened there: it may hold a secret that nobody is to see."""
    open_objects(root)
    return root


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
