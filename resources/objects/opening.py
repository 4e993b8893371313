"""Objects on a local folder or in S3: opened by an address, and tested before anything rests on them.

The interface is object_interface.py; local_objects.py is a folder, s3_objects.py a bucket.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from resources.objects.local_objects import LocalObjects
from resources.objects.object_interface import CorruptObject, ObjectInfo, Objects, StoreError
from resources.objects.s3_objects import S3Objects

__all__ = [
    "CorruptObject",
    "LocalObjects",
    "ObjectInfo",
    "Objects",
    "S3Objects",
    "StoreError",
    "checked_root",
    "open_for_sensor",
    "open_objects",
    "self_test",
    "temporary_folder",
]

# Of a sensor, whose tick must end within 60 s whatever the store does.
SENSOR_RETRY_SECONDS, SENSOR_REQUEST_SECONDS = 5.0, 10.0


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
