"""The objects below a folder of others, as objects of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from resources.objects.object_interface import LARGEST_OBJECT, ObjectInfo, Objects


class ObjectsBelow:
    """`of`, below one of its folders: paths begin there."""

    def __init__(self, of: Objects, folder: str) -> None:
        self._of, self._folder = of, folder.strip("/")
        self.root = f"{of.root}/{self._folder}"

    def _path(self, path: str) -> str:
        return f"{self._folder}/{path}"

    def create(self, path: str, data: bytes) -> bool:
        return self._of.create(self._path(path), data)

    def put(self, path: str, data: bytes) -> None:
        self._of.put(self._path(path), data)

    def upload(self, path: str, file: Path) -> None:
        self._of.upload(self._path(path), file)

    def get(self, path: str, most: int = LARGEST_OBJECT) -> bytes:
        return self._of.get(self._path(path), most)

    def exists(self, path: str) -> bool:
        return self._of.exists(self._path(path))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        for info in self._of.list(self._path(prefix), self._path(start_after) if start_after else ""):
            yield self._own(info)

    def delete(self, paths: Iterable[str]) -> None:
        self._of.delete(self._path(path) for path in paths)

    def delete_many(self, paths: Sequence[str]) -> None:
        self._of.delete_many([self._path(path) for path in paths])

    def abandoned(self, before: float) -> Iterator[ObjectInfo]:
        own = (info for info in self._of.abandoned(before) if info.path.startswith(f"{self._folder}/"))
        return map(self._own, own)

    def _own(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, path=info.path.removeprefix(f"{self._folder}/"))

    def open(self, path: str) -> BinaryIO:
        return self._of.open(self._path(path))

    def uri(self, path: str) -> str:
        return self._of.uri(self._path(path)) if path else self._of.uri(self._folder)

    def storage_options(self) -> dict[str, str]:
        return self._of.storage_options()
